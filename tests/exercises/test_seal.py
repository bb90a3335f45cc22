"""In a grader's kernel a submission is text: no cell of it is executed, whatever it says."""

from types import SimpleNamespace

import nbformat
import pytest

from fsdp_ref.exercises.graded import HandedIn, require
from fsdp_ref.lab.checks import CheckFailed, exercise

from .course import FORGED, NAME

ANSWER = "def ring_all_gather(mine, rank, world, send, recv):\n    return mine"
GRADED = f'# values: 2 points\nfrom fsdp_ref.exercises.graded import require\nrequire("{NAME}", {NAME}, "values")'


def cell(text, **metadata):
    return nbformat.v4.new_code_cell(text, metadata=metadata)


def marks(grade_id, **more):
    return {"schema_version": 3, "grade": False, "solution": False, "locked": False, "task": False, "grade_id": grade_id, **more}


def submission(*texts):
    """An nbgrader submission: free cells, the locked visible check, a graded cell."""
    cells = [cell(text) for text in texts]
    cells += [cell("check(1, 2)", nbgrader=marks("check", locked=True)), nbformat.v4.new_markdown_cell("words"),
              cell(GRADED, nbgrader=marks("values", grade=True, locked=True, points=2))]
    return nbformat.v4.new_notebook(cells=cells)


def test_nbgraders_kernel_gets_the_graded_cells_alone():
    seals = pytest.importorskip("fsdp_ref.exercises.seal_nbgrader", exc_type=ImportError)
    notebook, resources = submission(FORGED, ANSWER), {}
    before = [each.source for each in notebook.cells]
    seals.Seal().preprocess(notebook, resources)
    assert [each.source for each in notebook.cells if each.cell_type == "code"][:3] == ["", "", ""], "free and visible cells are blank"
    space = {}
    exec(notebook.cells[-1].source.split("\n# values")[0], space)
    assert isinstance(space[NAME], HandedIn) and "while True" not in space[NAME].text and "return mine" in space[NAME].text
    assert notebook.cells[-1].source.endswith(GRADED)
    seals.Unseal().preprocess(notebook, resources)
    assert [each.source for each in notebook.cells] == before, "the feedback shows what was handed in"


def test_a_graded_cell_that_was_not_overwritten_earns_nothing():
    seals = pytest.importorskip("fsdp_ref.exercises.seal_nbgrader", exc_type=ImportError)
    notebook = submission(ANSWER)
    notebook.cells[-1].source = "pass"
    seals.Seal().preprocess(notebook, {})
    with pytest.raises(AssertionError, match="not overwritten"):
        exec(notebook.cells[-1].source)


def test_otters_kernel_gets_one_cell():
    seals = pytest.importorskip("fsdp_ref.exercises.seal_otter", exc_type=ImportError)
    seal = seals.Seal("x.ipynb", {}, {"exercise": NAME, "function": NAME})
    notebook = nbformat.v4.new_notebook(cells=[cell(FORGED), cell(ANSWER, otter={"tests": ["mine"]})])
    made = seal.before_execution(notebook)
    space = {}
    assert len(made.cells) == 1 and not made.cells[0].metadata
    exec(made.cells[0].source, space)
    assert space[NAME].text.endswith(ANSWER + "\n") and not space[NAME].problem


def test_what_cannot_be_graded_fails_with_its_reason():
    for answer, words in ((None, "is not defined"), (HandedIn("", "the cell was split in two"), "the cell was split in two")):
        with pytest.raises(CheckFailed, match=words):
            require(NAME, answer, "values")


def test_a_property_is_asked_of_one_run(monkeypatch):
    """Five graded cells, one run: `require` hands the same text to `check`, which remembers."""
    asked = []
    report = SimpleNamespace(require=asked.append)
    monkeypatch.setattr("fsdp_ref.exercises.graded.check", lambda name, answer: asked.append((name, answer.text, answer.name)) or report)
    require(NAME, HandedIn("text"), "order")
    assert asked == [(NAME, "text", exercise(NAME).function), "order"]
