"""The only door to torch.distributed's collectives: every call is labelled, counted, recorded, and bounded in time.

The engine, the checkpoint and the lab call these functions and nothing else, so one place knows what goes over the wire.
A call returns a `Pending`; `wait()` makes the result safe to use. On the CPU (gloo) a thread carries the message and `wait` blocks
(wire.py); on CUDA it is queued on `stream` and `wait` makes the current stream wait for an event, without blocking Python.
A failure becomes a `RankError` that names the rank at fault (see `world.explain_failure`). Every rank must make the same calls
in the same order; `check_calls` finds out before anything is sent (fingerprint.py).

[Note: two routes] On gloo, messages travel directly (wire.py says why). The library's own collective is called instead on every other
backend, and wherever somebody watches torch's collectives by name: under a dispatch mode (`CommDebugMode` counts them) and when a
function of torch.distributed has been replaced (as PyTorch's own tests do). `with route("library"):` asks for it.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from . import alignment, fingerprint, ledger, wire, world
from .clock import stamp
from .errors import ConfigError
from .fingerprint import check_calls
from .ledger import Lane
from .pending import Label, Pending
from .wire import emulate

__all__ = ["Label", "Pending", "all_gather", "all_reduce", "barrier", "broadcast", "carried_by", "check_calls", "emulate", "gather_json",
           "gather_ledgers", "reduce_scatter", "route"]

# torch 2.13 renamed all_gather_into_tensor; the old name warns there and the new one is missing before.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_ORIGINALS = {name: getattr(dist, name) for name in (_ALL_GATHER, _REDUCE_SCATTER, "all_reduce")}

CONTROL = Label(phase="control")
BARRIERS = 3                                 # that align the clocks of a recording; the narrowest counts

_leaders: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_sequence: Counter[str] = Counter()          # collectives of each group so far; the same on every rank that is in step
_route = "direct"
_carrier: Carrier | None = None             # who carries messages instead of a network (plan/simulator.py)


@contextlib.contextmanager
def route(name: str) -> Iterator[None]:
    """Choose how messages travel on the CPU: "direct" (the default) or "library". [Note: two routes] Every rank must choose the same."""
    global _route
    if name not in ("direct", "library"):
        raise ConfigError(f"there is no route {name!r}; choose direct or library")
    before, _route = _route, name
    try:
        yield
    finally:
        _route = before


Carrier = Callable[[tuple, dist.ProcessGroup], Callable[[], object]]


@contextlib.contextmanager
def carried_by(carrier: Carrier) -> Iterator[None]:
    """Hand every collective to `carrier(facts, group)` instead of a network: it records it, and what it returns is called by `wait`.

    Nothing is sent; for replays on the meta device. `facts`: lane, name, unit, phase, bytes of the message, ranks, sequence.
    """
    global _carrier
    before, _carrier = _carrier, carrier
    try:
        yield
    finally:
        _carrier = before


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, label: Label,
               stream: torch.cuda.Stream | None = None) -> Pending:
    """Everyone's `shard`, in rank order, in everyone's `output` (shape `(n * len,)` from `(len,)`). Moves (n-1)/n of `output`.

    rank 0 [1 2], rank 1 [7 8]  ->  both [1 2 7 8]
    """
    return _issue(Lane.ALL_GATHER, lambda: getattr(dist, _ALL_GATHER)(output, shard, group=group, async_op=True),
                  partial(wire.all_gather, output.view(group.size(), -1), shard.view(-1), group),
                  output, (output, shard), group, label, stream)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, label: Label, *,
                   op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG, stream: torch.cuda.Stream | None = None) -> Pending:
    """This rank's slice of the sum (or mean) of everyone's `source`: `(n * len,)` in, `(len,)` out. Moves (n-1)/n of `source`.

    rank 0 [1 2 3 4] + rank 1 [5 6 7 8]  ->  rank 0 [6 8], rank 1 [10 12]      (op=SUM)
    """
    return _issue(Lane.REDUCE_SCATTER, lambda: getattr(dist, _REDUCE_SCATTER)(output, source, op=op, group=group, async_op=True),
                  _directly(wire.reduce_scatter, op, output.view(-1), source.view(group.size(), -1), group),
                  source, (output, source), group, label, stream, _name(op))


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, label: Label, *,
               op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG, stream: torch.cuda.Stream | None = None) -> Pending:
    """The sum (or mean) of everyone's `tensor`, in place, on every rank. Moves 2(n-1)/n of it.

    rank 0 [1 2 3 4] + rank 1 [5 6 7 8]  ->  both [6 8 10 12]      (op=SUM)
    """
    direct = _directly(wire.all_reduce, op, tensor.view(-1), group) if tensor.is_contiguous() else None
    return _issue(Lane.ALL_REDUCE, lambda: dist.all_reduce(tensor, op=op, group=group, async_op=True), direct,
                  tensor, (tensor,), group, label, stream, _name(op))


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, label: Label, source: int = 0) -> None:
    """Everyone's `tensor` becomes that of rank `source` of the group; returns when it has."""
    _issue(Lane.OTHER, lambda: dist.broadcast(tensor, group_src=source, group=group, async_op=True), None,
           tensor, (tensor,), group, label, None, f"broadcast from {source}").wait()


def gather_json(value: object, group: dist.ProcessGroup | None = None, label: Label = CONTROL) -> list:
    """Every rank's `value` (anything `json.dumps` takes), in rank order, on every rank. For small facts: votes, digests, ledgers."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    group = group or dist.group.WORLD
    device = control_device(group)
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    mine = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
    _gather_small(lengths, mine, group, label)
    width = int(lengths.max())
    padded = torch.zeros(width, dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload
    everyone = torch.zeros(size * width, dtype=torch.uint8, device=device)
    _gather_small(everyone, padded, group, label)
    rows = everyone.view(size, width).cpu()
    return [json.loads(bytes(rows[rank, : int(lengths[rank])].tolist())) for rank in range(size)]


def _gather_small(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, label: Label) -> None:
    """An all-gather that no picture shows: bookkeeping, not training."""
    _issue(Lane.OTHER, lambda: getattr(dist, _ALL_GATHER)(output, mine, group=group, async_op=True), None,
           output, (mine,), group, label, None).wait()


def barrier(group: dist.ProcessGroup | None = None, label: Label = CONTROL) -> None:
    """Return when every rank has come here. Raises RankError naming the missing rank when the time limit is over."""
    gather_json(0, group, label)


def gather_ledgers(mine: ledger.Ledger, group: dist.ProcessGroup | None = None) -> ledger.Ledger:
    """The merged ledger of all ranks on rank 0's clock, on every rank (call it on every rank, after the recording has ended)."""
    barriers = []
    for _ in range(BARRIERS):
        entered = ledger.now()
        barrier(group)
        barriers.append((entered, ledger.now()))
    facts = gather_json([mine.to_json(), barriers, alignment.machine()], group)
    offsets = [alignment.offset(facts[0][1], theirs, machine == facts[0][2]) for _, theirs, machine in facts]
    return ledger.Ledger.merge([ledger.Ledger.from_json(data) for data, _, _ in facts], offsets)


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small tensors must live for this group: the CPU where it has a CPU backend, else the current GPU."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def reset_sequence() -> None:
    """Forget the counters (a new world starts at 0)."""
    _sequence.clear()
    fingerprint.forget()


def counts() -> dict[str, int]:
    """How many collectives each group has begun."""
    return dict(_sequence)


def check_direct(operation: str, name: str, message: torch.Tensor, detail: str, group: dist.ProcessGroup) -> None:
    """Compare a call that does not come through this door (guard.py); returns when all ranks of `group` are about to make it.

    Raises:
        RankError: a rank makes another call, or never came.
    """
    sequence = _sequence[group.group_name]
    _sequence[group.group_name] += 1
    call = fingerprint.describe(operation, name, "", message, detail, sequence)
    try:
        fingerprint.compare(call, group)
    except RuntimeError as error:
        raise world.explain_failure(error, call.name, sequence) from error


def _name(op: dist.ReduceOp.RedOpType) -> str:
    return str(op).rpartition(".")[2].lower()


def _directly(carry: Callable, op: dist.ReduceOp.RedOpType, *args: object) -> Callable[[int], None] | None:
    """`carry` for the operations the wire knows: sum and mean."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return None
    return lambda tag: carry(*args, tag, op == dist.ReduceOp.AVG)


def _somebody_watches() -> bool:
    """Whether torch's collectives are being counted or have been replaced. [Note: two routes]"""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    for name, original in _ORIGINALS.items():
        now = getattr(dist, name)
        if now is not original and (not hasattr(now, "fsdp_ref_guards") or now.__wrapped__ is not original):
            return True
    return False


def _issue(lane: Lane, library: Callable[[], dist.Work], direct: Callable[[int], None] | None, message: torch.Tensor,
           keep: tuple[torch.Tensor, ...], group: dist.ProcessGroup, label: Label, stream: torch.cuda.Stream | None,
           detail: str = "") -> Pending:
    """Start one collective: count it, label it, have it checked, choose its route, record it."""
    sequence = _sequence[group.group_name]
    _sequence[group.group_name] += 1
    nbytes = message.numel() * message.element_size()
    facts = (lane, str(lane), label.unit, label.phase, nbytes, dist.get_world_size(group), sequence, _leader(group))
    other = lane is Lane.OTHER
    operation = detail or "exchange of facts" if other else str(lane)
    what = f"{operation} of {label.unit or 'the whole world'} ({label.phase})"
    if _carrier is not None:
        return Pending(_carrier(facts, group), what, sequence, label, keep)
    check = fingerprint.check_of(operation, label.unit, label.phase, message, "" if other else detail, sequence, group)
    begin = ledger.now()
    try:
        goes_now = message.is_cuda or direct is None or _route == "library" or _somebody_watches()
        if check is not None and goes_now:
            check()
        if message.is_cuda:
            return queue_cuda(library, what, sequence, label, keep, stream, facts)
        if "gloo" not in dist.get_backend_config(group):
            return Pending(_recorded(library().wait, facts, begin), what, sequence, label, keep)
        if goes_now:
            carry: Callable[[], object] = library().wait
        else:
            carry = partial(_checked, check, partial(direct, sequence)) if check is not None else partial(direct, sequence)
    except RuntimeError as error:
        raise world.explain_failure(error, what, sequence) from error
    done = lambda on_wire, end: write_down(facts, begin, end, on_wire)  # noqa: E731
    return Pending(wire.Wire.of(group).submit(carry, ledger.wire_bytes(lane, nbytes, facts[5]), done).result, what, sequence, label, keep)


def _leader(group: dist.ProcessGroup) -> int:
    """The lowest rank of a group, looked for once."""
    if group not in _leaders:
        _leaders[group] = min(dist.get_process_group_ranks(group))
    return _leaders[group]


def _checked(check: Callable[[], None], carry: Callable[[], object]) -> None:
    check()
    carry()


def _recorded(wait: Callable[[], object], facts: tuple, begin: float) -> Callable[[], None]:
    def arrive() -> None:
        wait()
        write_down(facts, begin, ledger.now())
    return arrive


def queue_cuda(call: Callable[[], dist.Work], what: str, sequence: int, label: Label, keep: tuple[torch.Tensor, ...],
               stream: torch.cuda.Stream | None, facts: tuple) -> Pending:
    """Queue a collective on `stream` (default: the current one); the returned event marks its end on the device."""
    stream = stream or torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        begin = stamp(stream) if ledger.active() else None
        call().wait()                                       # NCCL: makes `stream` wait, not this thread
        event = torch.cuda.Event()
        event.record(stream)
        if begin is not None:
            write_down(facts, begin, stamp(stream))
    return Pending(None, what, sequence, label, keep, event)


def write_down(facts: tuple, begin, end, on_wire: float | None = None) -> None:
    lane, name, unit, phase, nbytes, size, sequence, leader = facts
    ledger.add_event(lane, name, unit, phase, begin, end, nbytes, size, sequence, on_wire, leader)
