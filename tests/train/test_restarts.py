"""Machines that go away: torchrun starts the ranks again and the run goes on by itself; a signal to the command or to one rank saves and
ends it with exit code 75, and fewer or more ranks take it up."""

import contextlib
import signal

import psutil
import pytest
import torch

from fsdp_ref import preemption, world
from fsdp_ref.errors import Preempted
from fsdp_ref.train_run import checkpoints, read_log

from .commands import (
    STEPS,
    TINY,
    TORCHRUN,
    exact,
    finish,
    gone,
    rank_in,
    ranks_of,
    run_until_past_a_checkpoint,
    start,
    steps_done,
    train,
    until,
)

pytestmark = pytest.mark.slow


def rank_process(process, rank):
    """The process of a rank; it may be gone by the time it is used."""
    return until(lambda: next((p for p in ranks_of(process) if rank_in(p) == str(rank)), None), f"rank {rank}")


def kill(process, rank):
    with contextlib.suppress(psutil.NoSuchProcess):
        rank_process(process, rank).kill()


def test_ranks_are_started_again_and_the_run_ends_as_if_none_had_been_killed(text, reference, tmp_path):
    """One death before the first checkpoint (start over) and one after the second (go on from there). torchrun is what starts the ranks
    of `fsdp-ref train` too."""
    run = tmp_path / "run"
    process = start(*TINY, "--data", text, "--out", run, "--max-restarts", 2)
    until(lambda: steps_done(run) >= 2, "step 2")
    ranks = ranks_of(process)
    kill(process, 1)
    until(lambda: gone(ranks), "the end of the first start")
    until(lambda: len(checkpoints(run)) == 2 or process.poll() is not None, "the second checkpoint")
    kill(process, 0)
    code, out, err = finish(process)
    assert code == 0, err
    assert "started again (number 2)" in out and "resumed after step" in out
    assert exact(run) == exact(reference)


def test_a_signal_to_one_rank_ends_the_command_with_75_and_other_numbers_of_ranks_take_it_up(text, reference, tmp_path):
    run = tmp_path / "run"
    process = run_until_past_a_checkpoint(text, run)
    ranks = ranks_of(process)
    rank_process(process, 1).send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    step = read_log(run)[-1]["step"]
    assert (code, err) == (75, f"fsdp-ref train: a signal asked the run to stop; step {step} is saved, go on with fsdp-ref train "
                           f"--out {run} --resume auto\n")
    assert gone(ranks) and int(checkpoints(run)[-1].name[5:]) == step < STEPS
    code, out, err = train("--out", run, "--resume", "auto", "--ranks", 4, "--steps", step + 2)
    assert (code, err) == (0, "") and f"resumed after step {step}" in out
    code, out, err = train("--out", run, "--resume", "auto", "--ranks", 1, "--steps", step + 4)
    assert (code, err) == (0, "") and f"resumed after step {step + 2}" in out
    rows = read_log(run)
    assert [row["step"] for row in rows] == list(range(1, step + 5))
    assert exact(run)[:step - 1] == exact(reference)[:step - 1]


@pytest.mark.parametrize("program", [TORCHRUN, None], ids=["torchrun", "fsdp-ref"])
def test_a_signal_to_the_command_is_sent_on_and_the_run_goes_on_bit_for_bit(text, reference, tmp_path, program):
    run, how = tmp_path / "run", {"program": program} if program else {}
    process = run_until_past_a_checkpoint(text, run, **how)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)                      # impatient
    code, out, err = finish(process)
    step = read_log(run)[-1]["step"]
    assert gone(ranks) and int(checkpoints(run)[-1].name[5:]) == step < STEPS
    if not program:
        assert code == 75 and err.count("\n") == 1 and "stopped by SIGTERM" in err and checkpoints(run)[-1].name in err
    code, out, err = train("--out", run, "--resume", "auto")
    assert (code, err) == (0, "") and exact(run) == exact(reference)


def test_a_signal_while_the_ranks_start_is_heard_as_soon_as_they_can_listen(text, tmp_path):
    run = tmp_path / "run"
    process = start(*TINY, "--data", text, "--out", run)
    rank_process(process, 0).send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75 and err.count("\n") == 1 and "stop" in err and steps_done(run) == 0


def waiting_alone(rank, size):
    """Rank 0 never comes; the other one hears a signal while it waits."""
    if rank == 0:
        return None
    with pytest.MonkeyPatch.context() as monkeypatch, preemption.watch() as stop:
        world.stop()
        monkeypatch.setenv("RANK", "1")
        server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
                            "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, value)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted, match="before its ranks had met"):
            world.start(give_up=lambda: stop.requested)


def test_a_signal_ends_the_wait_for_ranks_that_have_not_come(ranks):
    ranks(2, waiting_alone)


def meet_again(rank, size):
    """What a world started anew under the same torchrun finds in its store; here the second start in one process."""
    return world.current().restarts, world.current().remember("name", f"of rank {rank}")


def test_a_world_in_a_file_has_no_restarts(ranks):
    assert {restarts for restarts, _ in ranks(2, meet_again)} == {0}
    assert len({name for _, name in ranks(2, meet_again)}) == 1
