"""Harness: one call with this rank's gradient shards."""


def run(function, case, rank):
    """The evidence: the norm that was returned, and the shards afterwards."""
    shards = case["shards"]

    def all_reduce(tensor, op="sum"):
        """The sum (or maximum) over the ranks, in place."""
        if op not in ("sum", "max"):
            raise ValueError(f"all_reduce has no operation {op!r}; choose sum or max")
        rank.wire.all_reduce(tensor, op)

    returned = function(shards, list(case["real"]), case["max_norm"], float(case["norm_type"]), all_reduce)
    try:
        norm = float(returned)
    except (TypeError, ValueError):
        norm = None
    return {"norm": norm, "shards": shards}
