"""What every notebook of the course must be, as functions: the source and the built notebook in, complaints out (none: all is well).

A rule never runs a notebook; it reads the source (py:percent, as notebooks/build.py reads it) and the outputs that were kept. Numbers of
words and lines are those that a reader sees: addresses of links count for nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
LINES, WORDS, EDGE_WORDS, BYTES = 12, 120, 200, 500_000     # EDGE_WORDS: before the first code cell and after the last
EXERCISES = {
    "01": ["ring_all_gather", "ring_reduce_scatter"], "02": ["fix_the_disagreement"], "03": ["bytes_per_parameter"],
    "04": ["unequal_tokens", "ddp_buckets"], "05": ["zero1_step", "zero2_backward"], "06": ["shard_and_pad"], "07": ["fsdp_forward"],
    "08": ["fsdp_backward"], "09": ["clip_grad_norm"], "10": ["forward_prefetch"],
    "11": ["sharded_save", "exact_resume", "reshard_on_load"], "12": ["capstone"],
}
RELEASED = "../exercises/release/"


def _builder():
    spec = importlib.util.spec_from_file_location("notebooks_build", ROOT / "notebooks" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _builder()


@dataclass(frozen=True)
class Lesson:
    """One notebook: its number, its source's text, the cells of the source and, once it is built, the built notebook."""

    number: str
    text: str
    source: nbformat.NotebookNode
    built: nbformat.NotebookNode | None
    size: int = 0

    @staticmethod
    def of(source: Path) -> Lesson:
        """The notebook of a source file; `built` is None where there is no notebook beside the folder of the sources."""
        target = source.parents[1] / f"{source.stem}.ipynb"
        built = nbformat.read(target, as_version=4) if target.exists() else None
        return Lesson(source.stem[:2], source.read_text(), build.read(source), built, target.stat().st_size if built else 0)

    @property
    def code(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.source.cells if cell.cell_type == "code"]

    @property
    def prose(self) -> str:
        return "\n".join(cell.source for cell in self.source.cells if cell.cell_type == "markdown")

    @property
    def nodes(self) -> Iterator[tuple[int, ast.AST]]:
        """Everything the code cells say, each with its cell's number; magics are left out."""
        for number, cell in enumerate(self.source.cells):
            if cell.cell_type == "code":
                for node in ast.walk(ast.parse(re.sub(r"^(%|!)", r"#\1", cell.source, flags=re.M))):
                    yield number, node

    @property
    def calls(self) -> Iterator[tuple[int, ast.Call, str]]:
        """Every call by name, with its cell's number: `predict`, `x.reveal`."""
        return ((number, node, ast.unparse(node.func)) for number, node in self.nodes if isinstance(node, ast.Call))

    def called(self, name: str) -> list[tuple[int, list[object]]]:
        """Cells that call `name`, each with the call's constant arguments."""
        return [(number, [arg.value for arg in call.args if isinstance(arg, ast.Constant)])
                for number, call, function in self.calls if function == name]


def words(text: str) -> int:
    """Words a reader reads: no addresses of links, no rules of tables, no lone signs."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def checked_yet() -> tuple[str, ...]:
    """The exercises that the lab can check."""
    from fsdp_ref.lab.checks import IDS
    return IDS


def to_come() -> set[str]:
    """The exercises of the course that the lab cannot check yet."""
    return {name for names in EXERCISES.values() for name in names} - set(checked_yet())


# -- the source ---------------------------------------------------------------------------------------------------------------


def short_cells(lesson: Lesson) -> Iterator[str]:
    """A code cell holds at most 12 lines."""
    for cell in lesson.code:
        if (lines := len(cell.source.splitlines())) > LINES:
            yield f"a cell has {lines} lines, at most {LINES} are allowed: {cell.source.splitlines()[0]!r}"


def little_text(lesson: Lesson) -> Iterator[str]:
    """At most 120 words between two code cells; a little more at the start and at the end."""
    runs: list[list[str]] = [[]]
    for cell in lesson.source.cells:
        if cell.cell_type == "code":
            runs.append([])
        else:
            runs[-1].append(cell.source)
    for place, run in enumerate(runs):
        limit = EDGE_WORDS if place in (0, len(runs) - 1) else WORDS
        if (count := words("\n".join(run))) > limit:
            yield f"{count} words between two code cells, at most {limit} are allowed; they begin {run[0][:60]!r}"


def opening(lesson: Lesson) -> Iterator[str]:
    """The first cell has the number and the title, a question, what is needed, and how long it takes."""
    first = lesson.source.cells[0].source if lesson.source.cells[0].cell_type == "markdown" else ""
    if not re.match(rf"# {lesson.number} · \S", first):
        yield f"the first cell must begin with '# {lesson.number} · Title'"
    needed = {"a question": r"\?", "what is needed ('You need')": r"(?i)you need", "the time in minutes": r"(?i)minutes"}
    for what, pattern in needed.items():
        if not re.search(pattern, first):
            yield f"the first cell lacks {what}"


def headings(lesson: Lesson) -> Iterator[str]:
    """One title, and no level left out below it."""
    prose = re.sub(r"(?ms)^```.*?^```", "", lesson.prose)
    levels = [len(line) - len(line.lstrip("#")) for line in prose.splitlines() if re.match(r"#+ \S", line)]
    if levels.count(1) != 1:
        yield f"{levels.count(1)} titles (lines that begin with one #), exactly one is wanted"
    for above, below in zip(levels, levels[1:], strict=False):
        if below > above + 1:
            yield f"a heading of level {below} follows one of level {above}"


def predictions(lesson: Lesson) -> Iterator[str]:
    """At least two guesses, each revealed in a later cell, under names of this notebook."""
    asked, revealed = lesson.called("predict"), [number for number, _, name in lesson.calls if name.endswith(".reveal")]
    if len(asked) < 2:
        yield f"{len(asked)} predictions, at least two are wanted"
    if len(asked) != len(revealed):
        yield f"{len(asked)} predictions and {len(revealed)} calls of reveal; they come in pairs"
    for number, arguments in asked:
        if not arguments or not str(arguments[0]).startswith(f"{lesson.number}."):
            yield f"a prediction is called {arguments[:1]}; its name begins with {lesson.number}."
        if not any(later > number for later in revealed):
            yield f"the prediction {arguments[:1]} is revealed before it is asked, or never"
    if len({str(arguments[:1]) for _, arguments in asked}) < len(asked):
        yield "two predictions have one name"


def exercises(lesson: Lesson) -> Iterator[str]:
    """The exercises of this notebook: each linked, and at least one card, once the lab can check one of them."""
    wanted = EXERCISES.get(lesson.number, [])
    known = [name for name in wanted if name in checked_yet()]
    for name in wanted:
        if f"(../exercises/release/{name}.ipynb)" not in lesson.prose:
            yield f"no link to the exercise: [exercise](../exercises/release/{name}.ipynb)"
    checked = [arguments[:1] for _, arguments in lesson.called("check")]
    if known and not any([name] in checked for name in known):
        yield f'no check("{known[0]}")'
    for arguments in checked:
        if arguments and wanted and arguments[0] not in wanted:
            yield f"check({arguments[0]!r}) belongs to another notebook; here: {wanted}"


def quiz(lesson: Lesson) -> Iterator[str]:
    """The quiz of this notebook; and nothing is left to be done, once the lab can check its exercises."""
    if [lesson.number] not in [arguments for _, arguments in lesson.called("ask")]:
        yield f'no ask("{lesson.number}")'
    if "TODO" in lesson.text and all(name in checked_yet() for name in EXERCISES.get(lesson.number, [])):
        yield "TODO stands in the source"


def real_code(lesson: Lesson) -> Iterator[str]:
    """What changed, as a diff; where the idea lives, as a link into the package and as its text."""
    for name in ("changed", "read"):
        if not any(function == name for _, _, function in lesson.calls):
            yield f"no call of {name}(...)"
    if not re.search(r"\]\(\.\./fsdp_ref/[\w/]+\.py\)", lesson.prose):
        yield "no link into the source of the package, such as [unit.py](../fsdp_ref/engine/unit.py)"


def references(lesson: Lesson) -> Iterator[str]:
    """Papers by title (in italics) and section or table, in the last text."""
    last = [cell.source for cell in lesson.source.cells if cell.cell_type == "markdown"][-1:]
    if not last or not re.search(r"Papers?:?\*\*", last[0]) or not re.search(r"\*[A-Z][^*\n]{8,}", last[0]) \
            or not re.search(r"(?i)\b(section|table|figure|chapter|appendix|algorithm)", last[0]):
        yield "the last text has no '**Papers:** Author, *Title*, section N'"


def exists(target: str) -> bool:
    """Whether there is such a file, seen from the notebooks."""
    return (ROOT / "notebooks" / target).exists()


def links(lesson: Lesson) -> Iterator[str]:
    """Relative links lead to files that exist; so do those to exercises, once the lab can check them."""
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", lesson.prose):
        if re.match(r"[a-z]+:", target):
            continue
        if target.startswith(RELEASED) and Path(target).stem in to_come():
            continue
        if not exists(target):
            yield f"the link {target} leads nowhere"


def tested(lesson: Lesson) -> Iterator[str]:
    """Numbers in the text stay true because cells are checked: by tag, or by an assert."""
    asserts = [(number, node) for number, node in lesson.nodes if isinstance(node, ast.Assert)]
    tagged = {number for number, cell in enumerate(lesson.source.cells) if "nbval-check-output" in cell.metadata.get("tags", [])}
    if (count := len(tagged | {number for number, _ in asserts})) < 3:
        yield f"{count} cells are checked (tag nbval-check-output, or an assert), at least three are wanted"
    for _, node in asserts:
        if node.msg is None:
            yield f"an assert without a message: {ast.unparse(node)!r}"


# -- the built notebook -------------------------------------------------------------------------------------------------------


def in_step(lesson: Lesson) -> Iterator[str]:
    """The built notebook has the cells of its source."""
    if lesson.built is None:
        yield "it is not built; run make notebooks"
        return
    facts = [[(cell.cell_type, cell.source, sorted(cell.metadata.get("tags", []))) for cell in each.cells]
             for each in (lesson.source, lesson.built)]
    if facts[0] != facts[1]:
        differing = next((a for a, b in zip(*facts, strict=False) if a != b), ("", "the number of cells", []))
        yield f"it is older than its source; run make notebooks (first difference: {differing[1][:60]!r})"


def pictures(lesson: Lesson) -> Iterator[str]:
    """At least two pictures, each with words, and their numbers as tables."""
    outputs = list(_outputs(lesson))
    shown = [output for output in outputs if "image/png" in output.get("data", {})]
    if len(shown) < 2:
        yield f"{len(shown)} pictures, at least two are wanted"
    for output in shown:
        if len(output.get("metadata", {}).get("image/png", {}).get("alt", "")) < 20:
            yield "a picture has no alt text"
    tables = sum("<table" in _text(output, "text/html") and "your guess" not in _text(output, "text/html") for output in outputs)
    tables += sum("image/png" in output.get("data", {}) and "\n\n" in _text(output, "text/plain") for output in outputs)
    if tables < len(shown):
        yield f"{len(shown)} pictures and {tables} tables of their numbers"


def clean(lesson: Lesson) -> Iterator[str]:
    """No failed cell (but those that are to fail), nothing of widgets, no folder of a machine, not too large."""
    if lesson.built is None:
        return
    if "widgets" in lesson.built.metadata:
        yield "metadata.widgets is left in it; code hosts do not show such a notebook"
    for cell in lesson.built.cells:
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            yield f"a cell was not run: {cell.source[:60]!r}"
        if any(output.output_type == "error" for output in cell.outputs) and "raises-exception" not in cell.metadata.get("tags", []):
            yield f"a cell failed: {cell.source[:60]!r}"
    text = json.dumps([cell.get("outputs", []) for cell in lesson.built.cells])
    if "widget-view+json" in text:
        yield "a widget is left in the outputs"
    if found := re.search(r"(?<![\w.~])/(?:home|root|work|tmp|Users)/[\w.-]+", text):
        yield f"an output has a folder of a machine: {found[0]}"
    if lesson.size > BYTES:
        yield f"{lesson.size:,} bytes, at most {BYTES:,} are allowed"


def _outputs(lesson: Lesson) -> Iterator[nbformat.NotebookNode]:
    for cell in lesson.built.cells if lesson.built else []:
        yield from cell.get("outputs", [])


def _text(output: nbformat.NotebookNode, kind: str) -> str:
    value = output.get("data", {}).get(kind, "")
    return value if isinstance(value, str) else "".join(value)


RULES: tuple[Callable[[Lesson], Iterator[str]], ...] = (
    short_cells, little_text, opening, headings, predictions, exercises, quiz, real_code, references, links, tested,
    in_step, pictures, clean)
