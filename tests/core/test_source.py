"""What a line stands under, and what led two ranks apart, from the program's text alone."""

from __future__ import annotations

import linecache
import sys

import pytest

from fsdp_ref import source
from fsdp_ref.source import Place

PROGRAM = """\
def step(x, best):
    if x.isnan():
        return
    for grad in x:
        if best:
            reduce(grad)
        else:
            skip(grad)
    while best:
        wait()
    try:
        risky()
    except ValueError:
        repair()
    reduce(x)

step(a, b) if a else reduce(a)
if a < b: reduce(a)
elif a == b:
    reduce(b)
"""


@pytest.fixture(autouse=True)
def program(tmp_path):
    file = str(tmp_path / "program.py")
    source.learn(file, PROGRAM)
    yield file
    linecache.cache.pop(file, None)


@pytest.mark.parametrize(("line", "told"), [
    (6, ["`for grad in x` (line 4)", "`if best` (line 5)"]), (8, ["`for grad in x` (line 4)", "the else of `if best` (line 5)"]),
    (10, ["`while best` (line 9)"]), (14, ["`try` (line 11)"]), (12, []), (15, []), (5, ["`for grad in x` (line 4)"]), (2, []),
    (18, ["`if a < b` (line 18)"]), (20, ["the else of `if a < b` (line 18)", "`if a == b` (line 19)"]), (99, [])])
def test_what_a_line_stands_under(program, line, told):
    assert [str(under) for under in source.above(Place(program, line))] == told


def test_where_a_rank_may_have_left(program):
    assert [str(under) for under in source.exits_before(Place(program, 15))] == ["`if x.isnan()` (line 2)"]
    assert source.why([Place(program, 15, "step")], [], "rank 1") == (
        "before it, `if x.isnan()` (line 2) can leave the function or the loop: was it true on rank 1?")
    assert source.exits_before(Place(program, 2)) == []


def test_what_led_them_apart(program):
    caller = Place(program, 18)
    assert source.why([Place(program, 6, "step"), caller], [Place(program, 8, "step"), caller], "rank 1") == (
        "line 6 stands under `if best` (line 5), which was false on rank 1")
    assert source.why([Place(program, 8, "step"), caller], [Place(program, 6, "step"), caller], "rank 1") == (
        "line 8 stands under the else of `if best` (line 5), which was true on rank 1")
    assert source.why([Place(program, 10, "step"), caller], [Place(program, 15, "step"), caller], "ranks 1 and 2") == (
        "line 10 stands in the loop `while best` (line 9), which ranks 1 and 2 did not go through as often")
    assert source.why([Place(program, 6, "step"), caller], [], "rank 1").startswith("line 18 stands under `if a < b` (line 18)")
    assert source.why([Place(program, 6)], [Place(program, 6)], "rank 1") == ""


def test_a_cell_has_another_folder_on_every_rank():
    source.learn("/tmp/ipykernel_7/1234.py", "for t in x:\n    reduce(t)\nreduce(y)\n")
    try:
        here, there = Place("/tmp/ipykernel_7/1234.py", 2), Place("/tmp/ipykernel_9/1234.py", 2)
        assert [str(under) for under in source.above(there)] == ["`for t in x` (line 1)"]
        assert source.why([here], [there], "rank 1") == source.why([there], [here], "rank 0") == ""
        assert "stands in the loop" in source.why([there], [Place(here.file, 3)], "rank 0")
    finally:
        linecache.cache.pop("/tmp/ipykernel_7/1234.py")


def test_a_text_that_cannot_be_read_says_nothing(tmp_path):
    for name, text in (("magic.py", "%time x\nreduce(a)\n"), ("binary.py", "\0")):
        source.learn(str(tmp_path / name), text)
        assert source.above(Place(str(tmp_path / name), 2)) == []
    assert source.above(Place("nowhere.py", 3)) == [] and source.why([], [], "rank 1") == ""


def test_places_are_the_users_own_lines():
    def inner():
        return list(map(source.places_of, [sys._getframe()]))[0]
    places = inner()
    assert places[0].function == "inner" and places[1].function == "test_places_are_the_users_own_lines"
    assert len(places) == 2, "pytest's own frames are a library's"
    assert source.tell(places).startswith(f"line {places[0].line} of test_source.py, in inner, called from line {places[1].line} of test_")
    assert source.places_of(None) == [] and source.tell([]) == ""
    assert str(Place("/tmp/ipykernel_7/1.py", 3, "<module>")) == "line 3 of the cell" and not source.is_users("<string>")
