"""A user's own script under torchrun: FSDP_REF_CHECK_CALLS=1 and world.start are all it needs to be told what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.lab.gallery.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
BEGINNING = """\
import os, pathlib, torch, torch.distributed as dist
from fsdp_ref import world
here = world.start(timeout=3)
rank, world_size = here.rank, here.size
pathlib.Path(__file__).with_name(f"pid-{rank}").write_text(str(os.getpid()))
"""


@pytest.mark.parametrize(("name", "told"), [
    ("swapped_order", "the ranks disagree about collective number 0: rank 0: all-reduce of grad_a"),
    ("endless_loop", "rank 1 never arrived at barrier")])
def test_one_line_names_the_rank_and_nothing_is_left(tmp_path, name, told):
    program = next(program for program in PROGRAMS if program.name == name)
    script = tmp_path / f"{name}.py"
    script.write_text(BEGINNING + program.text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FSDP_REF_CHECK_CALLS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and time.monotonic() - begin < 200
    lines = [line for line in done.stderr.splitlines() if told in line]
    assert lines and all(line.startswith(("rank 0: RankError: ", "rank 1: RankError: ")) for line in lines), done.stderr
    assert "called from" not in lines[0] and f"line {len(BEGINNING.splitlines()) + (program.line or 4)} of {name}.py" in lines[0], lines[0]
    ranks_said = done.stderr.partition("Traceback")[0]
    assert lines[0] in ranks_said, "what torchrun adds comes after it; no rank printed a traceback"
    for rank in range(2):
        assert not psutil.pid_exists(int((tmp_path / f"pid-{rank}").read_text()))
