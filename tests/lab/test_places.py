"""Odd places to run in: a host name nobody knows, no IPv6, an interface that leads nowhere, several pools at once, an impatient runner,
a kernel that is restarted, and many starts in a row."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.util import run_sync

from fsdp_ref.lab import processes, start
from tests.lab.test_lifetime import gone

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

POOL = """
from fsdp_ref.lab import start
lab = start(ranks=2)
lab.execute("x = torch.ones(2)\\ndist.all_reduce(x)\\nassert x.tolist() == [2.0, 2.0]\\nprint('summed')")
print(*lab.pids)
lab.stop()
"""
# In namespaces of its own: the loopback interface alone works, and the first one found is a tunnel to nowhere.
ALONE = """
hostname no-such-host.invalid
ip link set lo up
ip link add tun0 type dummy 2>/dev/null && ip addr add 10.9.0.2/24 dev tun0 && ip link set tun0 up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null
exec "$@"
"""


def _namespaces() -> bool:
    """Whether this user may make network namespaces here."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _namespaces(), reason="needs the right to make namespaces")
def test_b40_a_bogus_host_name_no_ipv6_and_a_tunnel_do_not_matter():
    command = ["unshare", "--net", "--uts", "sh", "-c", ALONE, "sh", sys.executable, "-c", POOL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("summed") == 2, done.stderr[-2000:]


def test_b38_ranks_are_never_forked_from_a_process_that_has_used_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert processes._METHOD.get_start_method() in ("forkserver", "spawn")
    calls = []
    monkeypatch.setattr(os, "fork", lambda: calls.append("fork"))
    lab = start(ranks=2)
    lab.stop()
    assert calls == []


def test_several_pools_at_once():
    kernels = [subprocess.Popen([sys.executable, "-c", POOL], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [kernel.communicate(timeout=240)[0] for kernel in kernels]
    assert all(kernel.returncode == 0 for kernel in kernels) and all(text.count("summed") == 2 for text in said)
    pids = [int(pid) for text in said for pid in text.splitlines()[-1].split()]
    assert len(set(pids)) == 6 and gone(pids)


def test_starts_and_stops_in_a_row(tmp_path):
    """Also from a script without a `__main__` guard, which multiprocessing would run again in every engine."""
    script = tmp_path / "again.py"
    script.write_text("from fsdp_ref.lab import start\nimport psutil\nfor _ in range(4):\n    lab = start(ranks=2)\n    lab.stop()\n"
                      "    assert not any(map(psutil.pid_exists, lab.pids))\nprint('done')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.count("2 ranks are ready") == 4 and done.stdout.endswith("done\n"), done.stderr[-2000:]


CELLS = ["from fsdp_ref.lab import start\nlab = start(ranks=2)",
         "%%px\nif rank == 0: dist.barrier()",
         "%%px\nprint('well')  # patient",
         "print(*lab.pids)"]


def test_an_impatient_runner_and_a_restarted_kernel(monkeypatch):
    """What nbgrader does: 5 s a cell, then an interrupt. The pool comes back by itself, and dies with its kernel."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    client = NotebookClient(notebook, kernel_name="python3", allow_errors=True, interrupt_on_timeout=True,
                            timeout_func=lambda cell: 5 if "barrier" in cell.source else 150)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        errors = [output.evalue for output in notebook.cells[1].outputs if output.output_type == "error"]
        text = "".join(output.get("text", "") for output in notebook.cells[2].outputs)
        assert all("interrupted after" in error for error in errors) and text == "[rank 0] well\n[rank 1] well\n", (errors, text)
        pids = [int(pid) for pid in notebook.cells[3].outputs[0].text.split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        run_sync(client.km.restart_kernel)(now=True)
        assert gone(pids)


def test_an_interrupted_restart_is_made_up_for(monkeypatch, capsys):
    lab = start(ranks=2, timeout=4)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(type(lab), "_bring_up", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
            lab.kill(1)
            with pytest.raises(KeyboardInterrupt):
                lab.heal()
        assert "to be restarted" in repr(lab) and lab.pids == []
        lab.execute("print(rank)")
        assert capsys.readouterr().out.endswith("[rank 0] 0\n[rank 1] 1\n") and len(lab.pids) == 2
    finally:
        lab.stop()
    assert "stopped" in repr(lab)
