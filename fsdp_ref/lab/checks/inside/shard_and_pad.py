"""Harness: cut a weight, throw the weight away, put it together twice; the bytes alive after each."""

import torch


def run(function, case, rank):
    """The evidence: shard and whole weights; `alive`: bytes after cutting, and after each whole weight was thrown away."""
    given, meter = [case.pop("weight")], rank.meter()
    meter.know(given[0])
    with meter:
        pair = function(given[0], rank.rank, rank.world)
    given.clear()
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], torch.Tensor) or not callable(pair[1]):
        return {"returned": _told(pair)}
    shard, unshard = pair
    del pair
    found = {"returned": "", "alive": [meter.live()], "storage": shard.untyped_storage().nbytes(), "shard": shard.detach().clone(),
             "wholes": []}
    for number in (1, 2):
        rank.mark(f"unshard {number}")
        with meter:
            whole = unshard()
        found["wholes"].append(whole.detach().clone() if isinstance(whole, torch.Tensor) else whole)
        del whole
        found["alive"].append(meter.live())
    return found


def _told(value):
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(each).__name__ for each in value) or 'nothing'}"
    return f"a {type(value).__name__}"
