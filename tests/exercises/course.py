"""A course to grade: what students hand in, and the commands of docs/instructors.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat

from fsdp_ref.exercises import source

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "instructors.md"
NAME = "ring_all_gather"
LIMIT = 600             # seconds for one block of commands, on a machine that does other things too

HALF = '''
def ring_all_gather(mine, rank, world, send, recv):
    """Right values, but straight from everybody to everybody: no ring."""
    pieces = [mine] * world
    for other in range(world):
        if other != rank:
            send(mine, other)
    for other in range(world):
        if other != rank:
            pieces[other] = recv(other)
    return torch.cat(pieces)
'''
# What a cell could do to a grader that runs it: loop for ever, and before that put the graders' functions out of action.
FORGED = '''
import fsdp_ref.exercises.graded, fsdp_ref.lab.checks
fsdp_ref.exercises.graded.require = lambda *args: None
fsdp_ref.lab.checks.Report.require = lambda *args: None
while True:
    pass
'''


def commands(heading: str) -> list[str]:
    """The shell blocks below one heading of the page."""
    below = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", below, flags=re.S)


def shell(block: str, folder: Path) -> str:
    """Run one block of the page; its output. The package is this checkout's, the tools are those beside this Python."""
    tools = folder / "tools"
    if not tools.exists():
        tools.mkdir()
        (tools / "fsdp-ref").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fsdp_ref.cli "$@"\n')
        (tools / "fsdp-ref").chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "1"}
    process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)                 # the tool's kernels too
        said, _ = process.communicate(timeout=10)
        raise AssertionError(f"not done in {LIMIT} s: {block}\n{said[-3000:]}") from None
    assert process.returncode == 0, f"{block}\n{said[-5000:]}"
    return said


def handed_in(released: Path) -> dict[str, nbformat.NotebookNode]:
    """Student -> notebook: a right answer, a half-right one, the stub as it was, and one that attacks the grader."""
    read = source.read(ROOT / "exercises" / "src" / f"{NAME}.py")
    answer = next(cell.text for cell in read.cells if cell.role == "answer")
    texts = {"right": source.without_marks(answer), "half": HALF, "stub": source.with_stub(answer)}
    made = {student: _with(released, text) for student, text in texts.items()}
    made["forger"] = _with(released, texts["stub"])
    made["forger"].cells.insert(0, nbformat.v4.new_code_cell(FORGED))
    return made


def _with(released: Path, text: str) -> nbformat.NotebookNode:
    """The released notebook with this text in the cell to be filled in."""
    notebook = nbformat.read(released, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and f"def {NAME}" in cell.source]
    assert len(cells) == 1 and "raise NotImplementedError()" in cells[0].source
    cells[0].source = text.strip()
    return notebook
