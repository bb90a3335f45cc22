"""fsdp_ref: Fully Sharded Data Parallel and the ZeRO stages, readable, measured and visible.

Names are loaded when they are first used, so that `import fsdp_ref` and `fsdp-ref --help` do not wait for torch.
"""

import importlib
import os

_HOMES = {
    "engine": ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "data_parallel", "fully_shard",
               "register_fsdp_forward_method", "share_comm_ctx", "wrap"],
    "placements": ["DDP", "HSDP", "ZERO1", "ZERO2", "ZERO3", "Placements"],
    "ledger": ["Ledger", "record"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ["checkpoint", "collectives", "contrast", "data", "engine", "fp8", "lab", "ledger", "models", "placements", "plan", "preemption",
            "viz", "world"]

__version__ = "0.1.0"
__all__ = [*_HOME_OF, *_MODULES]


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"fsdp_ref.{_HOME_OF[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fsdp_ref.{name}")
    else:
        raise AttributeError(f"module 'fsdp_ref' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if os.environ.get("FSDP_REF_CHECK_CALLS", "0") not in ("", "0"):        # for scripts: have all their collectives compared
    importlib.import_module("fsdp_ref.guard").install()
