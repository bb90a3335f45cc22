"""The report of a failure: root cause first, what followed from it folded, each rank named once."""

import pytest
from IPython.core.error import UsageError

from fsdp_ref import source
from fsdp_ref.catalogue import Kind
from fsdp_ref.diagnosis import Diagnosis, Running
from fsdp_ref.lab.diagnose import place_in, running_of
from fsdp_ref.lab.magics import choose
from fsdp_ref.lab.report import Failure, RanksFailed, Report, explain, trim

GLOO = ("RuntimeError", "[../third_party/gloo/x.cc:78] Timed out waiting 15000ms for recv operation to complete", "")
TRACE = ("----\nValueError  Traceback\nCell In[1], line 4, in work(x)\n----> 4 f()\n\nFile /x/site-packages/torch/y.py:3, in f\n1 g\n\n"
         "ValueError: boo")


def test_own_error_comes_before_the_ones_it_caused():
    failure = Failure(errors={0: GLOO, 1: ("ValueError", "boo", TRACE), 2: ("RankError", "rank 1 never arrived", "")})
    report = explain(failure)
    assert str(report.diagnosis).startswith("rank 1 raised ValueError: boo (at line 4 of the cell, in work); ranks 0 and 2 then failed ")
    assert set(report.ranks) == {0, 1, 2} and report.details == trim(TRACE)
    assert failure.group_broken and not failure.disagreed


def test_the_same_error_on_all_ranks_is_told_once():
    failure = Failure(errors={rank: ("NameError", "name 'x' is not defined", "t") for rank in range(4)})
    assert str(explain(failure).diagnosis).startswith("ranks 0, 1, 2 and 3 raised NameError: name 'x' is not defined; ")
    assert not failure.group_broken


def test_dead_rank_is_named_with_its_signal_and_pid():
    failure = Failure(dead={2: -9}, errors={0: ("RankError", "rank 2 died while ...", "")}, pids=[10, 11, 12], output="last words")
    report = explain(failure)
    assert str(report.diagnosis).startswith("rank 2 (pid 12) died with signal 9 (SIGKILL)")
    assert "rank 0 then failed" in str(report.diagnosis)
    assert report.ranks[2] == "died with signal 9 (SIGKILL)" and report.details == "last words"


def test_a_disagreement_that_all_were_told_is_no_reason_to_restart():
    told = ("RankError", "the ranks disagree about collective number 0: rank 0: a; rank 1: b (x); every rank must ...", "trace")
    assert Failure(errors={0: told, 1: told}).disagreed
    assert not Failure(errors={0: told}, finished=[1]).disagreed and not Failure(errors={0: told}, stuck={1: ""}).disagreed
    assert not Failure(errors={0: told, 1: GLOO}).disagreed and not Failure().disagreed
    assert explain(Failure(errors={0: told, 1: told})).details == "", "no rank's traceback stands above what all were told"


STACK = ('Stack (most recent call first):\n  File "/x/site-packages/torch/distributed/c10d.py", line 9 in barrier\n'
         '  File "/x/site-packages/torch/distributed/logger.py", line 9 in wrapper\n'
         '  File "/tmp/ipykernel_77/123.py", line 3 in work\n  File "/tmp/ipykernel_77/124.py", line 1 in <module>\n')


def test_stuck_rank_is_told_where_it_is():
    assert running_of(STACK, {}) == Running("line 3 of the cell, in work", "barrier", "")
    ours = STACK.replace("/x/site-packages/torch/distributed/c10d.py", source.__file__.replace("source", "wire"))
    assert running_of(ours.replace("torch/distributed/logger", "x"), {}).waits_in == "a collective"
    looping = running_of(STACK.split("wrapper\n")[1], {"123.py": "def work():\n    while True:\n        spin()\n"})
    assert looping == Running("line 3 of the cell, in work", "", "`while True` (line 2)")
    found = explain(Failure(stuck={1: STACK.split("wrapper\n")[1], 2: ""}, after=3.2)).diagnosis
    assert found.sentence.startswith("ranks 1 and 2 did not finish within 3 s (rank 1 is at line 3 of the cell, in work, in the loop")
    assert "rank 2 is in a library" in found.sentence
    assert "interrupted after 3 s" in explain(Failure(stuck={1: STACK}, after=3.2, interrupted=True)).diagnosis.sentence
    assert Failure(stuck={1: STACK}).group_broken and Failure(interrupted=True).group_broken and not Failure()


def test_the_line_in_a_traceback():
    assert place_in(TRACE) == "line 4 of the cell, in work" and place_in("") == ""
    assert place_in("\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[1]\x1b[39m\x1b[32m, line 3\x1b[39m") == "line 3 of the cell"
    assert place_in("Cell In[1], line 3\n1 x\n\nFile ~/helpers.py:12, in help(x)\n12 y") == "line 12 of helpers.py"


def test_library_frames_are_left_out_of_a_traceback():
    assert trim(TRACE) == "----\nValueError  Traceback\nCell In[1], line 4, in work(x)\n----> 4 f()\n\nValueError: boo"


def test_notebook_shows_the_report_and_no_frames_of_the_kernel():
    report = Report(Diagnosis(Kind.EXCEPTION, (1,), "x"), {1: "ValueError"}, "a\nb")
    lines = RanksFailed("rank 1 raised ValueError: boo", report)._render_traceback_()
    assert lines == ["a", "b", "", "RanksFailed: rank 1 raised ValueError: boo"]


@pytest.mark.parametrize(("text", "expected"), [(None, [0, 1, 2]), ("all", [0, 1, 2]), ("1", [1]), ("0,2", [0, 2]), ("1:", [1, 2])])
def test_targets(text, expected):
    assert choose(text, 3) == expected


@pytest.mark.parametrize("text", ["5", "x", "__import__('os')", "3:"])
def test_targets_that_are_none(text):
    with pytest.raises(UsageError, match="ranks 0 to 2"):
        choose(text, 3)
