"""Harness: several steps on one flat tensor; after each, what `flat` holds and which bytes are alive."""

from torch.utils._pytree import tree_leaves


def run(function, case, rank):
    """The evidence: a list with one entry a step. Bytes: `state` those of the tensors in the dictionary, `largest` of the largest of them,
    `beside` all others that were made and are alive."""
    flat, gradients, state, steps = case["flat"], case["gradients"], {}, []
    meter = rank.meter()
    meter.know(flat, *gradients)
    while gradients:
        rank.mark(f"step {len(steps) + 1}")
        with meter:
            function(flat, gradients.pop(0), state, rank.rank, rank.world, case["lr"])
        given = sum(tensor.untyped_storage().nbytes() for tensor in (flat, *gradients))
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tree_leaves(state)
                    if hasattr(tensor, "untyped_storage")}
        held = sum(storages.values())
        steps.append({"flat": flat.detach().clone(), "state": held, "largest": max(storages.values(), default=0),
                      "beside": max(0, meter.live() - given - held)})
    return {"steps": steps}
