"""fsdp_ref: Fully Sharded Data Parallel and the ZeRO stages, readable, measured and visible."""
