"""Harness: forward and backward of a stack of units, layer by layer as autograd goes through it; the answer's pair stands around each
unit's backward."""

import torch

from .units import Watch, pair_of


def run(function, case, rank):
    """The evidence: gradient shards, what was alive after each unit's backward, units whose weights were not there."""
    with rank.meter() as meter:
        watch = Watch(case, rank, meter)
        rank.mark("at rest")
        pairs = [pair_of(function(unit, watch.all_gather, watch.reduce_scatter)) for unit in watch.units]
        empty = []
        for step, x in enumerate(case["inputs"]):
            inputs, outputs = forward(watch, rank, x)
            gradient = torch.ones_like(outputs[-1])
            for index in reversed(range(len(watch.units))):
                unit, (before, after) = watch.units[index], pairs[index]
                rank.mark(f"step {step}, before {unit.name}")
                before()
                if not unit.is_whole or not watch.homes[index].untyped_storage().nbytes():
                    return {"empty": [[step, index]], "log": watch.log, "shards": []}
                rank.mark(f"step {step}, backward of {unit.name}")
                (outputs[index] * gradient).sum().backward()           # with a gradient as argument torch would import sympy
                rank.mark(f"step {step}, after {unit.name}")
                after()
                gradient, outputs[index] = inputs[index].grad, None
                row = watch.look(f"step {step}, after {unit.name}", *own(watch, inputs, outputs, gradient))
                row["gradients"] = sum(each.grad.numel() * 4 for each in unit.module.parameters() if each.grad is not None)
    return {"empty": empty, "log": watch.log, "shards": [unit.grad_shard for unit in watch.units]}


def forward(watch, rank, x):
    """What the exercise before this one does: inputs that collect gradients, and outputs; every unit is empty afterwards."""
    inputs, outputs = [], []
    for unit in watch.units:
        rank.mark(f"forward of {unit.name}")
        unit.full.untyped_storage().resize_(unit.full.numel() * 4)
        with torch.no_grad():
            watch.all_gather(unit.full, unit.shard)
        inputs.append(x.detach().requires_grad_())
        outputs.append(torch.tanh(unit.module(inputs[-1])))
        unit.full.untyped_storage().resize_(0)
        x = outputs[-1]
    return inputs, outputs


def own(watch, inputs, outputs, gradient):
    """Tensors that are there by the harness's or the exercise's own will."""
    kept = [*inputs, *outputs, gradient, *(each.grad for each in inputs)]
    kept += [unit.grad_shard for unit in watch.units
             if isinstance(unit.grad_shard, torch.Tensor) and unit.grad_shard.numel() <= unit.shard.numel()]
    return [each for each in kept if each is not None]
