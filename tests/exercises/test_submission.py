"""What is taken from a submission: the function and what it needs, as text; and the one clear error where that cannot be."""

import json

import nbformat
import pytest

from fsdp_ref.exercises.submission import SubmissionError, read, text_for

ANSWER = "import math\n\ndef helper(x):\n    return math.floor(x)  # down\n\n\n@staticmethod\ndef twice(x):\n    return 2 * helper(x)"


def notebook(folder, *cells, name="twice.ipynb"):
    path = folder / name
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])))
    return path


def test_the_function_comes_with_what_it_needs_and_nothing_else(tmp_path):
    answer = ANSWER.replace("(x)  #", "(x + LIMIT)  #")
    path = notebook(tmp_path, "from __future__ import annotations", "LIMIT = 3\nUNUSED = 4\nimport os", "print('hello')\nraise SystemExit",
                    answer, 'check("twice", twice)')
    text = text_for(read(path), "twice")
    assert text == ("from __future__ import annotations\n\nLIMIT = 3\n\nimport math\n\n"
                    "def helper(x):\n    return math.floor(x + LIMIT)  # down\n\n"
                    "@staticmethod\ndef twice(x):\n    return 2 * helper(x)\n")


def test_magics_are_no_mistakes(tmp_path):
    path = notebook(tmp_path, "%%px\nnot python at all(", "%time\n!ls\nimport math\nmath.pi?", ANSWER)
    assert "def twice" in text_for(read(path), "twice")


def test_a_python_file_is_taken_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ANSWER + "\n\nif __name__ == '__main__':\n    twice(3)\n")
    assert "__main__" not in text_for(read(path), "twice")


def test_a_copied_cell_is_named(tmp_path):
    with pytest.raises(SubmissionError, match="twice is defined in 2 cells of twice.ipynb .numbers 1 and 3.: a cell was copied"):
        text_for(read(notebook(tmp_path, ANSWER, "1", ANSWER)), "twice")


@pytest.mark.parametrize("cut", [3, 7, 8])
def test_a_split_cell_is_named(tmp_path, cut):
    """Cut after each line at which Jupyter's cursor could have stood, inside a function or between its head and its body."""
    lines = ("def helper(x):\n    y = x\n    return y\n\n\ndef twice(x):\n    z = 2\n    z = z * x\n    return z").splitlines()
    parts = ["\n".join(lines[:cut]), "\n".join(lines[cut:])]
    if cut == 3:
        assert "def twice" in text_for(read(notebook(tmp_path, *parts)), "twice")         # between two functions it does no harm
        return
    with pytest.raises(SubmissionError, match="split in two"):
        text_for(read(notebook(tmp_path, *parts)), "twice")


def test_a_head_without_its_body_is_named(tmp_path):
    with pytest.raises(SubmissionError, match="defines no function twice; cell 1 of twice.ipynb is no Python .*split in two"):
        text_for(read(notebook(tmp_path, "def twice(x):", "    return 2 * x")), "twice")


def test_a_missing_function_is_named(tmp_path):
    with pytest.raises(SubmissionError, match="defines no function twice; keep its name"):
        text_for(read(notebook(tmp_path, "def double(x):\n    return 2 * x")), "twice")


@pytest.mark.parametrize("name, content, words", [
    ("a.ipynb", b"%PDF-1.4", "is no notebook"),
    ("a.ipynb", b"\xff\xfe\x00", "cannot be read as text"),
    ("a.ipynb", b"[1, 2]", "is no notebook"),
    ("a.ipynb", b"[" * 100_000, "is no notebook"),
    ("a.ipynb", json.dumps({"nbformat": 3, "worksheets": []}).encode(), "format 3, not 4"),
    ("a.ipynb", json.dumps({"nbformat": 4, "cells": [{"cell_type": "code", "source": 7}]}).encode(), "is no notebook"),
    ("a.ipynb", b"{}" + b" " * 5_000_001, "more than 5,000,000"),
    ("a.py", b"x = 1\n" * 40_000, "240,000 characters of code"),
    ("a.docx", b"x", "neither a notebook nor a Python file"),
])
def test_a_file_that_is_no_notebook_is_one_clear_error(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SubmissionError, match=words):
        read(tmp_path / name)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    secret = notebook(tmp_path, ANSWER, name="secret.ipynb")
    link = tmp_path / "mine.ipynb"
    link.symlink_to(secret)
    with pytest.raises(SubmissionError, match="is no file"):
        read(link)


def test_no_submission_keeps_the_reader_busy(tmp_path):
    """Names that need each other in a long chain, and an expression nested as deep as it gets: read at once, or refused at once."""
    chain = "\n".join(f"a{n} = a{n + 1}" for n in range(8000)) + "\na8000 = 1\ndef twice(x):\n    return a0 * x"
    path = tmp_path / "chain.py"
    path.write_text(chain)
    assert text_for(read(path), "twice").count(" = ") == 8001
    path.write_text(f"x = {'-' * 150_000}1\n" + ANSWER)
    with pytest.raises(SubmissionError, match="is no Python"):
        text_for(read(path), "twice")
