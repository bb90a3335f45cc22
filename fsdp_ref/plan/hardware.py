"""Machines: hardware.toml as values. Each figure keeps its source, and the traps of datasheets stand beside them.

A file of the user's own, in the same form, may add machines or replace them (`fsdp-ref plan calibrate --out mine.toml` writes one).
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ..errors import ConfigError
from .quantities import at_least, pick, table

FIGURES = ("flops", "matmul", "memory", "hbm", "link", "nic", "per_node")
NETWORK = ("link_share", "nic_share", "hop_link", "hop_nic", "base", "pcie", "host")


@dataclass(frozen=True)
class Machine:
    """A kind of node: see hardware.toml for the figures' meaning. `sources` names where each comes from."""

    name: str
    flops: float
    matmul: float
    memory: float
    hbm: float
    link: float
    nic: float
    per_node: int
    link_share: float
    nic_share: float
    hop_link: float
    hop_nic: float
    base: float
    pcie: float = 5.54e10
    host: float = 2.5e10
    sources: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        rates = ("flops", "memory", "hbm", "link", "nic", "per_node", "pcie", "host")
        at_least(1e-12, 1e24, **{name: getattr(self, name) for name in rates})
        at_least(0.01, 1, matmul=self.matmul, link_share=self.link_share, nic_share=self.nic_share)
        at_least(0, 10, hop_link=self.hop_link, hop_nic=self.hop_nic, base=self.base)

    def __str__(self) -> str:
        rows = [("figure", "value", "source")]
        rows += [(name, f"{getattr(self, name):.4g}", self.sources.get(name, "given")) for name in (*FIGURES, *NETWORK)]
        return f"{self.name}\n{table(rows, right=(1,))}"


@functools.cache
def _file() -> dict:
    return tomllib.loads(resources.files(__package__).joinpath("hardware.toml").read_text(encoding="utf-8"))


def traps() -> dict[str, str]:
    """What datasheets lead people to: by name, a sentence each."""
    return dict(_file()["traps"])


def machines(extra: str | Path | None = None) -> dict[str, Machine]:
    """Every known machine by name, with those of the user's file `extra`.

    Raises:
        ConfigError: the file cannot be read, or a figure is missing or absurd.
    """
    found = {name: _machine(name, rows) for name, rows in _file()["machine"].items()}
    if extra is not None:
        try:
            rows = tomllib.loads(Path(extra).read_text(encoding="utf-8")).get("machine", {})
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the hardware file {extra} ({error}); give a TOML file like the one that "
                              "fsdp-ref plan calibrate writes") from error
        found |= {name: _machine(name, figures) for name, figures in rows.items()}
    return found


def machine(name: str | Machine, extra: str | Path | None = None) -> Machine:
    """The named machine. Raises ConfigError, offering the nearest names, when it is unknown."""
    if isinstance(name, Machine):
        return name
    known = machines(extra)
    return known[pick("GPU or machine", name, known)]


def _machine(name: str, figures: dict) -> Machine:
    merged = {**_file()["network"], **figures}
    unknown = set(merged) - {*FIGURES, *NETWORK}
    missing = {*FIGURES, *NETWORK} - set(merged)
    if unknown or missing:
        raise ConfigError(f"machine {name!r} of the hardware file has {'unknown' if unknown else 'no'} "
                          f"{', '.join(sorted(unknown or missing))}; the figures are {', '.join((*FIGURES, *NETWORK))}")
    try:
        sources = {key: row["source"] for key, row in merged.items()}
        return Machine(name, **{key: row["value"] for key, row in merged.items()}, sources=sources)
    except (KeyError, TypeError):
        raise ConfigError(f"machine {name!r} of the hardware file has a figure without value or source; write each as "
                          '{ value = 1e12, source = "..." }') from None
