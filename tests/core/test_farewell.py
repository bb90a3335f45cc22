"""A rank that leaves says why, and those who wait for it tell it at once: which error at which line, or that its program was over."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from fsdp_ref import collectives, farewell, world
from fsdp_ref.diagnosis import Evidence, Raised, diagnose
from fsdp_ref.errors import RankError


def _leaves(rank, size, how):
    begin = time.monotonic()
    if rank == 1:
        try:
            if how == "raised":
                raise ValueError("no such file")
        except ValueError:
            world.stop()
        world.stop()
        return "", 0.0
    with pytest.raises(RankError) as caught:
        if size > rank + 1:
            collectives.barrier()
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(("how", "told", "kind"), [
    ("raised", "rank 1 raised ValueError: no such file at line 21 of test_farewell.py, in _leaves", "exception"),
    ("ended", "rank 1 came to the end of its program", "rank-dependent branch")])
def test_what_the_rank_that_left_has_said_is_told_by_the_one_that_waits(ranks, how, told, kind):
    text, seconds = ranks(2, _leaves, how, timeout=30.0)[0]
    assert text.startswith(f"{told} and never came to exchange of facts of the whole world (control)"), text
    why = "line 28 stands under `if size > rank + 1` (line 27), which was false on rank 1"
    assert (why in text) == (how == "ended"), "an error needs no other reason"
    assert diagnose(Evidence({0: Raised("RankError", text)})).kind == kind
    assert seconds < 25, "long before the time limit"


SCRIPT = """
import sys
from fsdp_ref import farewell
from fsdp_ref.errors import RankError
import torch.distributed as dist
store = dist.HashStore()
farewell.promise(store, 3)
try:
    raise {error}
finally:
    import atexit
    atexit.register(lambda: print("said:", farewell.of(store, 3)))
"""


@pytest.mark.parametrize(("error", "printed", "said"), [
    ("ValueError('boo. More')", "rank 3 raised ValueError: boo", "raised ValueError: boo"),
    ("RankError('rank 1 died')", "rank 3: RankError: rank 1 died", ""),
    ("SystemExit(0)", "", "")])
def test_the_last_line_names_the_rank_and_only_the_guilty_one_shows_a_traceback(error, printed, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True, timeout=120)
    assert (done.stderr.strip().splitlines() or [""])[-1] == printed and done.stdout == f"said: {said}\n"
    assert ("Traceback" in done.stderr) == ("ValueError" in error)


def test_a_store_that_is_gone_does_not_matter():
    class Gone:
        def set(self, *_):
            raise RuntimeError("gone")

    before = sys.excepthook
    farewell.promise(Gone(), 0)
    farewell.say(ValueError())
    farewell.say()
    sys.excepthook = before
