"""The whole command on real ranks: it learns, it can be killed anywhere and goes on bit for bit, it leaves nobody behind, and it
says what is wrong in one line."""

import json
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from fsdp_ref.train_run import checkpoints, read_log

from .commands import (
    LIMIT,
    STEPS,
    TINY,
    TORCHRUN,
    environment,
    exact,
    finish,
    gone,
    rank_in,
    ranks_of,
    resume_and_compare,
    run_until_past_a_checkpoint,
    start,
    steps_done,
    train,
    until,
)

pytestmark = pytest.mark.slow


# -- a run ----------------------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_its_log_has_each_step_once(reference):
    rows = read_log(reference)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["loss"] > 5 and rows[-1]["loss"] < 4
    for row in rows:
        assert float.fromhex(row["loss_hex"]) == row["loss"]
        assert row["tokens_per_second"] > 0 and row["gradient_norm"] > 0 and 0 < row["lr"] <= 0.01
        assert ("held_out" in row) == (row["step"] % 20 == 0)
    assert rows[-1]["held_out"] < rows[19]["held_out"]
    output = (reference / "output.txt").read_text()
    assert "done: 60 steps" in output and "tokens/s" in output and "ZeRO-3 on 2 ranks (cpu, gloo)" in output


def test_a_run_keeps_its_options_and_its_last_checkpoints(reference, text):
    config = json.loads((reference / "config.json").read_text())
    assert config["options"]["dim"] == 16 and config["options"]["data"] == str(text) and config["world_size"] == 2
    assert config["text"]["bytes"] == text.stat().st_size
    assert [path.name for path in checkpoints(reference)] == ["step-00000050", "step-00000060"]


def test_the_recorded_step_has_every_rank_and_can_be_drawn(reference, tmp_path):
    from fsdp_ref.ledger import Lane, Ledger
    recorded = Ledger.load(reference / "ledger.json")
    step = recorded.window("step")
    assert recorded.ranks == [0, 1] and recorded.meta["strategy"] == "ZeRO-3"
    for rank in (0, 1):
        lanes = {event.lane for event in step.of_rank(rank).events}
        assert {Lane.COMPUTE, Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.OPTIMIZER} <= lanes
    done = subprocess.run([sys.executable, "-m", "fsdp_ref.cli", "show", reference, "--out", tmp_path], env=environment(), timeout=LIMIT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    for name in ("shards", "timeline", "memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") and f"]({name}.png)" in report


# -- killed and resumed -----------------------------------------------------------------------------------------------------------


def test_a_run_killed_with_all_its_ranks_goes_on_bit_for_bit_under_torchrun_too(text, reference, tmp_path):
    run = tmp_path / "run"
    process = run_until_past_a_checkpoint(text, run)
    for victim in (*ranks_of(process), psutil.Process(process.pid)):
        victim.kill()
    finish(process)
    resume_and_compare(run, reference, program=TORCHRUN)


def test_a_rank_that_is_killed_ends_the_run_with_one_line_and_it_goes_on_bit_for_bit(text, reference, tmp_path):
    run = tmp_path / "run"
    process = run_until_past_a_checkpoint(text, run)
    ranks = ranks_of(process)
    victim = next(p for p in ranks if rank_in(p) == "1")
    victim.kill()
    code, _, err = finish(process)
    assert code == 3, err
    assert err.count("\n") == 1 and "rank 1 died with signal 9 (SIGKILL)" in err and f"fsdp-ref train --out {run} --resume auto" in err
    assert gone(ranks)
    resume_and_compare(run, reference)


def test_no_rank_outlives_a_command_that_is_killed_also_when_signals_are_ignored(text, tmp_path):
    process = start(*TINY, "--data", text, "--steps", 100000, "--save-every", 0, "--out", tmp_path / "run",
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    until(lambda: steps_done(tmp_path / "run") >= 3, "step 3")
    ranks = ranks_of(process)
    assert len(ranks) >= 2
    process.kill()
    finish(process)
    until(lambda: gone(ranks), "the ranks' end")


def test_no_rank_outlives_a_command_that_is_killed_while_they_start(text, tmp_path):
    process = start(*TINY, "--data", text, "--out", tmp_path / "run")
    ranks = until(lambda: [p for p in ranks_of(process) if rank_in(p)], "the first rank")
    process.kill()
    finish(process)
    until(lambda: gone(ranks), "the ranks' end")
    assert steps_done(tmp_path / "run") == 0


def test_ctrl_c_ends_everything_with_one_line(text, tmp_path):
    run = tmp_path / "run"
    process = start(*TINY, "--data", text, "--steps", 100000, "--save-every", 0, "--out", run)
    until(lambda: steps_done(run) >= 3, "step 3")
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and gone(ranks)
    assert err.count("\n") == 1 and "stopped by SIGINT" in err and "no checkpoint yet" in err


# -- damaged, changed, moved ------------------------------------------------------------------------------------------------------


def damage(step_dir):
    """Flip one bit in the middle of a tensor file."""
    path = sorted(step_dir.glob("model-*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_goes_on(reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    damage(run / "checkpoints" / "step-00000060")
    code, out, err = train("--out", run, "--resume", "auto")
    assert (code, err) == (0, "")
    assert "warning: " in out and "step-00000060" in out and "resumed after step 50" in out
    assert exact(run) == exact(reference)
    assert [path.name for path in checkpoints(run)] == ["step-00000050", "step-00000060"]
    assert (run / "checkpoints" / "damaged-1-step-00000060").is_dir()


def test_when_every_checkpoint_is_damaged_it_is_one_line_and_exit_code_4(reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    for step_dir in checkpoints(run):
        damage(step_dir)
    before = read_log(run)
    code, out, err = train("--out", run, "--resume", "auto")
    assert code == 4
    assert err.count("\n") == 1 and "model-00000-of-00002.safetensors" in err and "Traceback" not in out + err
    assert read_log(run) == before


def test_more_steps_on_another_number_of_ranks_and_ddp(reference, tmp_path):
    code, out, err = train("--out", tmp_path / "run", "--resume", reference / "checkpoints" / "step-00000050", "--ranks", 1, "--steps", 55,
                           "--strategy", "ddp")
    assert (code, err) == (0, "")
    assert "DDP on 1 rank" in out and "resumed after step 50" in out and "2 ranks saved it" in out
    rows = read_log(tmp_path / "run")
    assert [row["step"] for row in rows] == [51, 52, 53, 54, 55]
    assert all(row["loss"] < 4.2 for row in rows)             # it knows what it had learned


def test_a_finished_run_has_nothing_to_do(reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    code, out, err = train("--out", run, "--resume", "auto", "--ranks", 1)
    assert (code, err) == (0, "") and "nothing to do" in out and "--steps" in out
    assert exact(run) == exact(reference)


# -- wrong input ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv, code, named", [
    (["--data", "/no/such/text"], 2, "/no/such/text"),
    (["--device", "cuda", "--ranks", "200", "--batch", "200"], 2, "needs a GPU for each of the 200 ranks"),
    (["--out", "{tmp}/none", "--resume", "auto"], 4, "no run at"),
])
def test_wrong_input_is_one_line_and_starts_no_rank(argv, code, named, tmp_path):
    ended, out, err = train(*(str(word).format(tmp=tmp_path) for word in argv), cwd=tmp_path)
    assert ended == code and out == ""
    assert err.count("\n") == 1 and named in err and err.startswith("fsdp-ref train: ")
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_each_rank_prints_one_line(tmp_path):
    code, _, err = train("--data", "/no/such/text", "--out", tmp_path / "run", program=TORCHRUN)
    assert code != 0
    told = [line for line in err.splitlines() if line.startswith("fsdp-ref train: ")]
    assert 1 <= len(told) <= 2 and all("/no/such/text" in line for line in told)
    assert len({line.split(":")[1] for line in told}) == len(told)        # no rank twice
    assert "fsdp_ref/train" not in err                        # torchrun shows its own traceback, a rank shows none
    assert not (tmp_path / "run").exists()
