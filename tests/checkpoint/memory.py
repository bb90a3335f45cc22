"""How much memory this process took more than before, at its peak: the kernel's own high-water mark, set back at the start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


class Growth:
    """`with Growth() as growth: ...` then `growth.bytes`."""

    def __enter__(self) -> Growth:
        if sys.platform != "linux":
            pytest.skip("the high-water mark can be set back on Linux only")
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmHWM")
        return self

    def __exit__(self, *_) -> None:
        self.bytes = _status("VmHWM") - self._before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
