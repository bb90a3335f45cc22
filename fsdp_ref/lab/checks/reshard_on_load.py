"""The exercise `reshard_on_load` (notebook 11): a tensor saved by N ranks, read by M; each reads its own rows alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, Picture, careful, verdicts
from .observe import Evidence
from .report import Verdict

GOOD = {"values": "every rank holds its rows, in order",
        "sharding": "no rank reads the whole tensor",
        "bytes": "each row is read once, by the rank that holds it"}


def cases(seed: int) -> Iterator[Case]:
    """Saved by 2 to 4 ranks, loaded by 2 to 4: fewer, more, uneven, with ranks that hold nothing; the list of pieces in any order."""
    draw = random.Random(seed)
    yield case_of(2, 3, [2, 2, 2, 2], 0)
    yield case_of(3, 2, [5, 5], 1)
    yield case_of(2, 4, [2, 2, 2, 1], 1 + seed % 3)
    yield case_of(4, 2, [3, 2, 0], 1 + seed % 2)
    yield case_of(3, draw.randint(1, 5), [draw.randint(1, 6) for _ in range(4)], 1 + seed % 3)


def case_of(world: int, width: int, counts: list[int], turn: int) -> Case:
    """`counts`: rows of each file. `turn`: by how many places the list is turned, so that its order is not that of the rows."""
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    pieces = [[f"rank-{index}", first, count] for index, (first, count) in enumerate(zip(firsts, counts, strict=True))]
    facts = {"rows": sum(counts), "width": width, "pieces": [*pieces[turn:], *pieces[:turn]], "offset": 1000}
    return Case(world, f"{sum(counts)} rows saved by {len(counts)} ranks, loaded by {world}", shared=facts, known=facts)


def rows_of(case: Case, first: int, count: int) -> torch.Tensor:
    """Rows of the whole tensor: every element is another number."""
    width = case.known["width"]
    return torch.arange(first * width, (first + count) * width, dtype=torch.float32).view(count, width) + case.known["offset"]


def own(case: Case, rank: int, balanced: bool = False) -> tuple[int, int]:
    """First row and number of rows of a rank, by torch.chunk's rule (`balanced`: by torch.tensor_split's)."""
    rows, world = case.known["rows"], case.world
    if balanced:
        count = rows // world + (rank < rows % world)
        return rank * (rows // world) + min(rank, rows % world), count
    each = -(-rows // world)
    first = min(rank * each, rows)
    return first, min(each, rows - first)


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong, the cause before what follows from it."""
    found = [finding for look in (_failed, _rows, _reads) for rank, seen in enumerate(evidence.values())
             for finding in look(case, rank, seen)]
    reads = [[f"{row['rows']} of {row['file']}" for row in seen["log"]] for seen in evidence.values()]
    best = [[f"{min(start + rows, first + count) - max(start, first)} of {file}"
             for file, start, rows in sorted(case.known["pieces"], key=lambda piece: piece[1])
             if start < first + count and first < start + rows] for first, count in (own(case, rank) for rank in range(case.world))]
    return verdicts(found, GOOD, Picture("rows read from each file", best, reads))


def _failed(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    outside = next((row for row in seen["log"] if not row["inside"]), None)
    if outside:
        yield Finding("values", f"{outside['file']} holds {outside['length']} rows, and {outside['rows']} from row {outside['first']} on "
                                "were asked for: read() counts rows within the file, the list of pieces "
                                "within the tensor", rank, outside["file"])
    elif seen["error"]:
        yield Finding("values", f"this rank has no rows to load and must return a tensor of shape (0, {case.known['width']}); the function "
                                f"raised {seen['error']}", rank)


def _reads(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    first, count = own(case, rank)
    read = sum(row["rows"] for row in seen["log"])
    needed = {file for file, start, rows in case.known["pieces"] if start < first + count and first < start + rows}
    elsewhere = {row["file"] for row in seen["log"] if row["rows"]} - needed
    if read >= case.known["rows"] > count and elsewhere:
        yield Finding("sharding", f"it reads all {read} rows to keep {count} of them: every rank holds the whole tensor for a moment", rank)
    if read > count:
        whole = not elsewhere and all(row["rows"] == row["length"] for row in seen["log"])
        yield Finding("bytes", f"{read} rows are read where this rank's own are {count}"
                      + (": whole files are read, and only part of each is needed" if whole else ""), rank)
    times = {row["file"]: sum(other["file"] == row["file"] for other in seen["log"]) for row in seen["log"]}
    for file, number in times.items():
        if number > 1:
            yield Finding("bytes", f"{file} is read {number} times; its rows lie together, so one read is enough", rank, file)


def _rows(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    first, count = own(case, rank)
    right, got = rows_of(case, first, count), seen["rows"]
    if seen["error"] or any(not row["inside"] for row in seen["log"]):
        return
    if not isinstance(got, torch.Tensor):
        yield Finding("values", "the function returns no tensor; return this rank's rows", rank)
    elif got.dtype != right.dtype or not torch.equal(got, right):
        yield Finding(*_why(case, rank, got, right), rank, "rows")


def _why(case: Case, rank: int, got: torch.Tensor, right: torch.Tensor) -> tuple[str, str]:
    """Property and words for rows that are not the right ones."""
    first, count = own(case, rank)
    other = rows_of(case, *own(case, rank, balanced=True))
    numbers = lambda rows: sorted(rows.flatten().tolist())  # noqa: E731
    if got.shape == (case.known["rows"], case.known["width"]) != right.shape:
        return "sharding", f"the whole tensor is returned, and rows {first} to {first + count - 1} are this rank's"
    if got.shape == other.shape and torch.equal(got, other):
        return "values", (f"this is another cut: {len(got)} rows, the remainder spread over the first ranks. torch.chunk's rule gives "
                          f"every rank ceil({case.known['rows']} / {case.world}) rows until there are no more, and this rank {count}")
    if numbers(got) == numbers(right) and got.numel():
        return "values", "the right rows in the wrong order: pieces are listed in any order, and rows must come out in theirs"
    each = case.known["rows"] // case.world
    if got.shape == (each, case.known["width"]) and torch.equal(got, rows_of(case, rank * each, each)):
        return "values", (f"{each} rows on each of {case.world} ranks are {each * case.world} of {case.known['rows']}: the remainder is "
                          "lost; round up")
    if got.shape != right.shape:
        return "values", f"{len(got) if got.dim() else 0} rows came out where this rank holds {count} (shape {tuple(right.shape)})"
    return "values", f"other rows than {first} to {first + count - 1} came out"


EXERCISE = Exercise(
    id="reshard_on_load", notebook="11", title="Load on another number of ranks",
    task="A tensor of rows x width was saved in pieces, a list of (file, first row, number of rows) in any order. Return this rank's rows: "
         "torch.chunk's rule gives every rank ceil(rows / world) of them until there are no more, so the last ranks may hold fewer or none "
         "(then the shape is (0, width)). read(file, first, count) reads rows first to first + count - 1, counted within that file. Read "
         "each row you need once, and no other.",
    signature="def reshard_on_load(rows, width, pieces, rank, world, read):",
    points={"values": 3, "sharding": 1, "bytes": 2, "no hang": 1},
    hints=("Draw the rows as a line. Above it mark who saved what, below it who loads what: which marks overlap?",
           "Two ranges [a, b) and [c, d) overlap from max(a, c) to min(b, d), if that is not empty. A file knows only rows counted from "
           "its own beginning.",
           "Go through the pieces in the order of their first rows; for each overlap read it with the file's first row taken off; join "
           "what you read. Begin the list with an empty tensor of the right width, for ranks without rows."),
    cases=cases, judge=judge)
