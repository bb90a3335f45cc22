"""The gallery as scripts: one process a rank that calls world.start, as under torchrun or any launcher of the user's own.

Each ends by itself or is ended with the others, in time; what the ranks wrote to stderr and their exit statuses give the same diagnosis
as the pool; no process is left.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fsdp_ref.diagnosis import Evidence, Raised, diagnose
from tests.lab.gallery.programs import PROGRAMS
from tests.lab.test_gallery import check
from tests.ranks import _METHOD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT = 3.0           # seconds a collective may wait
LINGER = 8.0            # seconds a rank gets when another one has failed: it may be waiting for it, and says so
LIMIT = 60.0
AT_ONCE = 2             # programs: there are two cores


def _script(rank: int, home: str, name: str) -> None:
    """What `python NAME.py` does on one rank, in a process that has torch already."""
    errors = os.open(Path(home, f"stderr-{rank}"), os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)
    status = 0
    try:
        import torch

        import fsdp_ref
        from fsdp_ref import collectives, guard, world
        torch.set_num_threads(1)
        guard.install()
        collectives.check_calls()
        world.die_with_parent()
        world.start(rank, 2, store=Path(home, "store"), timeout=TIMEOUT)
        file = Path(home, f"{name}.py")
        names = {"rank": rank, "world_size": 2, "torch": torch, "dist": torch.distributed, "fsdp_ref": fsdp_ref, "folder": home}
        exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__", **names})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()                                     # as the interpreter's end does
    sys.stderr.flush()
    os._exit(status)


def run(program) -> tuple[dict[int, int], dict[int, str], float]:
    """Each rank's exit status and what it wrote to stderr; and the seconds it took. A rank that stays behind is killed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-gallery-") as home:
        Path(home, f"{program.name}.py").write_text(program.text)
        ranks = [_METHOD.Process(target=_script, args=(rank, home, program.name)) for rank in range(2)]
        for process in ranks:
            process.start()
        deadline = begin + LIMIT
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode not in (None, 0) for process in ranks):
                deadline = min(deadline, time.monotonic() + LINGER)
            time.sleep(0.05)
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join(10)
        assert not any(psutil.pid_exists(process.pid) for process in ranks)
        statuses = {rank: -15 if rank in late else process.exitcode for rank, process in enumerate(ranks)}
        return statuses, {rank: Path(home, f"stderr-{rank}").read_text() for rank in range(2)}, time.monotonic() - begin


def evidence(statuses: dict[int, int], said: dict[int, str]) -> Evidence:
    """What a launcher knows: exit statuses, and the last line each rank wrote."""
    raised, ended = {}, {}
    for rank, status in statuses.items():
        own = re.findall(r"^rank \d+ raised (\w+): (.*?)(?: at (line \d+ of \w+\.py).*)?$", said[rank], re.M)
        others = re.findall(r"^rank \d+: (\w+): (.*)$", said[rank], re.M)
        if status == 1 and own + others:
            raised[rank] = Raised(*(own + others)[-1])
        elif status not in (0, -15):
            ended[rank] = status
    words = next((said[rank] for rank in ended), "")
    return Evidence(raised, ended, last_words=words, finished=frozenset(rank for rank, status in statuses.items() if status == 0))


@pytest.fixture(scope="module")
def results():
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {program.name: pool.submit(run, program) for program in PROGRAMS}
        yield futures


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_told_and_nothing_is_left(results, program):
    statuses, said, seconds = results[program.name].result(timeout=280)
    found = diagnose(evidence(statuses, said))
    check(program, found, str(found), f"{program.name}.py")
    assert seconds < LIMIT and any(status != 0 for status in statuses.values())
    for rank, text in said.items():
        if program.ranks is not None and rank not in program.ranks:
            assert "Traceback" not in text, f"an innocent rank says one line: {text}"
