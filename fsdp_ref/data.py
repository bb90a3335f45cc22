"""The training text as bytes, and a loader that can stop anywhere and continue with the very next window.

The text is cut into windows of `context` bytes (each with the byte that follows as the last target); the last twentieth of it
is held out and never trained on. Which window is sample number k depends on the seed and k alone, not on how many ranks share
the work, so a run can change its world size and still see the same text in the same order. This module must never import
torch.distributed, draw from a global random generator, or change its order with the number of ranks.

[Note: where an epoch ends] Samples are numbered 0, 1, 2, ... without end; with n windows, sample k is window
`order(seed, k // n)[k % n]`. A batch that reaches over the end of an epoch takes its rest from the beginning of the next. So
each epoch has each window exactly once, also when the batch does not divide it, and nothing is dropped or repeated.

[Note: batches made ahead] With `prefetch` a thread makes the next batches while this one is trained on. They lie under the number of
their first sample and wait to be asked for. The position counts what was handed out and nothing else, so a state taken at any moment
continues with the batch that `next` would have given, made ahead or not.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import xxhash

from .errors import DataError

LIMIT = 64 * 2**20          # bytes; a longer text is cut here, and `Corpus.cut` says so
HELD_OUT = 0.05             # share of the text, at its end, that is never trained on
# Parts of the standard library that are tests, tables, prose, or not always installed.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip",
                      "encodings", "pydoc_data", "__pycache__"})


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text.

    Attributes:
        data: all of its bytes, `(n,)` uint8.
        source: what it was read from, for people.
        files: how many files it has.
        cut: True when the text was longer than `LIMIT` and its end was left out.
    """

    data: np.ndarray
    source: str
    files: int
    cut: bool = False

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the bytes: two corpora with the same digest are the same text."""
        return xxhash.xxh3_128_hexdigest(self.data.data)

    @property
    def train(self) -> np.ndarray:
        """The bytes to train on, `(n,)` uint8."""
        return self.data[: len(self.data) - int(len(self.data) * HELD_OUT)]

    @property
    def held_out(self) -> np.ndarray:
        """The bytes at the end that are never trained on, `(n,)` uint8."""
        return self.data[len(self.train):]

    def check(self, context: int) -> None:
        """Raise DataError unless both parts hold at least one window of `context` bytes and the byte after it."""
        for name, part in (("training", self.train), ("held-out", self.held_out)):
            if len(part) <= context:
                raise DataError(f"{self.source} is too small: its {name} part has {len(part)} bytes and one window takes {context + 1}; "
                                "use a longer text or a smaller --context")


def load(source: str | os.PathLike | None = None) -> Corpus:
    """The text of a file, of all text files under a folder, or (None) of this Python's own standard library.

    Files of a folder come in the order of their relative path; hidden ones, links to folders, and files with a zero byte near
    their start (no text) are left out. At most `LIMIT` bytes are read.

    Raises:
        DataError: the path does not exist, cannot be read, is no file or folder, or holds no text.
    """
    root = Path(source) if source is not None else Path(sysconfig.get_path("stdlib"))
    name = str(source) if source is not None else "the Python standard library"
    try:
        mode = root.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot open the text {root} ({error.strerror}); give --data a file or a folder of text files") from error
    if stat.S_ISDIR(mode):
        paths = sorted(_stdlib_files(root) if source is None else _files_under(root), key=lambda path: path.relative_to(root).as_posix())
        parts, cut = _read_all(paths, skip_binary=True)
    elif stat.S_ISREG(mode):
        parts, cut = _read_all([root], skip_binary=False)
    else:
        raise DataError(f"{root} is neither a file nor a folder; give --data a file or a folder of text files")
    if not any(parts):
        raise DataError(f"there is no text in {root}; give --data a file or a folder with some")
    return Corpus(np.frombuffer(b"".join(parts), dtype=np.uint8), name, len(parts), cut)


def _stdlib_files(root: Path) -> Iterator[Path]:
    return (path for path in _files_under(root, LEFT_OUT) if path.suffix == ".py")


def _files_under(root: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Plain files below `root`, without hidden files and folders, and without what has a name in `left_out`."""
    def fail(error: OSError) -> None:
        raise DataError(f"cannot look into {error.filename} ({error.strerror}); make it readable or choose another --data")

    for folder, inner, names in os.walk(root, onerror=fail):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in left_out]
        names = [name for name in names if not name.startswith(".") and name not in left_out]
        yield from (path for name in names if (path := Path(folder, name)).is_file())


def _read_all(paths: list[Path], skip_binary: bool) -> tuple[list[bytes], bool]:
    """The files' bytes, up to LIMIT in all; True when there was more."""
    parts: list[bytes] = []
    left = LIMIT
    for path in paths:
        try:
            with open(path, "rb") as file:
                part = file.read(left + 1)
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}); make it readable or choose another --data") from error
        if skip_binary and b"\0" in part[:8192]:
            continue
        parts.append(part[:left])
        if len(part) > left:
            return parts, True
        left -= len(part)
    return parts, False


def unigram_entropy(data: np.ndarray | bytes) -> float:
    """Nats a byte that the best model pays which knows how often each byte occurs and nothing else (Shannon 1948).

    >>> round(unigram_entropy(b"abab"), 4)      # ln 2
    0.6931
    """
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, windows: int) -> np.ndarray:
    """The order of the windows in one epoch: a permutation of `range(windows)`, `(windows,)` int64.

    The raw output of numpy's PCG64 is the part of numpy.random that is promised to be the same in every version (NEP 19); sorting
    by it is a shuffle that a checkpoint of today still finds tomorrow.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(windows), kind="stable")


class Loader:
    """An endless stream of training windows; one loader a rank, all at the same position.

    >>> corpus = Corpus(np.arange(200, dtype=np.uint8), "numbers", 1)
    >>> one, two = (Loader(corpus, context=4, batch=4, rank=r, ranks=2) for r in (0, 1))
    >>> x0, x1 = one.next()[0], two.next()[0]     # each rank gets its half of the same global batch
    >>> x0.shape, bool((x0 == x1).any())
    ((2, 4), False)
    """

    def __init__(self, corpus: Corpus, *, context: int, batch: int, seed: int = 0, rank: int = 0, ranks: int = 1,
                 prefetch: int = 0) -> None:
        """`batch` is the global batch in windows; `prefetch` how many batches a thread makes ahead, see [Note: batches made ahead].

        Raises:
            DataError: the text is too small, the batch cannot be cut into `ranks` equal parts, or `prefetch` is negative.
        """
        corpus.check(context)
        if batch < 1 or batch % ranks:
            raise DataError(f"a batch of {batch} windows cannot be shared equally by {ranks} ranks; make it a multiple of {ranks}")
        if prefetch < 0:
            raise DataError(f"prefetch is {prefetch} batches; give 0 or more")
        self.corpus, self.context, self.batch, self.seed, self.rank, self.ranks = corpus, context, batch, seed, rank, ranks
        self.text = corpus.train
        self.windows = (len(self.text) - 1) // context      # window i: bytes [i*context, (i+1)*context], the last one only as a target
        self.sample = 0                                     # the next sample's number, counted over all epochs
        self.prefetch = prefetch
        self._maker = ThreadPoolExecutor(1, "fsdp-ref-loader") if prefetch else None
        self._ahead: dict[int, Future] = {}                 # first sample -> a batch that is being made

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.sample // self.windows

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """This rank's part of the next global batch: inputs and targets, each `(batch / ranks, context)` int64."""
        first = self.sample
        self.sample += self.batch
        if self._maker is None:
            return self._make(first)
        for ahead in range(first, first + (self.prefetch + 1) * self.batch, self.batch):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._maker.submit(self._make, ahead)
        return self._ahead.pop(first).result()

    def _make(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's part of the global batch that begins with sample `first`."""
        share = self.batch // self.ranks
        first += self.rank * share
        return cut_windows(self.text, [self.window(sample) for sample in range(first, first + share)], self.context)

    def window(self, sample: int) -> int:
        """Which window is sample number `sample`: the whole order in one line (see [Note: where an epoch ends])."""
        return int(order(self.seed, sample // self.windows, self.windows)[sample % self.windows])

    def state_dict(self) -> dict:
        """The position: the same on every rank, whatever the world size or batch."""
        return {"format": 1, "seed": self.seed, "epoch": self.epoch, "index": self.sample % self.windows, "windows": self.windows,
                "context": self.context, "digest": self.corpus.digest}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was taken; a loader of another world size or batch may do so too.

        Raises:
            DataError: the state is of another text, context or seed, or is no loader state; the position has not changed.
        """
        own = self.state_dict()
        if not isinstance(state, dict) or set(state) != set(own) or state["format"] != 1:
            raise DataError("this is not the position of a loader (format 1); resume from a checkpoint that fsdp_ref wrote")
        if state["digest"] != own["digest"]:
            raise DataError(f"the saved position belongs to another text than {self.corpus.source} (digest {state['digest']}, here "
                            f"{own['digest']}); give --data the text of the first run (each Python version has its own standard library)")
        for key in ("context", "seed", "windows"):
            if state[key] != own[key]:
                raise DataError(f"the saved position was made with {key} {state[key]} and this run has {own[key]}; use the same {key}")
        epoch, index = state["epoch"], state["index"]
        if not (type(epoch) is int and type(index) is int and epoch >= 0 and 0 <= index < self.windows):
            raise DataError(f"the saved position (epoch {epoch!r}, index {index!r}) does not exist in {self.windows} windows; "
                            "resume from another checkpoint")
        self.sample = epoch * self.windows + index
        self._ahead.clear()


def cut_windows(text: np.ndarray, windows: list[int], context: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of the given windows of `text`, each `(len(windows), context)` int64."""
    starts = np.asarray(windows, dtype=np.int64)[:, None] * context + np.arange(context + 1)      # (B, context + 1)
    rows = text[starts].astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def held_out_windows(corpus: Corpus, context: int, most: int) -> list[int]:
    """At most `most` windows, evenly spread over the held-out part: the same ones in every evaluation of every run."""
    total = (len(corpus.held_out) - 1) // context
    count = min(most, total)
    return [i * total // count for i in range(count)]
