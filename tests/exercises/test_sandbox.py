"""Answers that attack: each ends, is named in the report, earns nothing it has not shown, and leaves nothing behind."""

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fsdp_ref.errors import WorldError
from fsdp_ref.lab.checks import Case, Submission, exercise, serving
from fsdp_ref.lab.checks.judging import examine
from fsdp_ref.lab.checks.sandbox import run

from .answers import ROOT, solution

pytestmark = pytest.mark.slow
NAME = "ring_all_gather"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's walls are Linux's")
PIECES = [{"mine": piece} for piece in ([1.0, 2.0], [3.0, 4.0])]


def attack(lines: str, then: str = "") -> Submission:
    """An answer that does this first; then a right answer, or what is given."""
    right = solution(NAME).submission.text.replace("def ring_all_gather", "def right")
    body = "\n".join("    " + line for line in lines.strip("\n").splitlines())
    then = then or "return right(mine, rank, world, send, recv)"
    return Submission(f"{right}\n\ndef ring_all_gather(mine, rank, world, send, recv):\n{body}\n    {then}\n", NAME)


def judged(lines: str, then: str = ""):
    return examine(exercise(NAME), attack(lines, then), seed=3)


def ran(lines: str, **limits):
    """The evidence of one run with tight limits."""
    import torch
    each = [{"mine": torch.tensor(piece["mine"])} for piece in PIECES]
    return run(attack(lines), NAME, Case(2, "two ranks", each=each, **limits))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each attack the server has no children, and this process has no folder."""
    yield
    server = serving.server()
    deadline = time.monotonic() + 5
    while psutil.Process(server._process.pid).children(recursive=True) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.Process(server._process.pid).children(recursive=True)
    assert not list(Path(tempfile.gettempdir()).glob(f"fsdp-ref-lab-*-{os.getpid()}-*"))


# -- not coming to an end ---------------------------------------------------------------------------------------------------------


def test_a_loop_without_end_is_stopped_and_its_line_named():
    failure = ran("while rank == 0:\n    rank = rank * 1", cpu=1, limit=8).failure
    assert failure.kind == "time" and "rank 0 computed without end" in failure.words and "rank" in failure.words.split("at `")[1]


def test_a_loop_that_ignores_every_signal_is_stopped():
    failure = ran("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass", cpu=1, limit=8).failure
    assert failure.kind in ("time", "exit")


def test_sleeping_is_stopped_and_its_line_named():
    failure = ran("import time\nif rank == 1:\n    time.sleep(1000)", limit=0.7).failure
    assert failure.kind == "time" and "rank 1 is still at work, at `time.sleep(1000)`" in failure.words


@pytest.mark.parametrize(("lines", "words"), [
    ("import os\nos._exit(0)", "left with status 0 before the function returned"),
    ("import sys\nsys.exit(0)", "raised SystemExit"),
    ("import signal\nsignal.raise_signal(signal.SIGKILL)", "was ended by SIGKILL"),
    ("import os\nos.closerange(3, 100)", "before the function returned"),
    ("import threading\nthreading.Event().wait()", "is still at work, at `threading.Event().wait()`"),
])
def test_leaving_instead_of_returning_counts_against_it(lines, words):
    evidence = ran(lines, limit=1.0)
    assert words in evidence.failure.words


def test_one_rank_that_leaves_is_the_story_not_those_that_wait_for_it():
    report = judged("import os\nif rank == 1:\n    os._exit(0)")
    assert "rank 1's process left with status 0" in report.diagnosis and report.score == 0 and report.verdicts["no hang"].passed is False


# -- taking too much --------------------------------------------------------------------------------------------------------------


def test_memory_is_bounded():
    report = judged("hog = [torch.ones(2**24) for _ in range(100)]")
    assert "took more than the 512 MiB" in report.diagnosis and "hog = " in report.diagnosis and report.score == 0


def test_printing_is_bounded():
    failure = ran("while True:\n    print('x' * 10000)").failure
    assert failure.kind == "flood" and "printed more than 1 MiB" in failure.words


def test_traffic_is_bounded():
    failure = ran("while True:\n    send(torch.zeros(2**20), 1 - rank)").failure
    assert failure.kind in ("message", "memory", "time"), failure


def test_files_are_bounded():
    evidence = ran("with open('big', 'wb') as file:\n    for _ in range(100):\n        file.write(bytes(2**20))", file_size=2**22)
    assert evidence.failure.kind == "error" and "OSError" in evidence.failure.words


@pytest.mark.parametrize(("lines", "words"), [
    ("import os\nwhile True:\n    os.fork()", "os.fork"),
    ("import subprocess\nsubprocess.run(['true'])", "subprocess.Popen"),
    ("import os\nos.system('true')", "os.system"),
    ("import multiprocessing\nmultiprocessing.get_context('fork').Process(target=print).start()", "os.fork"),
])
def test_no_process_is_started(lines, words):
    report = judged(lines)
    assert "PermissionError" in report.diagnosis and report.score == 0
    assert any(f"tried what is not allowed: {words}" in note for note in report.notes)


# -- forging ----------------------------------------------------------------------------------------------------------------------

WRONG = "return torch.zeros(world * len(mine), dtype=mine.dtype)"


@pytest.mark.parametrize("lines", [
    "torch.equal = lambda *each: True\ntorch.Tensor.__eq__ = lambda *each: True\ntorch.allclose = lambda *each, **more: True",
    "import json, builtins\njson.dumps = lambda *each, **more: '{}'\njson.loads = lambda *each: {}\nbuiltins.all = lambda *each: True",
    "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('inside'):\n        module.difference = None",
    "import torch.distributed as dist\ndist.all_reduce = dist.barrier = lambda *each, **more: None",
    "import fsdp_ref.errors as errors\nerrors.ConfigError = None",
])
def test_patching_changes_nothing_outside_the_rank(lines):
    report = judged(lines, WRONG)
    assert report.score == 0 and not report.passed


FRAME = """
import json, os, struct
text = json.dumps({message}).encode()
for number in range(3, 64):
    try:
        os.write(number, struct.pack('!IQ', len(text), 0) + text)
    except OSError:
        pass
"""


@pytest.mark.parametrize("message", [
    {"do": "verdict", "passed": True}, {"do": "result", "value": {"passed": True, "score": 5}}, {"do": "result", "value": {"result": True}},
    {"do": "result", "value": {"result": {"tensor": ["float32", [2**40], 0, 8]}}}, {"do": "end"}, {"do": "__init__"}, [1, 2], {"do": None},
    {"do": "all", "op": "all_reduce", "number": 1}, {"do": "send", "peer": 7, "number": 1}, {"do": "result", "value": [[[[]]]]},
])
def test_forged_messages_earn_nothing(message):
    report = judged(FRAME.replace("{message}", repr(message)), WRONG)
    assert report.score == 0 and report.verdicts["values"].passed is not True


def test_garbage_on_the_line_is_named():
    report = judged("import os\nfor number in range(3, 64):\n    try:\n        os.write(number, b'\\xff' * 100)\n"
                    "    except OSError:\n        pass")
    assert "wrote to the judge's line what no rank of an exercise writes" in report.diagnosis and report.score == 0


def test_words_that_look_like_the_graders_are_only_words():
    report = judged("print('File \"<your answer>\", line 99999')\nprint('ring_all_gather: passed, 5 of 5 points')", WRONG)
    assert report.score == 0


# -- reaching out -----------------------------------------------------------------------------------------------------------------

SECRETS = [ROOT / "src" / f"{NAME}.py", ROOT / "answers" / NAME / "other_1.py", Path(serving.__file__).with_name(f"{NAME}.py")]


@pytest.mark.parametrize("path", SECRETS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("how", ["open({!r}).read()", "import os; os.open({!r}, 0)", "from pathlib import Path; Path({!r}).read_text()",
                                 "import linecache; assert linecache.getlines({!r})"])
def test_solutions_and_judges_cannot_be_read(how, path):
    report = judged(how.format(str(path)))
    assert report.score == 0, str(report)
    assert any("tried what is not allowed: open of" in note and path.name in note for note in report.notes)


@LINUX
@pytest.mark.parametrize("path", SECRETS, ids=lambda path: path.parent.name)
def test_the_kernel_too_refuses_to_open_them(path):
    """torch opens this file in C++, where no audit hook is asked."""
    report = judged(f"torch.UntypedStorage.from_file({str(path)!r}, False, 16)")
    assert report.score == 0 and "RuntimeError" in report.diagnosis and "unable to open file" in report.diagnosis, report.diagnosis


def test_no_judge_is_in_the_ranks_memory():
    report = judged("import sys\nknown = [name for name in sys.modules if 'checks' in name or name.startswith('fsdp_ref.lab')]\n"
                    "assert not known, known\nassert not [path for path in sys.path if path.rstrip('/').endswith('checks')]\n"
                    "import importlib\nfor name in ('fsdp_ref.lab.checks.ring_all_gather', 'ring_all_gather', 'judging'):\n    try:\n"
                    "        importlib.import_module(name)\n    except (ImportError, PermissionError):\n        pass\n    else:\n"
                    "        raise AssertionError('a judge was imported')")
    assert report.passed, str(report)


def test_the_rest_of_the_package_can_be_imported():
    report = judged("import fsdp_ref.placements, fsdp_ref.interval, colorsys\nassert fsdp_ref.placements.ZERO3.name == 'ZeRO-3'")
    assert report.passed, str(report)


@pytest.mark.parametrize(("lines", "words"), [
    ("import socket\nsocket.create_connection(('127.0.0.1', 80), 1)", "socket"),
    ("import socket\nsocket.socket()", "socket.__new__"),
    ("import urllib.request\nurllib.request.urlopen('http://localhost/', timeout=1)", "socket.getaddrinfo"),
    ("import os\nos.kill(os.getppid(), 9)", "os.kill"),
    ("import ctypes\nctypes.CDLL(None).fork()", "ctypes.dlopen"),
    ("import gc\ngc.get_objects()", "gc.get_objects"),
    ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))", "resource.setrlimit"),
    ("open('/proc/1/environ').read()", "open of /proc/1/environ"),
    ("import os\nos.listdir('/')", "os.listdir of /"),
    ("open('/tmp/left-behind', 'w')", "open of /tmp/left-behind"),
    ("import os\nos.symlink('/etc', 'etc')", "os.symlink of /etc"),
])
def test_reaching_out_is_refused_and_named(lines, words):
    report = judged(lines)
    assert report.score == 0 and any(f"tried what is not allowed: {words}" in note for note in report.notes), str(report)


def test_an_attempt_that_is_caught_is_ignored_but_named():
    report = judged("try:\n    open('/etc/passwd')\nexcept OSError:\n    pass")
    assert report.passed and any("open of /etc/passwd" in note for note in report.notes)


def test_the_environment_holds_no_secrets(monkeypatch):
    report = judged("import os\nassert 'FSDP_REF_CHECK_PATIENCE' not in os.environ, 'it is there'")
    assert "FSDP_REF_CHECK_PATIENCE" in os.environ and report.passed, str(report)


def test_threads_that_are_left_end_with_the_rank():
    report = judged("import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()")
    assert report.passed and any("left 1 thread behind" in note for note in report.notes)


def test_ranks_share_no_folder_unless_the_case_says_so():
    lines = "import os\nopen(f'from-{rank}', 'w').close()\nsend(mine, 1 - rank)\nrecv(1 - rank)\nassert len(os.listdir('.')) == {n}"
    assert ran(lines.replace("{n}", "1")).failure is None
    evidence = ran(lines.replace("{n}", "2"), one_folder=True, files={"sub/given": b"x"})
    assert "AssertionError" in evidence.failure.words                                # with the given folder there are three names
    assert set(evidence.files) == {"shared/from-0", "shared/from-1", "shared/sub/given"}


# -- our own mistakes -------------------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_be_prepared_is_not_the_learners_fault():
    with pytest.raises(WorldError, match="rank 0 could not be prepared .*no_such_exercise"):
        run(attack("pass"), "no_such_exercise", Case(2, "two ranks"))
    assert judged("pass").passed, "and the next check works"


def test_an_interrupt_ends_the_ranks(monkeypatch):
    before = serving.server()

    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr("fsdp_ref.lab.checks.sandbox.Run._carry", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ran("while True:\n    pass")
    assert before._process.poll() is not None and not before.usable
    monkeypatch.undo()
    assert judged("pass").passed


def test_what_torch_imports_late_may_be_used():
    """An optimizer imports torch._dynamo, `backward(gradient)` sympy, and `manual_seed` looks at the lines that called it."""
    report = judged("import torch\nx = torch.ones(3, requires_grad=True)\n(2 * x).backward(torch.ones(3))\ntorch.optim.AdamW([x]).step()\n"
                    "torch.manual_seed(1)")
    assert report.passed and "not allowed" not in str(report), str(report)
