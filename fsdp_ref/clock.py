"""One clock for CPU and GPU: a moment on a CUDA stream is an event now and a number of seconds once the device has passed it.

torch is imported only where a stream is given: whoever reads a ledger or draws it does not wait for torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CudaStamp:
    """A moment on a CUDA stream, in the seconds of `time.perf_counter` once `seconds` is asked for (which waits for the device).

    The first stamp of a process ties the two clocks together: the device is idle at that moment, so event and counter agree.
    """

    _base: tuple[float, torch.cuda.Event] | None = None

    def __init__(self, stream: torch.cuda.Stream) -> None:
        import torch
        if CudaStamp._base is None:
            torch.cuda.synchronize()
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(stream)
            origin.synchronize()
            CudaStamp._base = (time.perf_counter(), origin)
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds(self) -> float:
        """The moment on the host's clock."""
        self._event.synchronize()
        seconds, origin = CudaStamp._base
        return seconds + origin.elapsed_time(self._event) / 1e3


def stamp(stream: torch.cuda.Stream | None = None) -> float | CudaStamp:
    """This moment: on the host (no stream) or on `stream`."""
    return time.perf_counter() if stream is None else CudaStamp(stream)


def resolve(moment: float | CudaStamp) -> float:
    """The moment in seconds; waits for the device if it has not come there yet."""
    return moment.seconds() if isinstance(moment, CudaStamp) else moment
