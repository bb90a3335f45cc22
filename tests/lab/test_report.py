"""The report of a failure: root cause first, what followed from it folded, each rank named once."""

import pytest
from IPython.core.error import UsageError

from fsdp_ref.lab.magics import choose
from fsdp_ref.lab.report import Failure, RanksFailed, explain, how_it_died, is_group_error, name_ranks, trim, where

GLOO = ("RuntimeError", "[../third_party/gloo/x.cc:78] Timed out waiting 15000ms for recv operation to complete", "")


def test_own_error_comes_before_the_ones_it_caused():
    failure = Failure(errors={0: GLOO, 1: ("ValueError", "boo", "the traceback"), 2: ("RankError", "rank 1 never arrived", "")})
    text, each, details = explain(failure)
    assert text.startswith("rank 1 raised ValueError: boo; ranks 0 and 2 then failed in a collective")
    assert set(each) == {0, 1, 2} and details == "the traceback"
    assert failure.group_broken


def test_the_same_error_on_all_ranks_is_told_once():
    failure = Failure(errors={rank: ("NameError", "name 'x' is not defined", "t") for rank in range(4)})
    assert explain(failure)[0] == "ranks 0, 1, 2 and 3 raised NameError: name 'x' is not defined"
    assert not failure.group_broken


def test_dead_rank_is_named_with_its_signal_and_pid():
    failure = Failure(dead={2: -9}, errors={0: ("RankError", "rank 2 died while ...", "")}, pids=[10, 11, 12], output="last words")
    text, each, details = explain(failure)
    assert text.startswith("rank 2 (pid 12) died with signal 9 (SIGKILL)") and "rank 0 then failed" in text
    assert each[2] == "died with signal 9 (SIGKILL)" and details == "last words"


def test_collective_failure_alone_keeps_its_own_words():
    text, _, _ = explain(Failure(errors={0: ("RankError", "rank 1 never arrived at all-gather of block.1", "trace")}))
    assert text == "rank 1 never arrived at all-gather of block.1"
    text, _, _ = explain(Failure(errors={0: GLOO}))
    assert text.startswith("rank 0 waited in a collective that the others did not join")


@pytest.mark.parametrize(("error", "expected"), [(GLOO, True), (("RankError", "x", ""), True), (("DistBackendError", "x", ""), True),
                                                 (("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", ""), False),
                                                 (("ValueError", "gloo", ""), False)])
def test_which_errors_break_the_group(error, expected):
    assert is_group_error(error) is expected


def test_stuck_rank_is_told_where_it_is():
    stack = ('Stack (most recent call first):\n  File "/x/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
             '  File "/tmp/ipykernel_77/123.py", line 3 in work\n  File "/tmp/ipykernel_77/124.py", line 1 in <module>\n')
    assert where(stack) == "line 3 of the cell, in work"
    text, _, _ = explain(Failure(stuck={1: stack, 2: ""}, after=3.2))
    assert text == "ranks 1 and 2 did not finish within 3 s (rank 1 is at line 3 of the cell, in work; rank 2 is in a library)"
    assert "interrupted after 3 s" in explain(Failure(stuck={1: stack}, after=3.2, interrupted=True))[0]
    assert Failure(stuck={1: stack}).group_broken and Failure(interrupted=True).group_broken and not Failure()


def test_words():
    assert name_ranks([2]) == "rank 2" and name_ranks({3, 0}) == "ranks 0 and 3"
    assert how_it_died(7) == "exited with status 7" and how_it_died(-6) == "died with signal 6 (SIGABRT)"


def test_library_frames_are_left_out_of_a_traceback():
    trace = ("----\nValueError  Traceback\nCell In[1], line 1\n----> 1 f()\n\nFile /x/site-packages/torch/y.py:3, in f\n1 g\n\n"
             "ValueError: boo")
    assert trim(trace) == "----\nValueError  Traceback\nCell In[1], line 1\n----> 1 f()\n\nValueError: boo"


def test_notebook_shows_the_report_and_no_frames_of_the_kernel():
    lines = RanksFailed("rank 1 raised ValueError: boo", {1: "ValueError"}, details="a\nb")._render_traceback_()
    assert lines == ["a", "b", "", "RanksFailed: rank 1 raised ValueError: boo"]


@pytest.mark.parametrize(("text", "expected"), [(None, [0, 1, 2]), ("all", [0, 1, 2]), ("1", [1]), ("0,2", [0, 2]), ("1:", [1, 2])])
def test_targets(text, expected):
    assert choose(text, 3) == expected


@pytest.mark.parametrize("text", ["5", "x", "__import__('os')", "3:"])
def test_targets_that_are_none(text):
    with pytest.raises(UsageError, match="ranks 0 to 2"):
        choose(text, 3)
