"""`%%px` and `%px`: run a cell or a line on every rank. ipyparallel carries it; the time limit, the order of the output and what
happens after a failure are the pool's (see ranks.py)."""

from __future__ import annotations

from IPython.core.error import UsageError
from IPython.core.magic import Magics, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring


def choose(text: str | None, size: int) -> list[int]:
    """Ranks from `0`, `1,3`, `0:2` (a slice, end excluded) or `all`. Raises UsageError for anything else."""
    everyone = list(range(size))
    if text in (None, "all"):
        return everyone
    try:
        if ":" in text:
            chosen = everyone[slice(*(int(part) if part else None for part in text.split(":")))]
        else:
            chosen = [everyone[int(part)] for part in text.split(",")]
    except (ValueError, IndexError):
        chosen = []
    if not chosen:
        raise UsageError(f"--targets {text} names no rank; there are ranks 0 to {size - 1}: write 0, or 1,3, or 0:2")
    return chosen


class RankMagics(Magics):
    """The magics of one pool. Registering those of another pool replaces them."""

    registered = True

    def __init__(self, shell, pool) -> None:
        self._pool = pool
        self.magics = {"line": {"px": self.px}, "cell": {"px": self.cell_px}}
        super().__init__(shell=shell)

    @no_var_expand
    def px(self, line: str) -> None:
        """Run one line on every rank: `%px print(rank)`."""
        self._pool.execute(line)

    @magic_arguments()
    @argument("-t", "--targets", help="ranks to run on: 0, or 1,3, or 0:2 (default: all)")
    @argument("-l", "--limit", type=float, help="seconds the cell may take (default: the pool's limit)")
    @no_var_expand
    def cell_px(self, line: str, cell: str) -> None:
        """Run the cell on every rank and show what each printed, in rank order."""
        given = parse_argstring(self.cell_px, line)
        self._pool.execute(cell, ranks=choose(given.targets, self._pool.size), limit=given.limit)
