"""What a rank does, on real ranks: errors are agreed on, losses are those of the whole batch, failures are told in one line."""

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fsdp_ref import data, launch, train, train_loop, train_step, world
from fsdp_ref.data import Corpus
from fsdp_ref.errors import CheckpointError, ConfigError, DataError, FsdpRefError
from fsdp_ref.models import GPT, GPTConfig
from fsdp_ref.train_options import Options, learning_rate

pytestmark = pytest.mark.slow

SMALL = Options(ranks=1, steps=6, batch=12, dim=16, layers=2, heads=2, context=8, lr=0.01, warmup=2, eval_windows=7, progress="never")
TEXT = Corpus(np.frombuffer(b"".join(b"%d bottles of beer on the wall, " % i for i in range(200)), dtype=np.uint8), "bottles", 1)


# -- agreeing -------------------------------------------------------------------------------------------------------------------


def fails_on(rank, size, who):
    def work():
        if rank in who:
            raise DataError(f"rank {rank} has no text")
        return rank
    try:
        return train_loop.together(work)
    except FsdpRefError as error:
        return type(error).__name__, str(error)


def test_an_error_of_one_rank_is_the_same_error_on_every_rank(ranks):
    assert ranks(3, fails_on, ()) == [0, 1, 2]
    assert ranks(3, fails_on, (1,)) == [("DataError", "rank 1 has no text")] * 3
    assert ranks(3, fails_on, (2, 1)) == [("DataError", "rank 1 has no text")] * 3


# -- the numbers ------------------------------------------------------------------------------------------------------------------


def losses(rank, size, strategy):
    from dataclasses import replace
    options = replace(SMALL, ranks=size, strategy=strategy, replicas=2 if size % 2 == 0 else 1)
    trainer = train_loop.Trainer(options, world.current(), TEXT, Path("unused"))
    before = trainer.held_out_loss()
    rows = [trainer.train_step() for _ in range(SMALL.steps)]
    found = [before, *(row["loss"] for row in rows), trainer.held_out_loss()]
    return found, [row["gradient_norm"] for row in rows], [row["lr"] for row in rows]


def by_hand():
    """The same training in plain torch: one process, the whole batch, AdamW and clipping written out by torch's own functions."""
    torch.manual_seed(SMALL.seed)
    model = GPT(GPTConfig(context=8, dim=16, layers=2, heads=2))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95))
    text, held_out = bytes(TEXT.train), bytes(TEXT.held_out)

    def loss_of(source, windows):
        rows = torch.tensor([list(source[8 * w:8 * w + 9]) for w in windows])
        return model.loss(rows[:, :-1], rows[:, 1:])

    total = (len(held_out) - 1) // 8
    looked_at = [i * total // 7 for i in range(7)]
    order = data.order(SMALL.seed, 0, (len(text) - 1) // 8)
    found, norms = [loss_of(held_out, looked_at).item()], []
    for step in range(SMALL.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, SMALL)
        optimizer.zero_grad()
        loss = loss_of(text, order[12 * step:12 * step + 12])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        found.append(loss.item())
    return [*found, loss_of(held_out, looked_at).item()], norms


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp", "hsdp"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_reported_numbers_are_those_of_plain_training_on_the_whole_batch(ranks, strategy, size):
    found = ranks(size, losses, strategy)
    assert all(other == found[0] for other in found)          # every rank reports the same, bit for bit
    expected, norms = by_hand()
    assert found[0][0] == pytest.approx(expected, rel=1e-4)
    assert found[0][1] == pytest.approx(norms, rel=1e-3)
    assert found[0][2] == [learning_rate(step, SMALL) for step in range(1, 7)]


def step_with_a_broken_weight(rank, size):
    trainer = train_loop.Trainer(SMALL, world.current(), TEXT, Path("unused"))
    if rank == 1:
        with torch.no_grad():
            trainer.model.norm.bias.to_local().fill_(math.nan)
    try:
        trainer.train_step()
    except ConfigError as error:
        return str(error)


def test_a_loss_that_is_no_number_stops_every_rank(ranks):
    told = ranks(2, step_with_a_broken_weight)
    assert told[0] == told[1] and "loss became nan at step 1" in told[0] and "--lr" in told[0]


def draws(rank, size):
    from dataclasses import replace
    trainer = train_loop.Trainer(replace(SMALL, ranks=size, dropout=0.5), world.current(), TEXT, Path("unused"))
    weights = [p.full_tensor().sum().item() for p in trainer.model.parameters()]
    return weights, torch.rand(3).tolist()


def test_ranks_start_with_the_same_weights_and_draw_different_dropout(ranks):
    (weights, zero), (others, one) = ranks(2, draws)
    assert weights == others and zero != one
    assert ranks(2, draws)[1][1] == one                       # and the same again in the next run


def test_matrices_decay_and_vectors_do_not():
    decayed, kept = train_step.weight_decay_groups(GPT(GPTConfig(context=8, dim=16, layers=1, heads=2)))
    assert decayed["weight_decay"] > 0 and kept["weight_decay"] == 0
    assert {name for name, _ in decayed["params"]} == {"tokens.weight", "positions.weight", *(
        f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"))}
    assert all(name.endswith("bias") or "norm" in name for name, _ in kept["params"])


# -- telling a failure ------------------------------------------------------------------------------------------------------------


def failure(exitcode, message="", timestamp=5):
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, message=message and {"message": message},
                           signal_name=lambda: signal.Signals(-exitcode).name)


@pytest.mark.parametrize("failures, line, code", [
    ({0: failure(3, "rank 1 died", 1), 1: failure(-9)}, "rank 1 died with signal 9 (SIGKILL): killed from outside, or by the", 3),
    ({0: failure(3, "rank 1 died", 1), 1: failure(75, "a signal asked; step 3 is saved")}, "a signal asked; step 3 is saved", 75),
    ({1: failure(-15), 0: failure(3, "late", 9)}, "rank 1 was stopped by SIGTERM before it could listen; ", 75),
    ({0: failure(-11)}, "rank 0 died with signal 11 (SIGSEGV); ", 3),
    ({0: failure(3, "rank 2 never arrived at x; every rank must"), 1: failure(3, "late", 9)}, "rank 2 never arrived at x; ", 3),
    ({2: failure(4, "step-7 is damaged; x"), 1: failure(4, "y", 9)}, "rank 2 stopped with exit code 4: step-7 is damaged; x", 4),
    ({3: failure(1)}, "rank 3 stopped with exit code 1: it left no message; look at its output above", 1)])
def test_the_first_cause_is_told_in_one_line(tmp_path, failures, line, code):
    told, exit_code = launch.describe(SimpleNamespace(failures=failures), tmp_path)
    assert told.startswith(line) and "\n" not in told and exit_code == code


def in_a_rank(monkeypatch, tmp_path, error, *, launched=True):
    """Run the rank's main with a training that raises `error`; the exit code, and what went into elastic's error file."""
    def fail(options, stop):
        raise error

    def leave(code):
        raise InterruptedError(code)

    monkeypatch.setattr(train_loop, "train", fail)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(train, "_watch_parent", lambda: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}.items():
        monkeypatch.setenv(name, value)
    if launched:
        monkeypatch.setenv(train.PARENT, "1")
    with pytest.raises(InterruptedError) as left:
        train.main(["--out", str(tmp_path)])
    return left.value.args[0], json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_a_launched_rank_hands_its_message_to_the_command_and_prints_nothing(monkeypatch, tmp_path, capsys):
    assert in_a_rank(monkeypatch, tmp_path, CheckpointError("step 7 is damaged; x")) == (4, "step 7 is damaged; x")
    assert capsys.readouterr() == ("", "")


def test_a_rank_under_torchrun_prints_its_line(monkeypatch, tmp_path, capsys):
    assert in_a_rank(monkeypatch, tmp_path, DataError("no text; x"), launched=False)[0] == 2
    assert capsys.readouterr().err == "fsdp-ref train: rank 1: no text; x\n"


def test_an_unforeseen_error_is_one_line_and_its_traceback_is_kept(monkeypatch, tmp_path, capsys):
    code, message = in_a_rank(monkeypatch, tmp_path, ZeroDivisionError("first\nsecond"))
    kept = tmp_path / "rank-1-error.txt"
    assert code == 1 and message == f"ZeroDivisionError: first; the traceback is in {kept}"
    assert "Traceback" in kept.read_text() and capsys.readouterr() == ("", "")
