"""What a line of the user's program stands under: read from its text, so that a message can say which `if` led the ranks apart.

    if loss < best:          # line 6
        save(model)          # line 7: "stands under `if loss < best` (line 6)"

It must never run or import the program, and never fail: a text that cannot be read says nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType

DEPTH = 6               # calls of the user's own functions that are told, innermost first
WIDTH = 60              # characters of a condition
_TORCH = importlib.util.find_spec("torch")
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")] + ([Path(_TORCH.origin).parents[1]] if _TORCH else [])
_NOT_THE_USERS = ("<", *{str(Path(folder).resolve()) + "/" for folder in (*_FOLDERS, Path(__file__).parent)})
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Under:
    """A statement that decides whether a line runs: `text` is its head (`if loss < best`), `word` what the line is to it."""

    file: str
    line: int
    text: str
    word: str            # "if", "else", "loop", "except"

    def __str__(self) -> str:
        return f"{'the else of ' if self.word == 'else' else ''}`{self.text}` (line {self.line})"


@dataclass(frozen=True)
class Place:
    """A line of the user's program that was being run."""

    file: str
    line: int
    function: str = ""

    @property
    def in_cell(self) -> bool:
        """Whether it is a notebook's cell (an engine's, or the kernel's)."""
        return in_cell(self.file)

    def __str__(self) -> str:
        inside = f", in {self.function}" if self.function not in ("", "<module>") else ""
        return f"line {self.line} of {'the cell' if self.in_cell else Path(self.file).name}{inside}"


def in_cell(file: str) -> bool:
    """Whether this is the name that ipykernel or IPython gives to a cell."""
    return "ipykernel_" in file and "site-packages" not in file or file.startswith("<ipython-input")


def is_users(file: str) -> bool:
    """Whether this file is neither a library's nor the package's own."""
    return in_cell(file) or not file.startswith(_NOT_THE_USERS) and "site-packages" not in file


def places_of(frame: FrameType | None) -> list[Place]:
    """The user's own lines on this stack, innermost first."""
    found: list[Place] = []
    while frame is not None and len(found) < DEPTH:
        if is_users(frame.f_code.co_filename):
            found.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def tell(places: list[Place]) -> str:
    """`line 3 of train.py, in save, called from line 9 of train.py`; empty when there is none."""
    return ", called from ".join(map(str, places[:3]))


def learn(file: str, text: str) -> None:
    """Keep the text of a cell that another process was given; a text that is known already stays."""
    if text and not linecache.getlines(file):
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


# -- what stands around a line ------------------------------------------------------------------------------------------------


def above(place: Place) -> list[Under]:
    """The ifs and loops of its function (or of its file, outside of functions) that this line stands under, outermost first."""
    found: list[Under] = []
    for node in _path(place):
        if isinstance(node, _Function | ast.ClassDef):
            found = []
        elif under := _under(node, place):
            found.append(under)
    return found


def loop_around(place: Place) -> Under | None:
    """The innermost loop that this line is in, its head included."""
    loops = [node for node in _path(place) if isinstance(node, ast.For | ast.AsyncFor | ast.While)]
    return Under(place.file, loops[-1].lineno, _head(loops[-1]), "loop") if loops else None


def exits_before(place: Place) -> list[Under]:
    """The ifs before this line, in its function and on its way, that end in return, break or continue: where a rank may have left."""
    path = _path(place)
    start = max((number for number, node in enumerate(path) if isinstance(node, _Function)), default=0)
    around = [body for node in path[start:] for _, body in _bodies(node) if _covers(body, place)]
    earlier = [node for body in around for node in body if isinstance(node, ast.If) and (node.end_lineno or 0) < place.line]
    return [Under(place.file, node.lineno, _head(node), "if") for node in earlier
            if isinstance(node.body[-1], ast.Return | ast.Break | ast.Continue)]


def divergence(here: list[Place], there: list[Place]) -> Under | None:
    """The statement that ranks `here` are under and ranks `there` are not (or in whose other branch they are): what led them apart."""
    elsewhere = {replace(under, file=Path(under.file).name) for place in there for under in above(place)}
    for place in reversed(here):                            # the outermost call first
        for under in above(place):
            if replace(under, file=Path(under.file).name) not in elsewhere:
                return under
    return None


def why(here: list[Place], there: list[Place], who: str) -> str:
    """In words: what led `who`, who is `there` (or nowhere), away from the line `here`; empty when the program's text does not say."""
    under = divergence(here, there)
    if under is not None:
        line = next(place.line for place in here if under in above(place))
        if under.word == "loop":
            return f"line {line} stands in the loop {under}, which {who} did not go through as often"
        was = "" if under.word == "except" else f", which was {'true' if under.word == 'else' else 'false'} on {who}"
        return f"line {line} stands under {under}{was}"
    exits = [each for place in here for each in exits_before(place)]
    return f"before it, {exits[-1]} can leave the function or the loop: was it true on {who}?" if len(exits) == 1 and not there else ""


def _bodies(node: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    for name in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, name, None), list):
            yield name, body
    for handler in getattr(node, "handlers", ()):
        yield "except", handler.body


def _covers(statements: Iterable[ast.stmt], place: Place) -> bool:
    return any(each.lineno <= place.line <= (each.end_lineno or each.lineno) for each in statements)


def _path(place: Place) -> list[ast.AST]:
    """The statements around this line, outermost first; empty when the text cannot be read."""
    node, path = _tree(tuple(_lines(place.file))), []
    while node is not None:
        path.append(node)
        inside = (child for _, body in _bodies(node) for child in body if _covers([child], place))
        node = next(inside, None)
    return path


def _lines(file: str) -> list[str]:
    """The text of a file. A cell has another folder in every process; the name, made from its text, is the same."""
    lines = linecache.getlines(file)
    if not lines and in_cell(file):
        twin = next((known for known in tuple(linecache.cache) if Path(known).name == Path(file).name), file)
        lines = linecache.getlines(twin)
    return lines


@lru_cache(maxsize=64)
def _tree(lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):                       # a cell with magics, or no Python at all
        return None


def _under(node: ast.AST, place: Place) -> Under | None:
    """What this statement is to the line: the branch of an if, a loop, a handler; None when the line is in its head."""
    inside = next((name for name, body in _bodies(node) if _covers(body, place)), "")
    if not inside:
        return None
    if isinstance(node, ast.If):
        return Under(place.file, node.lineno, _head(node), "if" if inside == "body" else "else")
    if isinstance(node, ast.For | ast.AsyncFor | ast.While) and inside == "body":
        return Under(place.file, node.lineno, _head(node), "loop")
    if isinstance(node, ast.Try) and inside == "except":
        return Under(place.file, node.lineno, "try", "except")
    return None


def _head(node: ast.AST) -> str:
    if isinstance(node, ast.For | ast.AsyncFor):
        text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    else:
        text = f"{'if' if isinstance(node, ast.If) else 'while'} {ast.unparse(node.test)}"
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
