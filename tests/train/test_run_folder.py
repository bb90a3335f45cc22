"""A run's folder: where a run begins, what is never overwritten, and a log with each step once."""

import json
import subprocess
import sys

import pytest

from fsdp_ref import train_run
from fsdp_ref.errors import CheckpointError, ConfigError
from fsdp_ref.train_run import RESUMES, Run, begin, read_log


def a_run(path, *steps, config=True):
    """A folder like that of a run with checkpoints of `steps`."""
    path.mkdir()
    if config:
        (path / "config.json").write_text(json.dumps({"format": train_run.FORMAT, "options": {"dim": 64}}))
    for step in steps:
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return path


def test_a_free_folder_begins_at_the_beginning(tmp_path):
    for resume in (None, "none"):
        start = begin(str(tmp_path / "new"), resume)
        assert (start.source, start.saved) == (None, None)
    assert begin(None, None).source is None


def test_auto_goes_on_with_the_runs_options(tmp_path):
    run = a_run(tmp_path / "run", 40, 100)
    start = begin(str(run), "auto")
    assert start.source == run / "checkpoints" and start.saved == {"dim": 64}


def test_checkpoints_are_in_numeric_order_and_nothing_else_counts(tmp_path):
    run = a_run(tmp_path / "run", 9, 100, 10, 123456789)
    for name in ("step-00000200.tmp-abc", "step-5", "latest", "damaged-1-step-00000300"):
        (run / "checkpoints" / name).mkdir()
    assert [int(path.name[5:]) for path in train_run.checkpoints(run)] == [9, 10, 100, 123456789]


@pytest.mark.parametrize("resume", [None, "none"])
def test_a_run_with_checkpoints_is_never_started_over(tmp_path, resume):
    run = a_run(tmp_path / "run", 40)
    with pytest.raises(ConfigError, match="already holds a run.*--resume auto.*another --out"):
        begin(str(run), resume)


def test_a_run_without_checkpoints_is_started_over_only_when_told_to(tmp_path):
    run = a_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="--resume none"):
        begin(str(run), None)
    assert begin(str(run), "none").source is None
    with pytest.raises(CheckpointError, match="no checkpoint to resume from.*--resume none"):
        begin(str(run), "auto")


def test_resuming_what_is_not_there_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="no run at .*nowhere"):
        begin(str(tmp_path / "nowhere"), "auto")
    with pytest.raises(CheckpointError, match="no checkpoint or run at .*step-00000007"):
        begin(str(tmp_path / "new"), str(tmp_path / "step-00000007"))
    with pytest.raises(ConfigError, match="--out"):
        begin(None, "auto")


def test_branching_off_needs_a_folder_of_its_own(tmp_path):
    run = a_run(tmp_path / "run", 40, 80)
    old, new = (str(run / "checkpoints" / f"step-000000{step}") for step in (40, 80))
    branch = begin(str(tmp_path / "branch"), old)
    assert str(branch.source) == old and branch.saved == {"dim": 64}
    assert begin(None, old).saved == {"dim": 64}
    with pytest.raises(ConfigError, match="later checkpoints than step-00000040.*another --out"):
        begin(str(run), old)
    assert str(begin(str(run), new).source) == new
    assert begin(str(run), str(run)).source == run / "checkpoints"
    other = a_run(tmp_path / "other", 10)
    with pytest.raises(ConfigError, match="other already holds a run"):
        begin(str(other), old)


@pytest.mark.parametrize("text", [
    "{", "[]", '{"format": "something else", "options": {}}', '{"options": {}}', '{"format": "fsdp_ref run 1"}',
    '{"format": "fsdp_ref run 1", "options": 3}'])
def test_a_damaged_config_is_named(tmp_path, text):
    run = a_run(tmp_path / "run", 40)
    (run / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        begin(str(run), "auto")


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        begin(str(tmp_path / "file"), None)
    with pytest.raises(ConfigError, match="cannot write to"):
        Run(tmp_path / "file" / "below")


def test_the_log_goes_on_after_the_resumed_step_and_drops_a_torn_line(tmp_path):
    run = Run(tmp_path)
    run.open_log(0)
    for step in range(1, 8):
        run.log({"step": step, "loss": 1 / step})
    run.close()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 8, "lo')                         # killed while it wrote
    assert [row["step"] for row in read_log(tmp_path)] == list(range(1, 8))
    run = Run(tmp_path)
    run.open_log(5)
    run.log({"step": 6, "loss": 9.0})
    run.close()
    assert [(row["step"], row["loss"]) for row in read_log(tmp_path)] == [*((s, 1 / s) for s in range(1, 6)), (6, 9.0)]
    (resume,) = read_log(tmp_path, RESUMES)                   # what is done again is kept, to be compared
    assert resume["step"] == 5 and [(row["step"], row["loss"]) for row in resume["again"]] == [(6, 1 / 6), (7, 1 / 7)]
    run = Run(tmp_path)
    run.open_log(0)                                           # started over
    run.close()
    assert read_log(tmp_path) == read_log(tmp_path, RESUMES) == []


def test_a_line_is_in_the_file_when_log_returns(tmp_path):
    code = ("import os\nfrom pathlib import Path\nfrom fsdp_ref.train_run import Run\n"
            f"run = Run(Path({str(tmp_path)!r}))\nrun.open_log(0)\nrun.log({{'step': 1}})\nos._exit(9)")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 9
    assert read_log(tmp_path) == [{"step": 1}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2 of .*log.jsonl"):
        read_log(tmp_path)


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    first = Run(tmp_path)
    with pytest.raises(ConfigError, match="another run is writing"):
        Run(tmp_path)
    first.close()
    Run(tmp_path).close()


def test_checkpoints_too_damaged_to_load_are_set_aside_not_deleted(tmp_path):
    run = a_run(tmp_path / "run", 10, 20, 30)
    (run / "checkpoints" / "step-00000030" / "kept").write_text("x")
    moved = train_run.set_aside_after(run / "checkpoints", 10)
    assert [path.name for path in moved] == ["damaged-1-step-00000020", "damaged-1-step-00000030"]
    assert (moved[1] / "kept").read_text() == "x"
    assert [path.name for path in train_run.checkpoints(run)] == ["step-00000010"]
    (run / "checkpoints" / "step-00000030").mkdir()
    assert train_run.set_aside_after(run / "checkpoints", 10)[0].name == "damaged-2-step-00000030"
