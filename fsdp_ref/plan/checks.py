"""One published figure beside what the planner says of it. The parts that make them: checks_memory.py, checks_time.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A figure that was published and the planner's own.

    Attributes:
        table: the file of published/ it comes from.
        what: which cell.
        published, predicted: in the same unit.
        allowed: the largest difference that agrees (0 for exact up to rounding of doubles); None for a row of the speed model, which is not
            judged alone but by the error over all rows.
    """

    table: str
    what: str
    published: float
    predicted: float
    allowed: float | None = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the figures agree within what is allowed (a row of the speed model always does)."""
        return self.allowed is None or abs(self.predicted - self.published) <= self.allowed + 1e-9 * abs(self.published)

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published if self.published else float("inf")


def last_digit(text: str) -> float:
    """One unit of the last printed digit: 41.3 -> 0.1, 257 -> 1.

    >>> last_digit("1.88"), last_digit("257")
    (0.01, 1.0)
    """
    return 10.0 ** -len(text.partition(".")[2])
