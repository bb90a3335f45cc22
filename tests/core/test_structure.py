"""The house rules that a reader relies on: short files and functions, imports that run one way, docstrings on what is public."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp_ref"
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom: a part may import the parts that stand before it, and itself. Commands at the end may import everything but lab.
FOUNDATION = ("errors", "rows", "clock", "textfile", "garbage", "perfetto", "allocator", "alignment", "saved", "ledger_file", "recorded",
              "placements", "ledger", "words", "catalogue", "source", "witness", "farewell", "meeting", "world", "wire", "fingerprint",
              "pending", "collectives")
MAY_IMPORT = {
    "errors": (), "rows": (), "clock": (),
    "textfile": ("errors",), "allocator": (), "alignment": (),
    "saved": ("rows",), "ledger_file": ("errors", "rows"),
    "garbage": (), "perfetto": ("errors", "rows", "recorded", "textfile", "garbage"),
    "placements": ("errors",),
    "recorded": ("errors", "rows", "ledger_file", "textfile", "perfetto"),
    "ledger": ("errors", "rows", "clock", "allocator", "saved", "recorded"),
    "words": (), "catalogue": (), "source": (), "diagnosis": ("catalogue", "words"),
    "witness": ("source",), "farewell": ("errors", "source", "words"), "meeting": ("errors", "words"),
    "world": ("errors", "ledger", "meeting", "witness", "farewell", "source", "words"),
    "wire": ("errors",),
    "fingerprint": ("errors", "catalogue", "source", "wire", "words", "world"),
    "pending": ("ledger", "world", "clock"),
    "collectives": ("errors", "ledger", "world", "clock", "wire", "fingerprint", "pending", "alignment"),
    "point_to_point": ("errors", "ledger", "world", "wire", "pending", "collectives"),
    "guard": ("collectives", "diagnosis", "fingerprint", "world"),
    "agreement": ("errors", "catalogue", "world", "fingerprint", "collectives"),
    "optimizers": ("errors", "rows", "ledger"),
    "preemption": ("errors", "collectives"),
    "mesh": ("errors", "placements", "world"), "nested": (), "policies": (), "clipping": (),
    "arguments": ("errors", "placements", "policies"),
    "forecast": ("rows", "wire", "placements", "policies"),
    "wrap": ("errors", "rows", "wire", "forecast", "policies"),
    "engine": (*FOUNDATION, "arguments", "agreement", "clipping", "optimizers", "mesh", "nested", "policies", "wrap"),
    "contrast": (*FOUNDATION, "nested"),
    "models": ("errors",), "data": ("errors",),
    "checkpoint": (*FOUNDATION, "engine"),
    "viz": ("errors", "rows", "ledger", "garbage"), "live": ("errors", "rows", "ledger", "textfile"),
    "interval": ("errors",), "progress": ("errors", "textfile"),
    "certificate": ("errors", "textfile", "train_options"),
    "quizzes": ("errors", "rows", "placements", "interval", "plan"),
    "plan": (*FOUNDATION, "interval", "wrap", "nested", "policies", "engine", "models", "train_options", "bench"),
    "selftest": FOUNDATION,
    "exercises": ("errors", "textfile", "train_options", "viz", "lab"),
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    """The top-level parts of the package that a file imports, anywhere in it (imports for type checking alone left out)."""
    tree = ast.parse(path.read_text())
    hidden = {id(node) for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
              for node in ast.walk(block)}
    depth = len(path.relative_to(PACKAGE).parts)
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:                              # from .. import x / from ..x import y, seen from the package's root
                found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
            elif node.level == 0 and (node.module or "").split(".")[0] == "fsdp_ref":
                found |= {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fsdp_ref.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short_and_documented(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 300, "split the file where the idea splits"
    assert ast.get_docstring(tree), "say what the part is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not node.name.startswith("_") and not any(node in getattr(parent, "body", ()) for parent in ast.walk(tree)
                                                         if isinstance(parent, ast.FunctionDef)):
                assert ast.get_docstring(node) or len(node.body) <= 4, f"{node.name} is public and says nothing"
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, f"{node.name} has 50 lines or more"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    part, imported = part_of(path), imported_parts(path)
    if part not in ("lab", "exercises", "__init__"):
        assert "lab" not in imported, "nothing imports the lab, but the command that builds and grades its exercises"
    if part in MAY_IMPORT:
        assert imported <= {part, *MAY_IMPORT[part]}, f"{part} may import {MAY_IMPORT[part]}"


def lines_of_code(path: Path) -> int:
    """Lines that are not blank, comment or docstring."""
    text = path.read_text()
    docstrings = [node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                  and ast.get_docstring(node)]
    words = {number for node in docstrings for number in range(node.lineno, node.end_lineno + 1)}
    return sum(bool(line.strip()) and not line.strip().startswith("#") and number not in words
               for number, line in enumerate(text.splitlines(), 1))


def test_the_engine_stays_readable():
    """What the README promises; torch's own has 5,700 lines."""
    assert sum(lines_of_code(path) for path in (PACKAGE / "engine").glob("*.py")) < 1200


def test_the_rule_above_sees_imports():
    assert {"ledger", "errors"} <= imported_parts(PACKAGE / "world.py")
    assert "collectives" in imported_parts(PACKAGE / "engine" / "gather.py")
    assert "errors" in imported_parts(PACKAGE / "viz" / "picture.py")
