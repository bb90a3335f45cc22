"""Runs of the training command that the tests start, watch, kill and resume; all of them small."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from fsdp_ref.train_run import checkpoints, read_log

ROOT = Path(__file__).parents[2]
LIMIT = 120                  # seconds until a command that hangs fails its test; a working one takes a tenth
STEPS = 60
TINY = ["--ranks", "2", "--dim", "16", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "4", "--dropout", "0.2",
        "--steps", str(STEPS), "--save-every", "10", "--eval-every", "20", "--warmup", "5", "--lr", "0.01", "--eval-windows", "5"]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fsdp_ref.train")


def environment():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def start(*argv, program=("-m", "fsdp_ref.cli", "train"), **more):
    return subprocess.Popen([sys.executable, *program, *map(str, argv)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, **more)


def finish(process):
    """Exit code, standard output, standard error."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def train(*argv, **more):
    return finish(start(*argv, **more))


def until(condition, what):
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT} s for {what}"
        time.sleep(0.005)
    return value


def ranks_of(process):
    """The processes of a running command, as psutil sees them."""
    return psutil.Process(process.pid).children(recursive=True)


def rank_in(process):
    """RANK in the environment of a process; None when it has none, or has ended since it was listed."""
    try:
        return process.environ().get("RANK")
    except psutil.Error:
        return None


def gone(processes):
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def steps_done(run):
    path = run / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_until_past_a_checkpoint(text, run, **more):
    """A started command that has a checkpoint and has done some steps more."""
    process = start(*TINY, "--data", text, "--out", run, **more)
    until(lambda: process.poll() is not None or steps_done(run) >= 15, "step 15")
    assert process.poll() is None, process.communicate()
    return process


def resume_and_compare(run, reference, **more):
    """Go on to the end; every step's numbers are those of the run that was never killed, bit for bit."""
    left_at = read_log(run)[-1]["step"]
    assert left_at < STEPS and checkpoints(run), "the run was killed too late to show anything"
    code, out, err = train("--out", run, "--resume", "auto", **more)
    assert code == 0, err
    assert "resumed after step" in out
    assert exact(run) == exact(reference)


def exact(run):
    """What must be the same in a log: everything but how long it took."""
    return [{key: value for key, value in row.items() if key not in ("tokens_per_second", "save_seconds")} for row in read_log(run)]
