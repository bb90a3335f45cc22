"""A run that is watched: what the ranks tell, what a notebook makes of it, and what it costs."""

import json
import time

import pytest
import torch
from torch import nn

from fsdp_ref import ledger, live
from fsdp_ref.engine import data_parallel
from fsdp_ref.errors import FsdpRefError
from fsdp_ref.lab.watch import Watch
from fsdp_ref.ledger import Category, Lane
from fsdp_ref.placements import ZERO3


def _train(rank, world, folder, steps):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))
    model = data_parallel(model, ZERO3, units=list(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reporter = live.Reporter(folder, budget=0.9)
    for _ in range(steps):
        with reporter.step() as note:
            loss = model(torch.ones(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            note.loss = loss.item()
    reporter.tell()
    held = {str(c): ledger.live_bytes(c) for c in Category if ledger.live_bytes(c)}
    return held, reporter._recorded[0]


def test_ranks_tell_and_the_notebook_shows(ranks, tmp_path):
    found = ranks(2, _train, str(tmp_path), 12)
    told = live.read(tmp_path)
    assert [status.rank for status in told] == [0, 1] and all(status.step == 12 for status in told)
    assert [status.held for status in told] == [held for held, _ in found]
    assert sorted(told[0].losses) == list(range(12)) and told[0].losses[11] < told[0].losses[0]
    view = Watch(tmp_path)
    assert view.refresh() and not view.refresh()
    assert "Step 11, loss" in view.status.value and "<table>" in view.numbers.value
    rows = live.last_step(told)
    assert {e.lane for e in rows.events} >= {Lane.COMPUTE, Lane.ALL_GATHER, Lane.OPTIMIZER}
    assert "One step on" in view.pictures["step"].title and 'alt="' in view.step.value
    total = [row[key] for row in view.pictures["now"].table for key in row if key.startswith("all KiB")]
    assert [t * 1024 for t in total] == pytest.approx([sum(held.values()) for held, _ in found])


def test_the_budget_bounds_what_telling_costs(tmp_path, monkeypatch):
    """A clock that only moves when something is done: a step takes 10 ms, telling 3 ms; at 2 % one telling in 15 steps or fewer."""
    clock = [0.0]
    monkeypatch.setattr(live.time, "perf_counter", lambda: clock[0])
    told = []

    def tell(self):
        clock[0] += 0.003
        told.append(self._count)

    monkeypatch.setattr(live.Reporter, "tell", tell)
    reporter = live.Reporter(tmp_path, budget=0.02, first=10**9)
    for _ in range(600):
        with reporter.step() as note:
            clock[0] += 0.010
            note.loss = 1.0
    assert 0.003 * len(told) <= 0.02 * clock[0] + 0.003 and len(told) > 20
    with pytest.raises(FsdpRefError, match="budget"):
        live.Reporter(tmp_path, budget=2)


def test_half_a_folder_and_a_damaged_file(tmp_path):
    view = Watch(tmp_path)
    assert not view.refresh() and "no rank has reported" in view.status.value and live.read(tmp_path) == []
    reporter = live.Reporter(tmp_path)
    with reporter.step():
        pass
    assert live.last_step(live.read(tmp_path)) is None
    (path,) = tmp_path.glob("rank-*.json")
    for text in ("{", json.dumps({"format": "x"}), "[]"):
        path.write_text(text)
        view._seen = ()
        assert not view.refresh() and 'role="alert"' in view.status.value
        with pytest.raises(FsdpRefError, match="no live report"):
            live.read(tmp_path)


def test_the_thread_draws_by_itself_and_ends(tmp_path):
    view = Watch(tmp_path, every=0.02).start()
    reporter = live.Reporter(tmp_path)
    with reporter.step() as note:
        note.loss = 2.5
    limit = time.monotonic() + 60
    while "loss 2.5" not in view.status.value and time.monotonic() < limit:
        time.sleep(0.02)
    view.stop()
    assert "loss 2.5" in view.status.value and not view._thread.is_alive()
