"""Harness: the loss of a chain of linear layers on this rank's batch; what the answer returns, and the bytes alive during and after it."""

import torch


def loss_of(weights, inputs):
    """The mean square of a chain of linear layers with tanh between them."""
    hidden = inputs
    for weight in weights[:-1]:
        hidden = torch.tanh(hidden @ weight)
    return (hidden @ weights[-1]).square().mean()


def run(function, case, rank):
    """The evidence: the slices; the bytes of each one's storage; how many gradients are left; the peak above what was
    alive before, and what is alive at the end beside what was given."""
    params = [weight.requires_grad_() for weight in case["weights"]]
    given = sum(tensor.untyped_storage().nbytes() for tensor in (*params, case["inputs"]))
    meter = rank.meter()
    meter.know(*params, case["inputs"])
    with meter:
        loss = loss_of(params, case["inputs"])
    meter.reset()
    before = meter.live()
    with meter:
        slices = function(loss, params, rank.rank, rank.world)
    del loss
    live, peak = meter.live() - given, meter.peak - before
    good = isinstance(slices, list | tuple) and all(isinstance(each, torch.Tensor) for each in slices)
    return {"slices": [each.detach().clone() for each in slices] if good else None, "type": type(slices).__name__,
            "storages": [each.untyped_storage().nbytes() for each in slices] if good else [],
            "left": sum(param.grad is not None for param in params), "live": live, "peak": peak}
