"""Harness: one load; the files are there as numbers that say which row they are, and every read is written down."""

import torch


def run(function, case, rank):
    """The evidence: the rows that were returned and the reads; an exception's words where it says something of the reads."""
    log, width = [], case["width"]
    pieces = {file: (first, count) for file, first, count in case["pieces"]}

    def read(file, first, count):
        """`count` rows of a file from its row `first`, counted within the file."""
        if file not in pieces:
            raise ValueError(f"there is no file {file!r}; the files are {', '.join(sorted(pieces))}")
        start, length = pieces[file]
        inside = 0 <= first and 0 <= count and first + count <= length
        log.append({"file": file, "first": first, "rows": count, "inside": inside, "length": length})
        if not inside:
            raise ValueError(f"{file} holds {length} rows, and {count} from row {first} on were asked for")
        begin = (start + first) * width
        return torch.arange(begin, begin + count * width, dtype=torch.float32).view(count, width) + case["offset"]

    evidence = {"log": log, "error": "", "rows": None}
    try:
        evidence["rows"] = function(case["rows"], width, [tuple(piece) for piece in case["pieces"]], rank.rank, rank.world, read)
    except Exception as error:
        if log and all(row["inside"] for row in log):
            raise
        evidence["error"] = f"{type(error).__name__}: {error}"
    return evidence
