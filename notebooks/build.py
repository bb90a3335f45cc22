"""Build the notebooks: notebooks/src/*.py (py:percent text, the source that is edited) -> executed notebooks/*.ipynb with outputs.

    python notebooks/build.py [SOURCE.py ...] [--out DIR]

The same source and the same results give the same bytes: no times, no random cell ids, no widget state, no paths of this machine.
It must never write a notebook whose cells failed (a cell meant to fail carries the tag raises-exception).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).parent
ROOT = HERE.parent
CELL_TIMEOUT = 120      # seconds
LIMIT = 500_000         # bytes of one notebook: it must open quickly in a browser and on a code host
METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}}


class BuildError(Exception):
    """A notebook could not be built; the message names it and the cell."""


def read(source: Path) -> nbformat.NotebookNode:
    """The notebook a py:percent file describes, with cell ids counted instead of random."""
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path, name: str, timeout: float = CELL_TIMEOUT) -> None:
    """Run every cell, in `folder`, and keep the outputs. Raises BuildError naming the cell that failed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["FSDP_REF_LEARNER"] = "course"                          # the numbers in a quiz's questions, the same on every machine
    os.environ.setdefault("FSDP_REF_DATA", str(Path(tempfile.gettempdir()) / "fsdp-ref-build"))      # not the builder's own progress
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False,
                            resources={"metadata": {"path": str(folder)}})
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise BuildError(f"{name} was not written: {error}") from error


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Take out what differs from machine to machine and from run to run."""
    notebook.metadata = nbformat.from_dict(METADATA)                   # drops metadata.widgets, which code hosts refuse half-filled
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
                        or set(output["data"]) - {"application/vnd.jupyter.widget-view+json", "text/plain"}]
        for output in cell.outputs:
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            _without_paths(output)


def _without_paths(output: nbformat.NotebookNode) -> None:
    """Replace this checkout's folder, and the kernel's temporary names of cells, in everything an output shows as text."""
    for holder in (output, output.get("data", {})):
        for key, value in list(holder.items()):
            if isinstance(value, str) and not key.startswith("image/png"):
                holder[key] = scrub(value)
            elif isinstance(value, list) and all(isinstance(line, str) for line in value):
                holder[key] = [scrub(line) for line in value]


def scrub(text: str) -> str:
    """The text without paths of this machine: the checkout is `.`, the home folder `~`, a cell's temporary file has no folder."""
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/ipykernel_\d+/", "", text)
    text = text.replace(str(ROOT.resolve()), ".")
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")


def build(source: Path, out: Path, timeout: float = CELL_TIMEOUT) -> Path:
    """Build one notebook and return where it was written (in one rename, so an old one stays until the new one is whole)."""
    notebook = read(source)
    execute(notebook, out, source.name, timeout)
    tidy(notebook)
    nbformat.validate(notebook)
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > LIMIT:
        raise BuildError(f"{source.name} gives {len(text.encode()):,} bytes, more than {LIMIT:,}; make its pictures smaller or fewer")
    target = out / f"{source.stem}.ipynb"
    partial = target.with_suffix(".ipynb.partial")
    partial.write_text(text)
    os.replace(partial, target)
    return target


def main(argv: list[str] | None = None) -> int:
    """Build the sources that are named, or all of them; return 0 when all were built."""
    parser = argparse.ArgumentParser(description="Build executed notebooks from their py:percent sources.")
    parser.add_argument("sources", nargs="*", type=Path, help="py:percent files; default: all of notebooks/src")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to, and to run in")
    given = parser.parse_args(argv)
    failed = 0
    for source in given.sources or sorted((HERE / "src").glob("*.py")):
        try:
            target = build(source, given.out)
            print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB")
        except BuildError as error:
            print(error, file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
