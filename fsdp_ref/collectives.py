"""The only door to torch.distributed's collectives: every call is labelled, counted, recorded, and bounded in time.

The engine, the checkpoint and the lab call these functions and nothing else, so one place knows what goes over the wire.
A call returns a `Pending`; `wait()` makes the result safe to use. On the CPU (gloo) the work runs on a background thread and
`wait` blocks; on CUDA it is queued on `stream` and `wait` makes the current stream wait for an event, without blocking Python.
A failure becomes a `RankError` that names the rank at fault (see `world.explain_failure`). Every rank must make the same calls
in the same order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import ledger, world
from .clock import stamp
from .ledger import Lane

# torch 2.13 renamed all_gather_into_tensor; the old name warns there and the new one is missing before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_sequence: Counter[str] = Counter()          # collectives of each group so far; the same on every rank that is in step


@dataclass(frozen=True)
class Label:
    """What a collective is for: the unit it serves and the phase it runs in ("forward", "backward", "checkpoint", ...)."""

    unit: str = ""
    phase: str = ""


class Pending:
    """A collective on its way. Keep it until `wait` has been called: it holds the buffers that are being read and written."""

    def __init__(self, work: dist.Work | None, what: str, sequence: int, label: Label, keep: tuple[torch.Tensor, ...],
                 event: torch.cuda.Event | None = None) -> None:
        self._work, self._what, self._sequence, self._label = work, what, sequence, label
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
        elif self._work is not None:
            begin = ledger.now() if ledger.active() else 0.0
            try:
                self._work.wait()
            except RuntimeError as error:
                raise world.explain_failure(error, self._what, self._sequence) from error
            if begin:
                ledger.add_event(Lane.WAIT, self._what, self._label.unit, self._label.phase, begin, ledger.now())
        self._work = self._event = None
        self._keep = ()


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, label: Label,
               stream: torch.cuda.Stream | None = None) -> Pending:
    """Everyone's `shard`, in rank order, in everyone's `output` (shape `(n * len,)` from `(len,)`). Moves (n-1)/n of `output`.

    rank 0 [1 2], rank 1 [7 8]  ->  both [1 2 7 8]
    """
    return _issue(Lane.ALL_GATHER, lambda: _all_gather(output, shard, group=group, async_op=True),
                  output, (output, shard), group, label, stream)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: Label, *,
                   op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG, stream: torch.cuda.Stream | None = None) -> Pending:
    """This rank's slice of the sum (or mean) of everyone's `source`: `(n * len,)` in, `(len,)` out. `source` is overwritten.

    rank 0 [1 2 3 4] + rank 1 [5 6 7 8]  ->  rank 0 [6 8], rank 1 [10 12]      (op=SUM)

    [Note: gloo's reduce-scatter] On gloo, torch's reduce-scatter clones its input, all-reduces the clone and copies a slice out
    (same bits, measured). We all-reduce in place and let the caller read the slice: without the clone it took half the time
    (82 -> 38 ms for 16 MB on 4 ranks). `output` may then be `source`'s own slice, which saves the copy too.
    """
    if source.is_cuda:
        return _issue(Lane.REDUCE_SCATTER, lambda: _reduce_scatter(output, source, op=op, group=group, async_op=True),
                      source, (output, source), group, label, stream)
    rank = dist.get_rank(group)
    own = source.view(dist.get_world_size(group), -1)[rank]
    pending = _issue(Lane.REDUCE_SCATTER, lambda: dist.all_reduce(source, op=op, group=group, async_op=True),
                     source, (output, source), group, label, stream)
    if own.data_ptr() == output.data_ptr():
        return pending
    return _Copying(pending, lambda: output.view(-1).copy_(own))


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, label: Label, *,
               op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG, stream: torch.cuda.Stream | None = None) -> Pending:
    """The sum (or mean) of everyone's `tensor`, in place, on every rank. Moves 2(n-1)/n of it.

    rank 0 [1 2 3 4] + rank 1 [5 6 7 8]  ->  both [6 8 10 12]      (op=SUM)
    """
    return _issue(Lane.ALL_REDUCE, lambda: dist.all_reduce(tensor, op=op, group=group, async_op=True),
                  tensor, (tensor,), group, label, stream)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, label: Label, source: int = 0) -> None:
    """Everyone's `tensor` becomes that of rank `source` of the group; returns when it has."""
    _issue(Lane.OTHER, lambda: dist.broadcast(tensor, group_src=source, group=group, async_op=True),
           tensor, (tensor,), group, label, None).wait()


def gather_json(value: object, group: dist.ProcessGroup | None = None, label: Label = Label(phase="control")) -> list:
    """Every rank's `value` (anything `json.dumps` takes), in rank order, on every rank. For small facts: votes, digests, ledgers."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    group = group or dist.group.WORLD
    device = control_device(group)
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    mine = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
    _issue(Lane.OTHER, lambda: _all_gather(lengths, mine, group=group, async_op=True), lengths, (mine,), group, label, None).wait()
    width = int(lengths.max())
    padded = torch.zeros(width, dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload
    everyone = torch.zeros(size * width, dtype=torch.uint8, device=device)
    _issue(Lane.OTHER, lambda: _all_gather(everyone, padded, group=group, async_op=True), everyone, (padded,), group, label, None).wait()
    rows = everyone.view(size, width).cpu()
    return [json.loads(bytes(rows[rank, : int(lengths[rank])].tolist())) for rank in range(size)]


def barrier(group: dist.ProcessGroup | None = None, label: Label = Label(phase="control")) -> None:
    """Return when every rank has come here. Raises RankError naming the missing rank when the time limit is over."""
    gather_json(0, group, label)


def gather_ledgers(mine: ledger.Ledger, group: dist.ProcessGroup | None = None) -> ledger.Ledger:
    """The merged ledger of all ranks, on every rank (call it on every rank, after the recording has ended)."""
    return ledger.Ledger.merge([ledger.Ledger.from_json(data) for data in gather_json(mine.to_json(), group)])


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small tensors must live for this group: the CPU where it has a CPU backend, else the current GPU."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def reset_sequence() -> None:
    """Forget the counters (a new world starts at 0)."""
    _sequence.clear()


class _Copying(Pending):
    """A pending collective with a local copy to make once it is done."""

    def __init__(self, inner: Pending, finish: Callable[[], object]) -> None:
        self._inner, self._finish = inner, finish

    def wait(self) -> None:
        self._inner.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


def _issue(lane: Lane, call: Callable[[], dist.Work], message: torch.Tensor, keep: tuple[torch.Tensor, ...],
           group: dist.ProcessGroup, label: Label, stream: torch.cuda.Stream | None) -> Pending:
    """Start one collective: count it, label it, record it."""
    sequence = _sequence[group.group_name]
    _sequence[group.group_name] += 1
    what = f"{lane} of {label.unit or 'the whole world'} ({label.phase})"
    nbytes = message.numel() * message.element_size()
    facts = (lane, str(lane), label.unit, label.phase, nbytes, dist.get_world_size(group), sequence)
    try:
        if message.is_cuda:
            return _issue_cuda(call, what, sequence, label, keep, stream, facts)
        begin = ledger.now()
        work = call()
    except RuntimeError as error:
        raise world.explain_failure(error, what, sequence) from error
    if ledger.active():
        work.get_future().add_done_callback(lambda _: _record(facts, begin, ledger.now()))
    return Pending(work, what, sequence, label, keep)


def _issue_cuda(call: Callable[[], dist.Work], what: str, sequence: int, label: Label, keep: tuple[torch.Tensor, ...],
                stream: torch.cuda.Stream | None, facts: tuple) -> Pending:
    """Queue a collective on `stream` (default: the current one); the returned event marks its end on the device."""
    stream = stream or torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        begin = stamp(stream) if ledger.active() else None
        call().wait()                                       # NCCL: makes `stream` wait, not this thread
        event = torch.cuda.Event()
        event.record(stream)
        if begin is not None:
            _record(facts, begin, stamp(stream))
    return Pending(None, what, sequence, label, keep, event)


def _record(facts: tuple, begin, end) -> None:
    lane, name, unit, phase, nbytes, size, sequence = facts
    ledger.add_event(lane, name, unit, phase, begin, end, nbytes, size, sequence)
