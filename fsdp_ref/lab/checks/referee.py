"""Carries the ranks' messages to each other, and so knows what each sent, who waits for whom, and when nobody can go on.

    send / recv     matched in order for each pair of ranks
    collectives     the k-th of one rank with the k-th of all others; other calls, sizes, dtypes or roots end the run at once
    deadlock        every rank that still runs waits, and nothing is left that could answer one of them

Sums are made in rank order, in the tensors' own dtype. This module must never wait, and never believe a message: a rank may send anything.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch

from .inside.frames import BadMessage
from .observe import Event, Evidence, Failure, RankEvidence, short

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier")
EVENTS = 20_000                     # of one run; more is a loop


@dataclass
class Call:
    """One rank's part in a collective."""

    number: int
    op: str
    tensor: torch.Tensor
    reduce: str
    root: int | None

    def __str__(self) -> str:
        if self.op == "barrier":
            return "barrier"
        extra = ", ".join(each for each in (self.reduce, "" if self.root is None else f"root {self.root}") if each)
        return f"{self.op} of {self.tensor.numel()} {short(self.tensor.dtype)}{f' ({extra})' if extra else ''}"

    def differs(self, other: Call) -> str:
        """What is not the same in both, in one word; empty when they fit."""
        sized = self.op not in ("barrier", "scatter") and self.op == other.op
        pairs = (("operation", self.op, other.op), ("reduction", self.reduce, other.reduce), ("root", self.root, other.root),
                 ("dtype", self.tensor.dtype, other.tensor.dtype), ("size", self.tensor.numel() * sized, other.tensor.numel() * sized))
        return next((name for name, mine, theirs in pairs if mine != theirs), "")


@dataclass
class Referee:
    """The state of one run. `answers` holds what is to be sent: rank -> messages."""

    world: int
    evidence: Evidence = field(init=False)
    answers: dict[int, list[dict]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.evidence = Evidence(self.world, [RankEvidence() for _ in range(self.world)])
        self._calls: dict[int, dict[int, Call]] = defaultdict(dict)         # collective number -> rank -> its part
        self._count = [0] * self.world
        self._mail: dict[tuple[int, int], deque] = defaultdict(deque)       # (from, to) -> tensors nobody has taken yet
        self._asked: dict[tuple[int, int], deque] = defaultdict(deque)      # (from, to) -> requests nothing has come for yet
        self._open: list[dict[int, str]] = [{} for _ in range(self.world)]  # rank -> request -> what it is
        self._waits: list[int | None] = [None] * self.world
        self._step = [""] * self.world
        self._ended = [False] * self.world

    # -- what the sandbox tells -----------------------------------------------------------------------------------------------------

    def hear(self, rank: int, message: object) -> None:
        """One message of one rank.

        Raises:
            BadMessage: it is none that a rank sends.
        """
        if not isinstance(message, dict) or not isinstance(message.get("do"), str) or self._ended[rank]:
            raise BadMessage("a message that no rank sends")
        handler = getattr(self, f"_on_{message['do']}", None)
        if handler is None or len(self.evidence.events) > EVENTS:
            raise BadMessage("an unknown message" if handler is None else f"more than {EVENTS} messages")
        handler(rank, message)

    def end(self, rank: int) -> None:
        """This rank's line is closed."""
        self._ended[rank], self._waits[rank] = True, None

    @property
    def over(self) -> bool:
        """Whether every rank has ended, or the run has failed."""
        return self.evidence.failure is not None or all(self._ended)

    def look(self) -> None:
        """Find out whether anybody can still go on."""
        running = [rank for rank in range(self.world) if not self._ended[rank]]
        if self.over or not running or any(self._waits[rank] is None for rank in running):
            return
        self.note_waits()
        if any(rank.error is not None for rank in self.evidence.ranks) or any(
                self._ended[rank] and not self.evidence.ranks[rank].returned for rank in range(self.world)):
            for rank in running:
                self.end(rank)                               # they wait in vain for one that has failed; that one is the story
            return
        told = "; ".join(f"rank {rank} waits for {self.evidence.ranks[rank].waits}" for rank in running)
        gone = [rank for rank in range(self.world) if self._ended[rank]]
        left = f"; {'rank' if len(gone) == 1 else 'ranks'} {', '.join(map(str, gone))} returned already" if gone else ""
        self.fail("deadlock", f"nobody can go on: {told}{left}", running[0])

    def note_waits(self) -> None:
        """Write down what each rank waits for now."""
        for rank, number in enumerate(self._waits):
            if number is not None:
                self.evidence.ranks[rank].waits = self._open[rank].get(number, "an answer")

    def fail(self, kind: str, words: str, rank: int | None = None) -> None:
        """End the run; the first reason counts."""
        if self.evidence.failure is None:
            self.note_waits()
            self.evidence.failure = Failure(kind, words, rank)

    # -- messages -------------------------------------------------------------------------------------------------------------------

    def _on_ready(self, rank: int, message: dict) -> None:
        self.evidence.ranks[rank].ready = True

    def _on_mark(self, rank: int, message: dict) -> None:
        self._step[rank] = str(message.get("name"))[:100]
        self._log(rank, "mark")

    def _on_denied(self, rank: int, message: dict) -> None:
        if len(self.evidence.ranks[rank].denied) < 20:
            self.evidence.ranks[rank].denied.append(str(message.get("what"))[:200])

    def _on_result(self, rank: int, message: dict) -> None:
        mine = self.evidence.ranks[rank]
        mine.value, mine.returned = message.get("value"), True
        mine.threads = message["threads"] if type(message.get("threads")) is int else 0
        self.end(rank)

    def _on_error(self, rank: int, message: dict) -> None:
        line = message.get("line")
        self.evidence.ranks[rank].error = {key: str(message.get(key))[:500] for key in ("type", "text", "code")} | {
            "line": line if type(line) is int else 0}
        self.end(rank)

    def _on_wait(self, rank: int, message: dict) -> None:
        if _number(message) in self._open[rank]:
            self._waits[rank] = message["number"]

    def _on_send(self, rank: int, message: dict) -> None:
        number, peer, tensor = _number(message), self._peer(message), _tensor(message)
        self._log(rank, "send", tensor, peer)
        self._open[rank][number] = f"rank {peer} to take what it sent"
        self._mail[rank, peer].append((tensor, number))
        self._deliver(rank, peer)

    def _on_recv(self, rank: int, message: dict) -> None:
        number, peer = _number(message), self._peer(message)
        self._log(rank, "recv", None, peer)
        self._open[rank][number] = f"a message from rank {peer}"
        self._asked[peer, rank].append(number)
        self._deliver(peer, rank)

    def _deliver(self, source: int, target: int) -> None:
        mail, asked = self._mail[source, target], self._asked[source, target]
        while mail and asked:
            tensor, sent = mail.popleft()
            self._answer(target, asked.popleft(), tensor)
            self._answer(source, sent, None)

    def _on_all(self, rank: int, message: dict) -> None:
        op, place = message.get("op"), self._count[rank]
        if op not in KINDS:
            raise BadMessage("an unknown collective")
        tensor = torch.empty(0) if op == "barrier" else _tensor(message)
        root = self._peer({"peer": message["root"]}) if "root" in message else None
        call = Call(_number(message), op, tensor, str(message.get("reduce", ""))[:20], root)
        self._count[rank] += 1
        self._log(rank, op, tensor, root, call.reduce)
        self._open[rank][call.number] = f"all ranks at its collective number {place + 1} ({call})"
        calls = self._calls[place]
        calls[rank] = call
        first = min(calls)
        other = next((other for other in sorted(calls) if calls[other].differs(calls[first])), None)
        if other is not None:
            self.fail("mismatch", f"another {calls[other].differs(calls[first])} at collective number {place + 1}: rank {first} calls "
                                  f"{calls[first]}, rank {other} calls {calls[other]}", other)
        elif len(calls) == self.world:
            self._complete(self._calls.pop(place))

    def _complete(self, calls: dict[int, Call]) -> None:
        try:
            results = combine([calls[rank] for rank in range(self.world)])
        except (RuntimeError, ValueError) as error:
            self.fail("mismatch", f"{calls[0]} cannot be done: {str(error).splitlines()[0]}")
            return
        for rank, result in enumerate(results):
            self._answer(rank, calls[rank].number, result)

    def _answer(self, rank: int, number: int, value: torch.Tensor | None) -> None:
        self._open[rank].pop(number, None)
        self.answers[rank].append({"number": number, "value": value})
        if self._waits[rank] == number:
            self._waits[rank] = None

    def _log(self, rank: int, kind: str, tensor: torch.Tensor | None = None, peer: int | None = None, reduce: str = "") -> None:
        size = (short(tensor.dtype), tensor.numel(), tensor.numel() * tensor.element_size()) if tensor is not None else ("", 0, 0)
        self.evidence.events.append(Event(rank, kind, self._step[rank], *size, peer, reduce))

    def _peer(self, message: dict) -> int:
        peer = message.get("peer")
        if type(peer) is not int or not 0 <= peer < self.world:
            raise BadMessage("a message to a rank that is not there")
        return peer


def combine(calls: list[Call]) -> list[torch.Tensor]:
    """The result of a collective for each rank, flat. `calls` fit each other and are in rank order.

    Raises:
        RuntimeError, ValueError: the reduction or the size is impossible.
    """
    op, root, world = calls[0].op, calls[0].root, len(calls)
    flat = [call.tensor.reshape(-1) for call in calls]
    nothing = torch.empty(0)
    if op == "all_reduce":
        return [reduce(flat, calls[0].reduce)] * world
    if op == "reduce":
        return [reduce(flat, calls[0].reduce) if rank == root else nothing for rank in range(world)]
    if op == "broadcast":
        return [flat[root]] * world
    if op == "all_gather":
        return [torch.cat(flat)] * world
    if op == "gather":
        return [torch.cat(flat) if rank == root else nothing for rank in range(world)]
    if op == "barrier":
        return [nothing] * world
    if op == "scatter":
        return _parts(flat[root], world)
    if op == "reduce_scatter":
        return _parts(reduce(flat, calls[0].reduce), world)
    parts = [_parts(each, world) for each in flat]                               # all_to_all
    return [torch.cat([parts[source][rank] for source in range(world)]) for rank in range(world)]


def reduce(flat: list[torch.Tensor], how: str) -> torch.Tensor:
    """Combine tensors element by element, in rank order.

    Raises:
        ValueError: the reduction is unknown.
    """
    if how not in ("sum", "avg", "max", "min", "product"):
        raise ValueError(f"the reduction {how!r} is unknown; use sum, avg, max, min or product")
    result = flat[0].clone()
    for each in flat[1:]:
        if how in ("sum", "avg"):
            result += each
        elif how == "product":
            result *= each
        else:
            result = torch.maximum(result, each) if how == "max" else torch.minimum(result, each)
    return result / len(flat) if how == "avg" else result


def _parts(flat: torch.Tensor, world: int) -> list[torch.Tensor]:
    if flat.numel() % world:
        raise ValueError(f"{flat.numel()} elements do not divide by {world} ranks")
    return list(flat.reshape(world, -1))


def _number(message: dict) -> int:
    if type(message.get("number")) is not int:
        raise BadMessage("a message without a number")
    return message["number"]


def _tensor(message: dict) -> torch.Tensor:
    if not isinstance(message.get("tensor"), torch.Tensor):
        raise BadMessage("a message without a tensor")
    return message["tensor"]
