"""The pool in a real notebook: `%%px` in a kernel, run by nbclient as nbval and graders do."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CELLS = [
    "from fsdp_ref.lab import start\nlab = start(ranks=2)",
    "%%px\nimport torch\nx = torch.arange(2.0) + rank\ndist.all_reduce(x)\nprint(rank, x.tolist())\nx.sum()",
    "def shifted(value):\n    return value + rank\n\ndef work(value):\n    return shifted(value) * world_size\n\nlab.run(work, 3)",
    "%px print('line', rank)",
    "%%px --targets 1\nprint('only', rank)",
    "%%px\nif rank == 1: raise ValueError('on purpose')",
    "%%px --limit 2\nif rank == 0:\n    while True: pass",
    "%%px\nprint(world_size)",
    "%%px\nfrom IPython.display import display, HTML\nif rank == 1: display(HTML('<b>x</b>'))",
]


@pytest.fixture(scope="module")
def outputs():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        NotebookClient(notebook, timeout=180, kernel_name="python3", allow_errors=True).execute()
    finally:
        os.environ.pop("PYTHONPATH") if old is None else os.environ.update(PYTHONPATH=old)
    return [cell.outputs for cell in notebook.cells]


def printed(outputs) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_ready_line_is_all_that_start_prints(outputs):
    text = printed(outputs[0])
    assert text.count("\n") == 1 and text.startswith("2 ranks are ready: backend ")
    assert len(outputs[0]) == 1


def test_px_groups_by_rank(outputs):
    assert printed(outputs[1]) == ("[rank 0] 0 [1.0, 3.0]\n[rank 0] tensor(4.)\n[rank 1] 1 [1.0, 3.0]\n[rank 1] tensor(4.)\n")
    assert printed(outputs[3]) == "[rank 0] line 0\n[rank 1] line 1\n"
    assert printed(outputs[4]) == "[rank 1] only 1\n"


def test_b37_functions_of_cells(outputs):
    assert outputs[2][0].data["text/plain"] == "[6, 8]"


def test_an_error_is_one_report(outputs):
    error = next(output for output in outputs[5] if output.output_type == "error")
    assert error.ename == "RanksFailed" and error.evalue.startswith("rank 1 raised ValueError: on purpose")
    text = "\n".join(error.traceback)
    assert "on purpose" in text and "ranks.py" not in text, "no frame of the kernel's own side"


def test_a_hang_ends_at_the_cells_limit_and_the_pool_goes_on(outputs):
    error = next(output for output in outputs[6] if output.output_type == "error")
    assert "rank 0 did not finish within 2 s (rank 0 is at line 2 of the cell, in the loop `while True` (line 2))" in error.evalue
    assert "restarted" in error.evalue
    assert printed(outputs[7]) == "[rank 0] 2\n[rank 1] 2\n"


def test_rich_output_stands_under_its_rank(outputs):
    assert printed(outputs[8]) == "[rank 1]\n"
    assert [output.data["text/html"] for output in outputs[8] if output.output_type == "display_data"] == ["<b>x</b>"]
