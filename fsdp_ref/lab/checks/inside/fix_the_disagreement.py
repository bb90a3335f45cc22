"""Harness: runs the learner's loop over this rank's own losses."""


def run(function, case, rank):
    """The evidence: the line that was named, the means and the steps with a save."""
    import torch.distributed as dist
    return {"result": function(list(case["losses"]), rank.rank, rank.world, dist)}
