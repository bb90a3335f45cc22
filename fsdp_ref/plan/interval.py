"""How often to checkpoint when machines fail or are taken away: Young's and Daly's interval, expected lost work, and its price.

With a save that stops training for d seconds and a failure every M seconds on average, a run that saves every t seconds loses d/t of its
time to saving and (t/2 + d + r)/M to failures (half an interval of work, a save, and r to come back). The best
t is Daly's (fsdp_ref/interval.py).

[Note: many machines] N machines that each fail every m hours fail every m/N hours together. Llama 3's 16,384 GPUs had 419 unexpected
interruptions in 54 days (arXiv 2407.21783, section 3.3.4): one in 3.1 hours, so one GPU in about 50,000 hours.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..interval import daly
from .quantities import at_least, seconds
from .strategy import DTYPES


@dataclass(frozen=True)
class Interval:
    """`every` seconds between saves; `saving` and `failing` are the shares of time lost to each; `lost` seconds a failure costs."""

    every: float
    save: float
    mtbf: float
    saving: float
    failing: float
    lost: float
    price_per_hour: float | None = None

    @property
    def overhead(self) -> float:
        """The share of the time that is lost in all."""
        return self.saving + self.failing

    def __str__(self) -> str:
        text = (f"checkpoint every {seconds(self.every)} (Daly; a save takes {seconds(self.save)}, a failure comes every "
                f"{seconds(self.mtbf)}): {100 * self.saving:.1f} % of the time goes into saves, {100 * self.failing:.1f} % into lost work "
                "and restarts; "
                f"a failure costs {seconds(self.lost)}")
        if self.price_per_hour is not None:
            text += f", {self.lost / 3600 * self.price_per_hour:,.2f} at {self.price_per_hour:,.2f} an hour for all machines"
        return text


def checkpoint_bytes(parameters: float, dtypes: str = "fsdp") -> float:
    """Bytes that a save writes: weights, master copy and moments; gradients are not saved.

    Megatron-LM's 1T checkpoint of 13.8 TB is 13.7 bytes a parameter: 14 by this rule (2 + 4 + 8).
    """
    row = DTYPES[dtypes]
    return parameters * (row.weights + row.master + row.moments)


def interval(save: float, mtbf: float, restart: float = 0.0, price_per_hour: float | None = None) -> Interval:
    """The best interval for a save of `save` seconds and a failure every `mtbf` seconds; `restart` seconds to be back at work.

    Raises:
        ConfigError: times that are not positive.
    """
    at_least(1e-6, 1e9, save=save, mtbf=mtbf)
    at_least(0, 1e9, restart=restart)
    every = max(daly(save, mtbf), save)
    lost = every / 2 + save + restart
    return Interval(every, save, mtbf, save / every, lost / mtbf, lost, price_per_hour)
