"""What a wrong number looks like: sentences that name the mistake, found by comparing with what typical mistakes give.

    difference(actual, expected, what="rank 0's gradient", unlike={"the un-reduced local gradient": local})

Exact comparison (`tolerance=0`) is for results that are copied, or made by the same arithmetic; else `bound` gives one from the dtype. This
module must never print an expected value of a case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .observe import tensor_like

RATIOS = (2, 3, 4, 6, 8, 9, 12, 16)


@dataclass(frozen=True)
class Difference:
    """The first difference: words for the learner, and the place (element index) where there is one."""

    words: str
    element: int | None = None


def bound(expected: torch.Tensor, terms: int = 1) -> float:
    """How far a correct result may be off when `terms` numbers are added in any order in the expected tensor's dtype."""
    if not expected.dtype.is_floating_point or not expected.numel():
        return 0.0
    return 4 * max(1, terms) * torch.finfo(expected.dtype).eps * max(float(expected.double().abs().max()), 1e-3)


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape and differ by no more than the tolerance; NaN equals nothing."""
    if actual.shape != expected.shape:
        return False
    return bool(((actual.double() - expected.double()).abs() <= tolerance).all()) if actual.numel() else True


def difference(actual: object, expected: torch.Tensor, *, what: str = "the result", tolerance: float = 0.0,
               unlike: Mapping[str, torch.Tensor] | None = None, world: int = 0) -> Difference | None:
    """None when `actual` is right, else what is wrong with it.

    Args:
        what: begins the sentence ("rank 1's result").
        tolerance: the largest difference that is allowed.
        unlike: description -> the tensor that a typical mistake gives; the first that fits is told, before anything general.
        world: the number of ranks, to call a ratio of that size a sum instead of a mean.
    """
    if wrong := tensor_like(actual, expected.shape, expected.dtype):
        for told, other in (unlike or {}).items():
            if isinstance(actual, torch.Tensor) and actual.shape == other.shape and actual.dtype == other.dtype and near(
                    actual, other, max(tolerance, 0)):
                return Difference(f"{what} is {told} ({wrong})")
        return Difference(f"{what}: {wrong}")
    if near(actual, expected, tolerance):
        return None
    for told, other in (unlike or {}).items():
        if near(actual, other, tolerance):
            return Difference(f"{what} is {told}", _first(actual, expected, tolerance))
    general = _general(actual, expected, tolerance, world)
    first = _first(actual, expected, tolerance)
    if general:
        return Difference(f"{what} {general}", first)
    many = int(((actual.double() - expected.double()).abs() > tolerance).sum())
    return Difference(f"{what} is wrong in {max(many, 1)} of {expected.numel()} elements, first at element {first}", first)


def _first(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> int:
    wrong = ~((actual.double() - expected.double()).abs() <= tolerance).reshape(-1)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else 0


def _general(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, world: int) -> str:
    """What can be said without knowing the exercise."""
    if actual.dtype.is_floating_point and not bool(actual.isfinite().all()):
        return "holds NaN or infinity"
    if bool((actual == 0).all()):
        return "is all zeros"
    for ratio in dict.fromkeys((world, *RATIOS)):
        if ratio > 1 and near(actual, expected * ratio, tolerance * ratio):
            why = ": summed, not averaged" if ratio == world else ""
            return f"is exactly {ratio:.2f} times the reference{why}"
        if ratio > 1 and expected.dtype.is_floating_point and near(actual, expected / ratio, tolerance):
            why = ": averaged once more than it should be" if ratio == world else ""
            return f"is exactly 1/{ratio} of the reference{why}"
    if near(actual, -expected, tolerance):
        return "has the wrong sign everywhere"
    if actual.dim() and (shift := _shift(actual, expected, tolerance)):
        return f"has the right pieces, shifted by {shift} along the first dimension"
    if near(actual.reshape(-1).sort().values, expected.reshape(-1).sort().values, tolerance):
        return "has the right numbers in another order"
    return ""


def _shift(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> int:
    for shift in range(1, min(actual.shape[0], 65)):
        if near(actual, expected.roll(shift, 0), tolerance):
            return shift
    return 0
