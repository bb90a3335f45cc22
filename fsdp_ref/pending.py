"""A collective that has been asked for: what it is called, and the wait until its result may be used. collectives.py makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import ledger, world
from .clock import stamp
from .ledger import Lane


@dataclass(frozen=True)
class Label:
    """What a collective is for: the unit it serves and the phase it runs in ("forward", "backward", "checkpoint", ...)."""

    unit: str = ""
    phase: str = ""


class Pending:
    """A collective on its way. Keep it until `wait` has been called: it holds the buffers that are being read and written."""

    def __init__(self, arrive: Callable[[], object] | None, what: str, sequence: int, label: Label, keep: tuple[torch.Tensor, ...],
                 event: torch.cuda.Event | None = None) -> None:
        self._arrive, self._what, self._sequence, self._label = arrive, what, sequence, label
        self._keep, self._event = keep, event

    def wait(self) -> None:
        """Return when the result may be used by the current thread (CPU) or stream (CUDA). May be called again.

        Raises:
            RankError: a rank died, never arrived, or called something else; raised within the process group's time limit.
        """
        if self._event is not None:
            stream = torch.cuda.current_stream()
            before = stamp(stream) if ledger.active() else None
            stream.wait_event(self._event)
            if before is not None:
                ledger.add_event(Lane.WAIT, self._what, self._label.unit, self._label.phase, before, stamp(stream))
        elif self._arrive is not None:
            begin = ledger.now()
            try:
                self._arrive()
            except RuntimeError as error:
                raise world.explain_failure(error, self._what, self._sequence) from error
            ledger.add_event(Lane.WAIT, self._what, self._label.unit, self._label.phase, begin, ledger.now())
        self._arrive = self._event = None
        self._keep = ()
