"""docs/checkpoint_faults.md names a test for every fault, and those tests exist; no test named after a report is missing there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "checkpoint_faults.md"


def named_tests() -> set[str]:
    """Every test function below tests/."""
    trees = [ast.parse(path.read_text()) for path in TESTS.rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def rows() -> dict[str, list[str]]:
    """Number of a fault -> the names in its last column."""
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| [BF]\d+ \|", line)]
    return {line.split("|")[1].strip(): re.findall(r"`(test_\w+\*?)`", line.split("|")[-2]) for line in lines}


def test_every_fault_has_its_tests():
    existing = named_tests()
    assert len(rows()) >= 17
    for number, patterns in rows().items():
        assert patterns and patterns[0].startswith(f"test_{number.lower()}_"), f"{number} has no test of its own name"
        for pattern in patterns:
            assert any(name == pattern or pattern.endswith("*") and name.startswith(pattern[:-1]) for name in existing), (number, pattern)


def test_every_test_named_after_a_report_stands_in_the_table():
    listed = {number.lower() for number in rows()}
    for path in (TESTS / "checkpoint").glob("test_*.py"):
        for name in re.findall(r"def (test_\w+)", path.read_text()):
            assert set(re.findall(r"_([bf]\d+)(?=_)", name.removeprefix("test"))) <= listed, f"{name} is not in {TABLE.name}"
