"""The commands a newcomer types: what make would do, and what it says where it cannot."""

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def plan(tmp_path, *arguments: str) -> str:
    result = make("-n", f"VENV={tmp_path}/venv", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def pip_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "-m pip" in line and " install " in line]


def test_lab_installs_under_constraints_and_opens_the_first_notebook(tmp_path):
    text = plan(tmp_path, "lab", "PORT=8890", "BROWSER=no")
    installs = pip_calls(text)
    assert len(installs) == 2 and all("--constraint constraints.txt" in line for line in installs)
    assert installs[0].endswith(" torch"), "torch comes first, in the pinned version"
    assert "[lab]" in installs[1]
    assert 'serve.py --port "8890" --browser "no" notebooks/00_meet_the_ranks.ipynb' in text


def test_second_call_installs_nothing(tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    newest = max((ROOT / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt"))
    for number, stamp in enumerate((".python", ".lab", ".test")):
        (venv / stamp).touch()
        os.utime(venv / stamp, (newest + number + 1,) * 2)
    assert not pip_calls(plan(tmp_path, "lab"))
    assert not pip_calls(plan(tmp_path, "test"))
    for number, stamp in enumerate((".python", ".lab", ".test")):
        os.utime(venv / stamp, (newest - 10 + number,) * 2)
    assert pip_calls(plan(tmp_path, "lab")), "a newer pyproject.toml must lead to a new install"


def test_test_runs_everything(tmp_path):
    text = plan(tmp_path, "test")
    assert "ruff check" in text
    assert "-m pytest -n 2 --dist loadfile --nbval-lax --nbval-cell-timeout=120 tests notebooks --ignore=tests/" in text
    apart = set(re.findall(r"--ignore=(\S+)", text))
    assert apart == set(re.search(r"-m pytest ((?:tests/\w+ ?)+)", text)[1].split()), "what is left out of the first run is in the second"
    assert all((ROOT / folder).is_dir() for folder in apart)
    assert "-n 0 " in plan(tmp_path, "test", "WORKERS=0")
    assert "[test]" in text
    assert '-m "not slow"' in plan(tmp_path, "test-fast")


def test_windows_is_told_at_once():
    result = make("OS=Windows_NT", "lab")
    assert result.returncode != 0
    assert "WSL2" in result.stderr


@pytest.mark.parametrize(("script", "expected"), [
    ('if [ "$1" = -V ]; then echo Python 3.9.6; exit 0; fi; exit 1', "Python 3.9.6"),
    ('case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac', "python3-venv"),
], ids=["too old", "without venv"])
def test_python_that_cannot_work_is_named(tmp_path, script, expected):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    result = make(f"VENV={tmp_path}/venv", f"PYTHON={python}", "lab")
    assert result.returncode != 0
    assert expected in result.stderr and str(python) in result.stderr
    assert not (tmp_path / "venv").exists()


def test_missing_python_is_named(tmp_path):
    result = make(f"VENV={tmp_path}/venv", "PYTHON=no-such-python", "lab")
    assert result.returncode != 0 and "no-such-python was not found" in result.stderr


def serve(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "notebooks" / "serve.py", *arguments, "x.ipynb"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_port_in_use_is_named_with_the_fix():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve("--port", str(port))
    assert result.returncode == 1
    assert f"port {port} is in use" in result.stderr and "PORT=" in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("port", ["0", "70000", "abc"])
def test_port_that_is_none(port):
    result = serve("--port", port)
    assert result.returncode == 1 and f"PORT={port} is not a port" in result.stderr


@pytest.mark.slow
def test_server_prints_an_address_that_opens(tmp_path):
    """JupyterLab really answers at the printed address, refuses without the token, and ends when told to."""
    import urllib.error
    import urllib.request
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, ROOT / "notebooks" / "serve.py", "--port", str(port), "--browser", "no", "x.ipynb"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            address = next(line.strip() for line in process.stdout if "token=" in line)
            assert address.startswith(f"http://127.0.0.1:{port}/lab")
            token = address.split("token=")[1]
            listing = f"http://127.0.0.1:{port}/api/contents"
            with urllib.request.urlopen(f"{listing}?token={token}", timeout=20) as answer:
                assert answer.status == 200
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(listing, timeout=20)
            assert refused.value.code == 403
            arguments = Path(f"/proc/{process.pid}/cmdline")
            assert not arguments.exists() or token not in arguments.read_text()
        finally:
            process.terminate()
            process.wait(30)
