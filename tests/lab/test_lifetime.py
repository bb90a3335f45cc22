"""Ranks never outlive the process that started them, whatever ended it; what it left on disk is swept by the next one."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fsdp_ref.lab import processes

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# A kernel's stand-in: interrupts are ignored, and one rank is busy in a loop that never lets go of the interpreter for long.
KERNEL = """
import json, signal, sys, psutil
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fsdp_ref.lab import start
lab = start(ranks=2)
lab._engines.client[1].execute("while True: pass", block=False)
children = [child.pid for child in psutil.Process().children(recursive=True)]
print(json.dumps({"children": children, "ranks": lab.pids, "home": str(lab._engines.processes.home)}), flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
"""


def kernel(how: str):
    process = subprocess.Popen([sys.executable, "-c", KERNEL, how], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    facts = next(json.loads(line) for line in process.stdout if line.startswith("{"))
    assert set(facts["ranks"]) < set(facts["children"]), "ranks, controller, and multiprocessing's own helpers"
    return process, facts


def gone(pids: list[int], limit: float = 30.0) -> bool:
    deadline = time.monotonic() + limit
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_outlives_a_killed_kernel():
    process, facts = kernel("wait")
    process.kill()
    process.wait()
    assert gone(facts["children"])
    home = Path(facts["home"])
    assert home.exists(), "a killed kernel cannot tidy up"
    assert home in processes.sweep() and not home.exists()
    process.stdin.close()
    process.stdout.close()


def test_nothing_is_left_after_an_ordinary_end():
    process, facts = kernel("end")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert gone(facts["children"])
    assert not Path(facts["home"]).exists()


def test_sweep_leaves_what_is_in_use_and_what_is_not_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = processes.make_home()
    stem = mine.name.rsplit("-", 2)[0]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"{stem}-{dead.pid}-abc"
    other_machine = tmp_path / f"{processes.PREFIX}-00000000-{dead.pid}-abc"
    odd = tmp_path / f"{stem}-notanumber-abc"
    link = tmp_path / f"{stem}-{dead.pid}-link"
    for folder in (left, other_machine, odd):
        folder.mkdir()
        (folder / "file").touch()
    link.symlink_to(mine)
    assert processes.sweep() == [left]
    assert mine.exists() and other_machine.exists() and odd.exists() and link.is_symlink()
    assert (os.stat(mine).st_mode & 0o077) == 0, "keys lie in it: for this user alone"
