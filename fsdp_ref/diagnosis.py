"""The catalogue of diagnoses: from what is left after a failure to one sentence that a student understands, and what to do about it.

    rank 1 raised ValueError, ranks 0 and 2 "never arrived" ...   ->   exception: rank 1 raised ValueError: no file (line 3 of the cell);
                                                                       ranks 0 and 2 waited for it in all-reduce of grad

Evidence goes in, a `Diagnosis` comes out: nothing is read, asked or waited for here, and torch is not imported. The lab gathers evidence
from its pool (lab/report.py), the training command from torch elastic (launch.py), graders from either. The root cause comes first; what
other ranks raised for want of it is folded into half a sentence, never told on top.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .catalogue import ADVICE, PHRASES, Kind
from .words import how_it_died, name_ranks, ranks_in


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong, on which ranks, in a sentence without a full stop, and what to do about it."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str
    follow: str = ""

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.sentence, self.follow, self.advice)))


@dataclass(frozen=True)
class Raised:
    """An exception on one rank: its type's name, its text, and the line of the program (`line 3 of the cell`) where it came from."""

    name: str
    text: str
    place: str = ""


@dataclass(frozen=True)
class Running:
    """A rank that was still at work: the line where it is, the collective of torch.distributed it waits in (if it does), and the
    loop around the line."""

    place: str = ""
    waits_in: str = ""
    loop: str = ""


@dataclass(frozen=True)
class Evidence:
    """What is known of each rank. A rank that came to its end well is in `finished`."""

    raised: dict[int, Raised] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)             # rank -> exit status of a process that is gone
    running: dict[int, Running] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    last_words: str = ""                                            # what the first dead rank wrote at its end
    after: float = 0.0                                              # seconds until we stopped waiting
    interrupted: bool = False
    pids: tuple[int, ...] = ()


# What a collective raises when a peer is gone or never came, seen from torch itself (programs may call torch.distributed directly).
_GROUP_ERRORS = ("RankError", "DistBackendError", "DistNetworkError", "DistStoreError")
_GROUP_WORDS = ("gloo", "nccl", "Connection closed by peer", "Timed out waiting", "pair closure", "process group has not been initialized",
                "earlier message of this group failed")
_MEMORY_WORDS = ("can't allocate memory", "out of memory", "not enough memory")
_DISAGREE = "the ranks disagree about collective number"


def is_group_error(name: str, text: str) -> bool:
    """Whether this exception comes from a collective that failed, which may be another rank's fault."""
    return name in _GROUP_ERRORS or name == "RuntimeError" and any(word in text for word in _GROUP_WORDS)


def is_disagreement(name: str, text: str) -> bool:
    """Whether this is what every rank is told of calls that differ, before anything was sent."""
    return name == "RankError" and text.startswith(_DISAGREE)


def names_the_cause(text: str) -> bool:
    """Whether what a rank says of a failed collective names the ranks that did not come, or the calls that differ."""
    return text.startswith(_DISAGREE) or "never arrived" in text


def diagnose(evidence: Evidence) -> Diagnosis:
    """The root cause, in the order in which one thing leads to another: a rank that raised, died, disagreed, or never came."""
    own = {rank: each for rank, each in sorted(evidence.raised.items()) if not is_group_error(each.name, each.text)}
    told = [each.text for each in evidence.raised.values() if each.name == "RankError"]
    found = _of_models(own) or _of_deaths(evidence) or _of_errors(own) or _of_calls(told)
    if found is None and evidence.interrupted:
        places = _places(evidence.running)
        found = Diagnosis(Kind.INTERRUPT, tuple(evidence.running), f"interrupted after {evidence.after:.0f} s{places and f' ({places})'}")
    found = found or _of_absence(told) or _of_waiting(evidence) or _of_torch(evidence)
    return replace(found, follow=_follow(evidence, found))


def _of_models(own: dict[int, Raised]) -> Diagnosis | None:
    for kind in (Kind.SEED, Kind.MODEL):
        text = next((each.text for each in own.values() if each.name == "ConfigError" and PHRASES[kind] in each.text), "")
        if text:
            return Diagnosis(kind, tuple(ranks_in(text[text.index("rank "):])), text.rpartition("; ")[0])
    return None


def _of_deaths(evidence: Evidence) -> Diagnosis | None:
    """A process that is gone. Of several, those that were killed for another's sake (SIGTERM) come last."""
    ended = {rank: status for rank, status in sorted(evidence.ended.items()) if status != -15} or evidence.ended
    if not ended:
        return None
    pids = {rank: f" (pid {evidence.pids[rank]})" if evidence.pids else "" for rank in ended}
    sentence = "; ".join(f"rank {rank}{pids[rank]} {how_it_died(status)}" for rank, status in ended.items())
    first = next(iter(ended.values()))
    if first >= 0:
        kind = Kind.EXIT
    elif first == -6:
        kind = Kind.ABORT
        if cause := re.search(r"(\[enforce fail|what\(\):|terminate called).*", evidence.last_words):
            sentence += f" ({cause[0][:200]})"
    else:
        kind = Kind.SIGNAL
        sentence += ": killed from outside, or by the system when memory ran out" if first == -9 else ""
    return Diagnosis(kind, tuple(ended), sentence)


def _of_errors(own: dict[int, Raised]) -> Diagnosis | None:
    if not own:
        return None
    causes = []
    for error in dict.fromkeys((each.name, each.text) for each in own.values()):
        ranks = [rank for rank, each in own.items() if (each.name, each.text) == error]
        place = own[ranks[0]].place
        causes.append(f"{name_ranks(ranks)} raised {error[0]}: {error[1]}{place and f' (at {place})'}")
    first = next(iter(own.values()))
    memory = first.name in ("MemoryError", "OutOfMemoryError") or any(word in first.text for word in _MEMORY_WORDS)
    kind = Kind.MEMORY if memory else Kind.EXIT if first.name == "SystemExit" else Kind.EXCEPTION
    return Diagnosis(kind, tuple(own), "; ".join(causes))


def _of_calls(told: Iterable[str]) -> Diagnosis | None:
    """What fingerprint.py found out: the ranks in the minority are named."""
    text = next((text for text in told if text.startswith(_DISAGREE)), "")
    if not text:
        return None
    sentence = text.rpartition("; every rank must")[0]
    likely = re.search(r" \((?!sum|avg|max|min|src|dst)([^()]*(?:\([^()]*\)[^()]*)*)\)$", sentence)
    reason = likely[1] if likely else ""
    kind = next((kind for kind, phrase in PHRASES.items() if phrase in reason), Kind.ORDER)
    if kind is Kind.ORDER and "in the loop" in reason:
        kind = Kind.BRANCH
    groups = [ranks_in(each) for each in re.findall(r"(?:: |; )(ranks? [\d, and]+): ", sentence)]
    named = ranks_in(reason) if kind in (Kind.SAVING, Kind.EXTRA, Kind.HANDLER) else min(reversed(groups), key=len, default=[])
    return Diagnosis(kind, tuple(named), sentence)


def _of_absence(told: Iterable[str]) -> Diagnosis | None:
    """What world.explain_failure found out about a rank that did not come."""
    for text in sorted(told, key=lambda text: "died while" not in text):
        sentence = text.split("; every rank must")[0].split("; look at")[0]
        ranks = tuple(ranks_in(text))
        if "never came to" in text and " raised " in text:
            return Diagnosis(Kind.EXCEPTION, ranks, sentence)
        if "died while" in text:
            return Diagnosis(Kind.SIGNAL, ranks, sentence)
        if re.search("never (came to|arrived at)|did not run the first forward", text):
            return Diagnosis(_absent_kind(text), ranks, sentence)
        if "the ranks disagree: " in text:
            pairs = re.findall(r"was in (\w+)", text)
            deadlock = bool(pairs) and set(pairs) <= {"send", "recv"}
            return Diagnosis(Kind.DEADLOCK if deadlock else Kind.OPERATION, tuple(sorted(map(int, re.findall(r"rank (\d+) was in", text)))),
                             sentence)
    return None


def _absent_kind(text: str) -> Kind:
    _, _, awaited = text.replace("never came to", "never arrived at").partition("never arrived at ")
    if re.match(r"(send|recv)\b", awaited):
        return Kind.DEADLOCK
    if "checkpoint" in awaited.split(" (collective")[0] or "(checkpoint)" in awaited:
        return Kind.SAVING
    if re.search(r"; rank \d+ is at [^;]*, in the loop `", awaited):
        return Kind.LOOP
    if PHRASES[Kind.BRANCH] in awaited:
        return Kind.BRANCH
    return Kind.EXIT if "can leave the function" in awaited or "came to the end" in text else Kind.MISSING


def _of_waiting(evidence: Evidence) -> Diagnosis | None:
    """Ranks that had to be stopped: those that wait in a collective wait for the others, who are elsewhere or have finished."""
    if not evidence.running:
        return None
    astray = {rank: each for rank, each in evidence.running.items() if not each.waits_in}
    ranks = tuple(sorted(astray or evidence.running))
    sentence = f"{name_ranks(ranks)} did not finish within {evidence.after:.0f} s ({_places({r: evidence.running[r] for r in ranks})})"
    if astray:
        return Diagnosis(Kind.LOOP if any(each.loop for each in astray.values()) else Kind.SLOW, ranks, sentence)
    if {each.waits_in for each in evidence.running.values()} <= {"send", "recv"} and len(ranks) > 1:
        return Diagnosis(Kind.DEADLOCK, ranks, f"{name_ranks(ranks)} wait for each other ({_places(evidence.running)})")
    if evidence.finished:
        absent = tuple(sorted(evidence.finished))
        return Diagnosis(Kind.MISSING, absent, f"{name_ranks(absent)} came to the end without the call in which {name_ranks(ranks)} still "
                         f"waited after {evidence.after:.0f} s ({_places(evidence.running)})")
    return Diagnosis(Kind.SLOW, ranks, sentence)


def _of_torch(evidence: Evidence) -> Diagnosis:
    """Only errors of torch itself are left: a collective that the others did not join."""
    if not evidence.raised:
        return Diagnosis(Kind.UNKNOWN, (), "nothing is known of the failure")
    ranks = tuple(sorted(evidence.raised))
    each = evidence.raised[ranks[0]]
    text = (each.text.splitlines() or [each.name])[0]
    if each.name == "RankError":
        return Diagnosis(Kind.UNKNOWN, ranks, text.split("; every rank must")[0])
    return Diagnosis(Kind.UNKNOWN, ranks, f"{name_ranks(ranks)} waited in a collective{each.place and f' at {each.place}'} that the others "
                     f"did not join, or joined with another size or operation ({text})")


def _places(running: dict[int, Running]) -> str:
    """Where each of these ranks is."""
    return "; ".join(f"rank {rank} is {_where(each)}" for rank, each in sorted(running.items()))


def _where(each: Running) -> str:
    inside = f"in {each.waits_in} " if each.waits_in else ""
    loop = f", in the loop {each.loop}" if each.loop else ""
    return inside + (f"at {each.place}" if each.place else "in a library") + loop


def _follow(evidence: Evidence, found: Diagnosis) -> str:
    """What the cause did to the other ranks, in half a sentence."""
    if found.kind in (Kind.MODEL, Kind.SEED) or _DISAGREE in found.sentence:
        return ""                                           # every rank has said the same
    failed = [rank for rank, each in evidence.raised.items() if is_group_error(each.name, each.text) and rank not in found.ranks]
    waiting = {rank: each for rank, each in evidence.running.items() if each.waits_in and rank not in found.ranks}
    told = []
    if failed and found.kind in (Kind.EXCEPTION, Kind.MEMORY, Kind.EXIT, Kind.SIGNAL, Kind.ABORT):
        told.append(f"{name_ranks(failed)} then failed in a collective for want of the others")
    if waiting and found.kind is not Kind.MISSING:
        told.append(f"{name_ranks(waiting)} waited for it ({_places(waiting)})")
    return "; ".join(told)
