"""The device allocator's own figures beside the ledger's: what a GPU's allocator counted during a recording. Nothing on the CPU.

The ledger books what the engine knows; the allocator counts every byte, kernels' workspaces included. Both stand in a ledger's `meta`, so
that a picture can show the difference. torch is not imported here: a process that has not used a GPU has no figures.
"""

from __future__ import annotations

import sys
from typing import Any


class Figures:
    """Made when a recording begins; `since` gives the figures when it ends. Sets the allocator's peak back."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self._cuda: Any = torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            self._before = self._cuda.memory_allocated()

    def since(self) -> dict[str, dict[str, int]]:
        """{"allocator": bytes allocated when the recording began and when it ended, and the peaks between}; empty without a GPU."""
        if self._cuda is None:
            return {}
        return {"allocator": {"allocated_before": self._before, "allocated_after": self._cuda.memory_allocated(),
                              "peak_allocated": self._cuda.max_memory_allocated(), "peak_reserved": self._cuda.max_memory_reserved()}}
