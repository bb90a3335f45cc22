"""What is built from one source: the same everywhere, valid, and without a line of a solution or of a hidden check where it is released."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from fsdp_ref.errors import ConfigError
from fsdp_ref.exercises import build, source
from fsdp_ref.exercises.submission import read, text_for
from fsdp_ref.lab.checks import IDS, CheckFailed, exercise

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "exercises" / "src"
RELEASE = ROOT / "exercises" / "release"
RELEASED = ("student", "pytest")                    # nbgrader and otter make theirs: see test_graders.py


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("built")
    build.write(SOURCES, out)
    return out


def lines_of(path: Path) -> list[str]:
    """The lines of a file, of a notebook those of its cells."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)
    return [line.strip() for line in text.splitlines()]


def leaks(path: Path, read: source.Source) -> list[str]:
    """Lines of the solution or of the hidden checks that stand in a file."""
    stubs = "\n".join(source.with_stub(cell.text) for cell in read.cells if cell.role == "answer").splitlines()
    shown = {line.strip() for cell in read.cells if cell.role not in ("answer", "hidden") for line in cell.text.splitlines()}
    shown |= {line.strip() for line in stubs}
    secret = {line for line in read.solution_lines() + read.hidden_lines() if line not in shown and len(line) > 3}
    assert secret, "a test of leaks needs something that could leak"
    lines, raw = lines_of(path), path.read_text()
    return sorted(line for line in secret if line in lines or len(line) > 25 and (line in raw or json.dumps(line)[1:-1] in raw))


def test_there_is_a_source_for_each_exercise_and_no_other():
    assert sorted(path.stem for path in SOURCES.glob("*.py")) == sorted(IDS)


@pytest.mark.parametrize("name", IDS)
def test_the_released_notebook_is_the_one_that_is_built(name, built):
    assert (RELEASE / f"{name}.ipynb").read_text() == (built / "student" / f"{name}.ipynb").read_text(), (
        f"build it anew: fsdp-ref exercises build --part student --out DIR, then copy DIR/student/{name}.ipynb to exercises/release")


def test_nothing_else_is_released():
    assert sorted(path.name for path in RELEASE.iterdir()) == sorted(f"{name}.ipynb" for name in IDS)


@pytest.mark.parametrize("name", IDS)
def test_nothing_released_holds_a_solution_or_a_hidden_check(name, built):
    read = source.read(SOURCES / f"{name}.py")
    for part in RELEASED:
        for path in (built / part).rglob(f"*{name}*"):
            assert not leaks(path, read), path
    assert leaks(built / "solution" / f"{name}.ipynb", read), "the test sees a solution where there is one"


@pytest.mark.parametrize("name", IDS)
def test_every_notebook_is_valid_and_its_code_is_python(name, built):
    paths = list(built.rglob(f"{name}.ipynb"))
    assert len(paths) == 4
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") for cell in notebook.cells)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                ast.parse(cell.source)


@pytest.mark.parametrize("name", IDS)
def test_both_graders_give_the_points_that_the_report_gives(name, built):
    points = exercise(name).points
    cells = nbformat.read(built / "nbgrader" / "source" / name / f"{name}.ipynb", as_version=4).cells
    graded = [cell.metadata.nbgrader for cell in cells if cell.metadata.get("nbgrader", {}).get("grade")]
    assert [each["points"] for each in graded] == list(points.values())
    otter = nbformat.read(built / "otter" / name / f"{name}.ipynb", as_version=4).cells
    tests = [cell.source for cell in otter if "BEGIN TEST CONFIG" in cell.source]
    assert [int(test.split("points: ")[1].split()[0]) for test in tests] == list(points.values())
    assert all("hidden: true" in test for test in tests)


@pytest.mark.parametrize("name", IDS)
def test_nbgraders_metadata_fits_its_schema(name, built):
    validator = pytest.importorskip("nbgrader.nbgraderformat").MetadataValidator()
    notebook = nbformat.read(built / "nbgrader" / "source" / name / f"{name}.ipynb", as_version=4)
    validator.validate_nb(notebook)
    ids = [cell.metadata.nbgrader.grade_id for cell in notebook.cells if "nbgrader" in cell.metadata]
    assert len(ids) == len(set(ids))
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            inside = cell.source.split("# BEGIN HIDDEN TESTS")[1].split("# END HIDDEN TESTS")[0]
            assert inside.count("require(") == 1, "one check a graded cell: nbgrader gives all of its points or none"


@pytest.mark.parametrize("name", IDS)
def test_every_source_begins_with_the_signature_of_its_card(name):
    read = source.read(SOURCES / f"{name}.py")
    assert read.function == exercise(name).function


def test_two_builds_have_the_same_bytes(built, tmp_path):
    build.write(SOURCES, tmp_path, only=(IDS[0],))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (built / path.relative_to(tmp_path)).read_bytes()


def test_a_source_without_an_exercise_and_a_name_without_a_source_are_refused(tmp_path):
    (tmp_path / "nothing.py").write_text((SOURCES / f"{IDS[0]}.py").read_text().replace(IDS[0], "nothing"))
    with pytest.raises(ConfigError, match="nothing.py is the source of no exercise"):
        build.write(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no source of nowhere"):
        build.write(SOURCES, tmp_path / "out", only=("nowhere",))


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        build.write(SOURCES, tmp_path / "file", only=(IDS[0],))
    assert not [path for path in tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize("form", [None, source.without_marks], ids=["stub", "solution"])
def test_the_stub_for_pytest_fails_its_tests_and_the_solution_passes_them(built, tmp_path, monkeypatch, form):
    """The module to fill in, and its tests, loaded as pytest loads them."""
    name = "ring_all_gather"
    read = source.read(SOURCES / f"{name}.py")
    text = (built / "pytest" / f"{name}.py").read_text()
    if form is not None:
        text = "\n\n".join(form(cell.text) for cell in read.cells if cell.role in ("code", "answer"))
    (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / f"test_{name}.py").write_text((built / "pytest" / f"test_{name}.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, f"test_{name}"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    tests = [value for key, value in vars(importlib.import_module(f"test_{name}")).items() if key.startswith("test_")]
    assert len(tests) == len(exercise(name).points)
    for test in tests:
        if form is None:
            with pytest.raises(CheckFailed, match="NotImplementedError"):
                test()
        else:
            test()
    for module in (name, f"test_{name}"):
        del sys.modules[module]


@pytest.mark.parametrize("name", IDS)
def test_what_is_taken_from_the_solutions_notebook_lacks_no_name(name, built):
    """The text that is graded: the function and what it needs, out of a notebook with other cells. (ruff's F821: undefined name.)"""
    text = text_for(read(built / "solution" / f"{name}.ipynb"), exercise(name).function)
    assert "check(" not in text and "NotImplementedError" not in text
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"], input=text, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stdout
