"""The exercise `reshard_on_load`: a tensor saved by N ranks, read by M: each reads its own rows, whatever files they lie in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .finding import Finding

PROPERTIES = ("values", "sharding", "bytes", "no hang")


def cases(seed: int) -> list[dict]:
    """`pieces`: (file, first row, rows), in no order; files may be empty."""
    return [{"world": 2, "rows": 8, "width": 3, "pieces": _saved([2, 2, 2, 2], seed, False), "seed": 1},
            {"world": 3, "rows": 10, "width": 2, "pieces": _saved([5, 5], seed, True), "seed": 2},
            {"world": 2, "rows": 7, "width": 4, "pieces": _saved([2, 2, 2, 1], seed + 1, True), "seed": 3},
            {"world": 4, "rows": 5, "width": 2, "pieces": _saved([3, 2, 0], seed + 2, True), "seed": 4}]


def _saved(counts: list[int], seed: int, shuffled: bool) -> list[list]:
    """Which file holds which rows; the last comes first, when they are shuffled, so that the order of the list is never that of the rows."""
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    pieces = [[f"rank-{index}", first, count] for index, (first, count) in enumerate(zip(firsts, counts, strict=True))]
    turn = 1 + seed % (len(counts) - 1)
    return [*pieces[turn:], *pieces[:turn]] if shuffled else pieces


def rows_of(case: dict, first: int, count: int) -> torch.Tensor:
    """Rows of the whole tensor: every element is another number."""
    width = case["width"]
    return torch.arange(first * width, (first + count) * width, dtype=torch.float32).view(count, width) + 1000 * case["seed"]


def own(case: dict, rank: int, balanced: bool = False) -> tuple[int, int]:
    """First row and number of rows of a rank, by torch.chunk's rule (`balanced`: by torch.tensor_split's)."""
    rows, world = case["rows"], case["world"]
    if balanced:
        count = rows // world + (rank < rows % world)
        return rank * (rows // world) + min(rank, rows % world), count
    each = -(-rows // world)
    first = min(rank * each, rows)
    return first, min(each, rows - first)


def run(student, case: dict, rank: int, world: int) -> dict:
    """Load on this rank; every read is written down."""
    log: list[dict] = []
    pieces = {file: (first, count) for file, first, count in case["pieces"]}

    def read(file: str, first: int, count: int) -> torch.Tensor:
        """`count` rows of a file from its row `first`, counted within the file."""
        if file not in pieces:
            raise ValueError(f"there is no file {file!r}; the files are {', '.join(sorted(pieces))}")
        start, length = pieces[file]
        inside = 0 <= first and 0 <= count and first + count <= length
        log.append({"file": file, "first": first, "rows": count, "inside": inside, "length": length})
        if not inside:
            raise ValueError(f"{file} holds {length} rows, and {count} from row {first} on were asked for")
        return rows_of(case, start + first, count)

    evidence: dict = {"log": log, "error": "", "rows": None}
    try:
        returned = student(case["rows"], case["width"], [tuple(piece) for piece in case["pieces"]], rank, world, read)
    except Exception as error:
        if own(case, rank)[1] and all(row["inside"] for row in log):
            raise
        evidence["error"] = f"{type(error).__name__}: {error}"
        return evidence
    evidence["rows"] = returned.detach() if isinstance(returned, torch.Tensor) else None
    return evidence


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    found: list[Finding] = []
    for look in (_failed, _rows, _reads):
        for rank, seen in enumerate(evidence):
            found += look(case, rank, seen)
    return found


def _failed(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    outside = next((row for row in seen["log"] if not row["inside"]), None)
    if outside:
        yield Finding("values", f"{outside['file']} holds {outside['length']} rows, and {outside['rows']} from row {outside['first']} on were "
                      "asked for: read() counts rows within the file, the list of pieces within the tensor", rank, outside["file"])
    elif seen["error"]:
        yield Finding("values", f"this rank has no rows to load and must return a tensor of shape (0, {case['width']}); the function raised "
                      f"{seen['error']}", rank)


def _reads(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    first, count = own(case, rank)
    read = sum(row["rows"] for row in seen["log"])
    if read >= case["rows"] > count:
        yield Finding("sharding", f"this rank reads all {read} rows to keep {count} of them: every rank holds the whole tensor for a moment",
                      rank)
    if read > count:
        overlap = [file for file, start, rows in case["pieces"] if start < first + count and first < start + rows]
        touched = {row["file"] for row in seen["log"] if row["rows"]}
        whole_files = touched <= set(overlap) and all(row["rows"] == row["length"] for row in seen["log"])
        yield Finding("bytes", f"{read} rows are read where this rank's own are {count}"
                      + (": whole files are read, and only part of each is needed" if whole_files else ""), rank)
    times = {row["file"]: sum(other["file"] == row["file"] for other in seen["log"]) for row in seen["log"]}
    for file, number in times.items():
        if number > 1:
            yield Finding("bytes", f"{file} is read {number} times; its rows lie together, so one read is enough", rank, file)


def _rows(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    first, count = own(case, rank)
    right, got = rows_of(case, first, count), seen["rows"]
    if seen["error"] or any(not row["inside"] for row in seen["log"]):
        return
    if got is None:
        yield Finding("values", "the function returns no tensor; return this rank's rows", rank)
    elif not torch.equal(got, right):
        yield Finding(*_why(case, rank, got, right), rank, "rows")


def _why(case: dict, rank: int, got: torch.Tensor, right: torch.Tensor) -> tuple[str, str]:
    """Property and words for rows that are not the right ones."""
    first, count = own(case, rank)
    other = rows_of(case, *own(case, rank, balanced=True))
    numbers = lambda rows: sorted(rows.flatten().tolist())  # noqa: E731
    if got.shape == (case["rows"], case["width"]) != right.shape:
        return "sharding", f"the whole tensor is returned, and rows {first} to {first + count - 1} are this rank's"
    if got.shape == other.shape and torch.equal(got, other):
        return "values", (f"this is another cut: {len(got)} rows, the remainder spread over the first ranks. torch.chunk's rule gives every rank "
                          f"ceil({case['rows']} / {case['world']}) rows until there are no more, and this rank {count}")
    if numbers(got) == numbers(right) and got.numel():
        return "values", "the right rows in the wrong order: pieces are listed in any order, and rows must come out in theirs"
    each = case["rows"] // case["world"]
    if got.shape == (each, case["width"]) and torch.equal(got, rows_of(case, rank * each, each)):
        return "values", (f"{each} rows on each of {case['world']} ranks are {each * case['world']} of {case['rows']}: the remainder is lost; "
                          "round up")
    if got.shape != right.shape:
        return "values", f"{len(got) if got.dim() else 0} rows came out where this rank holds {count} (shape {tuple(right.shape)})"
    return "values", f"other rows than {first} to {first + count - 1} came out"
