"""What is wrong with an answer, one sentence each: the judges of the exercises return findings, the cause before what follows from it.

A property without a finding has passed. Nothing here runs a student's code or knows how a report looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the property it fails, the diagnosis in words, and where it was seen first."""

    property: str
    words: str
    rank: int | None = None
    parameter: str | None = None
    step: int | None = None


def close(got: torch.Tensor, right: torch.Tensor, units: float = 64) -> bool:
    """Equal within `units` roundings of the dtype, relative to the largest value: the same arithmetic in another order passes."""
    if got.shape != right.shape or got.dtype != right.dtype:
        return False
    return bool(torch.isfinite(got).all()) and largest(got, right) <= bound(right, units)


def bound(right: torch.Tensor, units: float = 64) -> float:
    """The difference that `close` allows."""
    scale = float(right.abs().max()) if right.numel() else 0.0
    return units * torch.finfo(right.dtype).eps * max(scale, 1e-30)


def largest(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference."""
    if got.shape != right.shape:
        return float("inf")
    return float((got.double() - right.double()).abs().max()) if right.numel() else 0.0


def ratio(got: torch.Tensor, right: torch.Tensor) -> float | None:
    """The one number k with got = k right, if there is one."""
    if got.shape != right.shape or not right.numel() or not float(right.abs().max()):
        return None
    k = float((got.double() * right.double()).sum() / (right.double() ** 2).sum())
    return k if largest(got.double(), k * right.double()) <= bound(right) * max(1.0, abs(k)) else None
