"""The exercise `unequal_tokens` (notebook 04): the gradient of the mean over all tokens, when ranks hold unequally many."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .gradients import judge_gradients, most_bytes
from .observe import Evidence
from .report import Verdict


def cases(seed: int) -> Iterator[Case]:
    """Three tokens against five, then drawn numbers, then a rank with none."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    drawn = [draw.randint(1, 5000) for _ in range(4)]
    if len(set(drawn)) == 1:
        drawn[0] += 1
    for tokens, shapes in (([3, 5], [(4,), (2, 3)]), (drawn[:3], [(5, 3), (7,), ()]), ([*drawn[:2], 0, drawn[3]], [(3, 5), (11,)])):
        grads = [[torch.randn(shape, generator=make) * bool(count) for shape in shapes] for count in tokens]
        yield Case(len(tokens), f"{len(tokens)} ranks with {', '.join(map(str, tokens))} tokens",
                   each=[{"grads": mine, "tokens": count} for mine, count in zip(grads, tokens, strict=True)],
                   known={"grads": grads, "tokens": tokens})


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Values against the weighted mean; bytes against one all-reduce of everything."""
    grads, tokens = case.known["grads"], case.known["tokens"]
    world, total = len(tokens), sum(tokens)
    columns = list(zip(*grads, strict=True))
    weighted = [sum(each.double() * count for each, count in zip(column, tokens, strict=True)) for column in columns]
    expected = [(each / total).float() for each in weighted]

    def everywhere(made: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return [[each.float() for each in made]] * world

    mistakes = {
        "the mean of the ranks' means: a rank with few tokens counts as much as one with many":
            everywhere([sum(column) / world for column in columns]),
        "weighted by tokens, but divided by the number of ranks": everywhere([each / world for each in weighted]),
        "the sum over all tokens, not divided by their number": everywhere(weighted),
        "the sum of the ranks' means": everywhere([sum(column) for column in columns]),
        "divided by the number of this rank's own tokens": [[(each / max(count, 1)).float() for each in weighted] for count in tokens],
        "this rank's own gradient in the right proportion, but the others' are missing":
            [[each * count / total for each in mine] for mine, count in zip(grads, tokens, strict=True)],
    }
    size = sum(each.numel() * 4 for each in grads[0])
    most = 2 * (world - 1) * (size + 16) // world + 16 * world
    return [judge_gradients(evidence, expected, grads, mistakes),
            most_bytes(evidence, most, "reduce the gradients once, and one number more")]


EXERCISE = Exercise(
    id="unequal_tokens", notebook="04", title="The mean over all tokens, not the mean of means",
    task="grads is the list of this rank's gradients, each of the mean loss over this rank's own tokens (zeros where it has none); "
         "tokens is how many it has. Change the tensors of the list in place: on every rank they must hold the gradient of the mean loss "
         "over the tokens of all ranks.",
    signature="def unequal_tokens(grads, tokens, rank, world, dist):",
    points={"values": 3, "no hang": 1, "bytes": 1},
    hints=("One rank has 1 token, another 5. How much must one token of each count in the end, and how much does it count in the mean "
           "of the two means?",
           "Turn each mean back into a sum: multiply by tokens. Sums over ranks may be added.",
           "Multiply, add over all ranks, divide by the number of tokens of all ranks, which takes an addition over ranks too. A rank "
           "without tokens must take part in every call."),
    cases=cases, judge=judge, stops={"mismatch": "no hang"})
