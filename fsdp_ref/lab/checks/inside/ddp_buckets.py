"""Harness: calls the answer with this rank's gradients and the size of a bucket; the gradients are changed in place."""


def run(function, case, rank):
    """The evidence: the gradients afterwards, and the largest tensor that was made."""
    import torch.distributed as dist
    grads = [grad.clone() for grad in case["grads"]]
    kept = list(grads)
    with rank.meter() as meter:
        meter.know(*kept)
        meter.reset()
        function(grads, case["bucket_bytes"], rank.rank, rank.world, dist)
        largest = meter.largest
    return {"grads": kept, "largest": largest}
