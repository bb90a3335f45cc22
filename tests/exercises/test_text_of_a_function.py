"""The text of an answer: what a function of a cell or a module needs comes along, and nothing is run to find out."""

import types

import pytest
from IPython.core.interactiveshell import InteractiveShell

from fsdp_ref.errors import ConfigError
from fsdp_ref.lab.checks import Submission

CELLS = [
    "import torch\nimport torch.distributed as dist\nfrom math import prod\nSTEP, LIMIT, KIND = 2, float('inf'), torch.bfloat16",
    "class Piece:\n    def __init__(self, size):\n        self.size = size\n\n    def double(self):\n        return self.size * STEP\n",
    "def twice(n):\n    return Piece(n).double() if n else once(1)\n",
    "def once(n):\n    return twice(0) if n > 5 else prod([n, 3])\n",
    "def answer(n: 'Piece', tensor: dist.ProcessGroup = None) -> torch.Tensor:\n"
    "    return [twice(n), once(n), LIMIT, torch.zeros(2, dtype=KIND)]\n",
]


@pytest.fixture
def cell_function():
    """The function `answer` of a notebook of these cells."""
    module = types.ModuleType("__main__")
    shell = InteractiveShell(user_module=module)
    for cell in CELLS:
        assert shell.run_cell(cell, store_history=True).success
    return shell.user_ns["answer"]


def test_a_function_of_a_cell_brings_what_it_needs(cell_function):
    submission = Submission.of(cell_function)
    assert submission.name == "answer"
    space: dict = {"__name__": "answer"}
    exec(compile(submission.text, "<test>", "exec"), space)
    doubled, tripled, limit, zeros = space["answer"](4)
    assert (doubled, tripled, limit) == (8, 12, float("inf")) and str(zeros.dtype) == "torch.bfloat16"


def test_the_newest_definition_counts(cell_function):
    first = Submission.of(cell_function).text
    assert "Piece(n).double()" in first and first.count("def twice") == 1


def test_a_closure_brings_its_values():
    def outer(step):
        def inner(n):
            return n + step
        return inner
    submission = Submission.of(outer(5))
    space: dict = {}
    exec(submission.text, space)
    assert space["inner"](1) == 6


def test_nothing_is_run_to_find_a_text(tmp_path):
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f():\n    pass\n"
    assert Submission.of(Submission(text, "f")).text == text and not (tmp_path / "ran").exists()


def test_a_function_without_source_is_refused():
    space: dict = {}
    exec("def f():\n    return 1\n", space)
    with pytest.raises(ConfigError, match="the source of f is nowhere to be found; define it in a cell or a file"):
        Submission.of(space["f"])
