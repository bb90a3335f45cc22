"""Every notebook of the course keeps the rules of rules.py, and each rule is seen to complain about a notebook that breaks it."""

from __future__ import annotations

import copy
import functools

import jupytext
import nbformat
import pytest

from tests.notebooks import rules
from tests.notebooks.rules import RULES, Lesson

SOURCES = sorted((rules.ROOT / "notebooks" / "src").glob("*.py"))
of = functools.cache(Lesson.of)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rule(source, rule):
    assert list(rule(of(source))) == []


def test_every_built_notebook_has_a_source():
    assert {path.stem for path in (rules.ROOT / "notebooks").glob("*.ipynb")} <= {path.stem for path in SOURCES}


# -- the rules themselves -----------------------------------------------------------------------------------------------------

TEXT = """\
# %% [markdown]
# # 01 · Title
#
# **Why?** You need notebook 00. Time: 5 minutes.

# %%
from fsdp_ref.lab import changed, predict, read
guess = predict("01.a", "How many?")

# %%
guess.reveal(3)

# %%
again = predict("01.b", "How many?")

# %% tags=["nbval-check-output"]
again.reveal(4)
assert 1 + 1 == 2, "arithmetic"

# %% [markdown]
# ## Part
# [wire.py](../fsdp_ref/wire.py), [exercise](../exercises/release/ring_all_gather.ipynb),
# [exercise](../exercises/release/ring_reduce_scatter.ipynb)

# %% tags=["nbval-check-output"]
read("wire.py", "all_gather")
check("ring_all_gather")

# %% tags=["nbval-check-output"]
changed("00:train", "00:one_step")
ask("01")

# %% [markdown]
# **Papers:** Rajbhandari et al., *ZeRO: Memory Optimizations*, section 3.
"""
PICTURE = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "words\n\ntable"},
           "metadata": {"image/png": {"alt": "A picture of four ranks and their shards."}}}


def lesson(text: str = TEXT, edit=lambda built: None) -> Lesson:
    """A small notebook that keeps every rule, unless `text` or `edit` breaks one."""
    source = jupytext.reads(text, fmt="py:percent")
    built = copy.deepcopy(source)
    for count, cell in enumerate(cell for cell in built.cells if cell.cell_type == "code"):
        cell.execution_count, cell.outputs = count + 1, []
    code = [cell for cell in built.cells if cell.cell_type == "code"]
    code[0].outputs = [nbformat.from_dict(PICTURE), nbformat.from_dict(PICTURE)]
    edit(built)
    return Lesson("01", text, source, built, 1000)


def first_code(built):
    return next(cell for cell in built.cells if cell.cell_type == "code")


@pytest.fixture
def landed(monkeypatch):
    """As if the lab could check every exercise, and every file were there that is not called gone."""
    monkeypatch.setattr(rules, "checked_yet", lambda: tuple(name for names in rules.EXERCISES.values() for name in names))
    monkeypatch.setattr(rules, "exists", lambda target: "gone" not in target)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_notebook_has_no_complaints(rule, landed):
    assert list(rule(lesson())) == []


def swap(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


BROKEN = {
    "a long cell": ("short_cells", swap("guess.reveal(3)", "guess.reveal(3)\n" + "x = 1\n" * 12), "13 lines"),
    "much text": ("little_text", swap("# ## Part", "# ## Part\n# " + "word " * 121), "between two code cells"),
    "much text in two cells": ("little_text", swap("# ## Part", "# ## Part\n# " + "word " * 80 + "\n\n# %% [markdown]\n# " + "word " * 80),
                               "between two code cells"),
    "a long start": ("little_text", swap("# **Why?**", "# **Why?** " + "word " * 201), "at most 200"),
    "no number": ("opening", swap("# # 01 ·", "# # 1 ·"), "01 · Title"),
    "no question": ("opening", swap("Why?", "Because."), "lacks a question"),
    "no time": ("opening", swap("5 minutes", "soon"), "lacks the time"),
    "no needs": ("opening", swap("You need", "After"), "lacks what is needed"),
    "two titles": ("headings", swap("# ## Part", "# # Part"), "2 titles"),
    "a level left out": ("headings", swap("# ## Part", "# #### Part"), "level 4 follows one of level 1"),
    "one guess": ("predictions", swap('again = predict("01.b", "How many?")', "again = guess"), "1 predictions, at least two"),
    "not revealed": ("predictions", swap("again.reveal(4)", "print(4)"), "2 predictions and 1 calls"),
    "revealed too early": ("predictions", swap("guess.reveal(3)", "guess.reveal(3); again.reveal(4)").replace("\nagain.reveal(4)", ""),
                           "before it is asked"),
    "another's guess": ("predictions", swap('"01.a"', '"02.a"'), "begins with 01."),
    "one name twice": ("predictions", swap('"01.b"', '"01.a"'), "two predictions have one name"),
    "no link to an exercise": ("exercises", swap("ring_reduce_scatter.ipynb", "other.ipynb"), "no link to the exercise"),
    "no card": ("exercises", swap('check("ring_all_gather")', "pass"), 'no check("ring_all_gather")'),
    "another's card": ("exercises", swap('check("ring_all_gather")', 'check("ring_all_gather"); check("capstone")'), "another notebook"),
    "no quiz": ("quiz", swap('ask("01")', "pass"), 'no ask("01")'),
    "another's quiz": ("quiz", swap('ask("01")', 'ask("02")'), 'no ask("01")'),
    "not done": ("quiz", swap('ask("01")', 'ask("01")  # TODO-MERGE'), "TODO"),
    "no diff": ("real_code", swap("changed(", "print("), "no call of changed"),
    "no reading": ("real_code", swap("read(", "print("), "no call of read"),
    "no link into the source": ("real_code", swap("../fsdp_ref/wire.py", "../README.md"), "no link into the source"),
    "no papers": ("references", swap("**Papers:**", "See"), "Papers"),
    "a paper without a section": ("references", swap(", section 3", ""), "Papers"),
    "a dead link": ("links", swap("../fsdp_ref/wire.py", "../fsdp_ref/gone.py"), "leads nowhere"),
    "a dead link to an exercise": ("links", swap("ring_all_gather.ipynb", "gone.ipynb"), "leads nowhere"),
    "too few checks": ("tested", swap('# %% tags=["nbval-check-output"]', "# %%"), "1 cells are checked"),
    "a bare assert": ("tested", swap(', "arithmetic"', ""), "without a message"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_source_is_seen(case, landed):
    name, text, words = BROKEN[case]
    complaints = list(next(rule for rule in RULES if rule.__name__ == name)(lesson(text)))
    assert any(words in complaint for complaint in complaints), complaints


def set_output(**parts):
    return lambda built: first_code(built).outputs.append(nbformat.from_dict(
        {"output_type": "display_data", "data": {}, "metadata": {}} | parts))


SPOILT = {
    "older than its source": ("in_step", lambda built: first_code(built).update(source="x = 1"), "older than its source"),
    "a tag was changed": ("in_step", lambda built: first_code(built).metadata.update(tags=["x"]), "older than its source"),
    "a cell is missing": ("in_step", lambda built: built.cells.pop(), "older than its source"),
    "one picture": ("pictures", lambda built: first_code(built).outputs.pop(), "1 pictures, at least two"),
    "no alt text": ("pictures", lambda built: first_code(built).outputs[0].update(metadata={}), "no alt text"),
    "no table": ("pictures", lambda built: first_code(built).outputs[0].data.update({"text/plain": "words"}), "2 pictures and 1 tables"),
    "widgets": ("clean", lambda built: built.metadata.update(widgets={}), "metadata.widgets"),
    "a widget's view": ("clean", set_output(data={"application/vnd.jupyter.widget-view+json": {}}), "a widget is left"),
    "a failure": ("clean", lambda built: first_code(built).outputs.append(
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])), "a cell failed"),
    "not run": ("clean", lambda built: first_code(built).update(execution_count=None), "was not run"),
    "a folder": ("clean", set_output(data={"text/plain": "in /home/someone/x"}), "/home/someone"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_notebook_is_seen(case, landed):
    name, edit, words = SPOILT[case]
    complaints = list(next(rule for rule in RULES if rule.__name__ == name)(lesson(edit=edit)))
    assert any(words in complaint for complaint in complaints), complaints


def test_a_large_notebook_and_one_that_is_not_built_are_seen():
    good = lesson()
    assert "at most 500,000" in "".join(rules.clean(Lesson("01", TEXT, good.source, good.built, 500_001)))
    assert "not built" in "".join(rules.in_step(Lesson("01", TEXT, good.source, None)))


def test_what_has_not_landed_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(rules, "checked_yet", lambda: ())
    bare = lesson(TEXT.replace('check("ring_all_gather")', "pass  # TODO-MERGE"))
    assert list(rules.quiz(bare)) == list(rules.exercises(bare)) == []


def test_every_rule_is_seen_to_complain():
    assert {rule.__name__ for rule in RULES} == {name for name, *_ in (*BROKEN.values(), *SPOILT.values())}
