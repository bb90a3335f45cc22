"""In a notebook the last line of a cell shows a picture: of a ledger its timeline, of a shard or a unit who holds which rows.

IPython is told which picture belongs to which type, by name, so neither the ledger nor the engine knows of pictures. Each bundle holds a
PNG with its words as alt text, the same as HTML (JupyterLab shows alt texts only there), and the words with the table for whoever sees no
images. An object that has nothing to draw keeps its plain text. This module must never raise: a representation that fails would hide the
object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import FsdpRefError
from ..ledger import Ledger, Shard
from ..viz import Picture, shard_map, step_timeline


def of_ledger(ledger: Ledger) -> Picture:
    """The timeline; of a ledger without events its shards."""
    return step_timeline(ledger) if any(event.phase != "mark" for event in ledger.events) else shard_map(ledger)


def of_shard(shard: Shard) -> Picture:
    """The rows one rank holds of one parameter, at their place in the whole."""
    return shard_map(Ledger(shards=[shard]))


def of_unit(unit: Any) -> Picture:
    """The rows this rank holds of every parameter of a unit."""
    from .. import ledger
    rows = [Shard(ledger.rank(), unit.name, p.name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.first, p.rows, p.chunk, p.dim)
            for p in unit.params]
    return shard_map(Ledger(shards=rows))


TYPES = {("fsdp_ref.recorded", "Ledger"): of_ledger, ("fsdp_ref.rows", "Shard"): of_shard, ("fsdp_ref.engine.unit", "Unit"): of_unit}


def install(shell: Any) -> None:
    """Teach an IPython shell the pictures of `TYPES`; harmless when it is done twice."""
    for (module, name), draw in TYPES.items():
        shell.display_formatter.mimebundle_formatter.for_type_by_name(module, name, _bundle(draw))


def _bundle(draw: Callable[[Any], Picture]) -> Callable:
    def bundle(value: Any, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        try:
            picture = draw(value)
        except FsdpRefError:
            return {"text/plain": repr(value)}, {}
        data, metadata = picture._repr_mimebundle_()
        return {**data, "text/html": picture.page_html}, metadata
    return bundle
