"""Harness: forwards of a stack of units; the answer's pair of functions stands around each unit's computation."""

import torch

from .units import Watch, pair_of


def run(function, case, rank):
    """The evidence: outputs of each step, what was alive at each point, units whose weights were not there."""
    with rank.meter() as meter, torch.no_grad():
        watch = Watch(case, rank, meter)
        rank.mark("at rest")
        pairs = [pair_of(function(unit, watch.all_gather)) for unit in watch.units]
        watch.look("at rest")
        outputs, empty = [], []
        for step, x in enumerate(case["inputs"]):
            for index, (unit, (before, after)) in enumerate(zip(watch.units, pairs, strict=True)):
                rank.mark(f"step {step}, before {unit.name}")
                before()
                watch.look(f"step {step}, {unit.name} computes", x, *outputs)
                if unit.is_whole:
                    x = torch.tanh(unit.module(x))
                else:
                    empty.append([step, index])
                    x = torch.zeros(len(x), case["layers"][index][1])
                rank.mark(f"step {step}, after {unit.name}")
                after()
                watch.look(f"step {step}, after {unit.name}", x, *outputs)
            outputs.append(x)
            for unit in watch.units:
                unit.shard.add_(case["change"])                         # as an optimizer would
    return {"outputs": outputs, "log": watch.log, "empty": empty}
