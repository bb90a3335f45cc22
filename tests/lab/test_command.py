"""The training command as a lesson starts it: watched, killed at once, continued, and its errors told in its own words."""

import subprocess
import sys
import time

import psutil
import pytest

from fsdp_ref.errors import RankError
from fsdp_ref.lab import Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TINY = {"ranks": 2, "dim": 16, "heads": 2, "layers": 1, "context": 8, "batch": 4, "eval_every": 0, "eval_windows": 2}


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(32, 127)) * 200)
    return file


def test_killed_at_once_and_continued(tmp_path, text):
    run = Training(tmp_path / "run", data=text, steps=400, save_every=40, **TINY).until_step(45)
    assert run.kill() == {"before": 3, "after": 0}
    assert (tmp_path / "run" / "checkpoints" / "step-00000040").is_dir()
    left = max(run.losses())
    assert 45 <= left < 400
    with pytest.raises(RankError, match="ended before step 400"):
        run.until_step(400)
    again = Training(tmp_path / "run", data=text, resume="auto", **{**TINY, "steps": left + 1, "save_every": 0}).finish()
    assert sorted(again.losses()) == list(range(1, left + 2))


def test_asked_to_stop_it_saves_its_step_and_says_so_with_its_exit_code(tmp_path, text):
    run = Training(tmp_path / "run", data=text, steps=4000, save_every=0, **TINY).until_step(5)
    assert run.preempt() == 75
    last = max(run.losses())
    assert 5 <= last < 4000
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]


def test_a_refusal_is_told_in_the_commands_own_words(tmp_path):
    with pytest.raises(RankError, match="no-such-text"):
        Training(tmp_path / "run", data=tmp_path / "no-such-text", steps=1, **TINY).finish()


KERNEL = """
import sys, time
from fsdp_ref.lab import Training
run = Training(sys.argv[1] + "/run", data=sys.argv[2], steps=100000, ranks=2, dim=16, heads=2, layers=1, context=8, batch=4, eval_every=0)
run.until_step(2)
print(*[process.pid for process in run._find_family()], flush=True)
time.sleep(60)
"""


def test_it_ends_with_the_kernel(tmp_path, text):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, str(tmp_path), str(text)], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in kernel.stdout.readline().split()]
    assert len(pids) == 3 and all(map(psutil.pid_exists, pids))
    kernel.kill()
    kernel.wait()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
    kernel.stdout.close()
