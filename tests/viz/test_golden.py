"""Golden ledgers: what one step of each strategy writes, in order, without the clock; compared as data with golden/*.json.

The model is two blocks and a head on 2 ranks (4 where each two keep the weights together). Of each rank the main thread's rows are kept in
their order; transfers, which a thread of their own writes when they arrive, are sorted by their number. Activations are left out: what
autograd saves is torch's own affair and differs between its versions. Every `reshard_after_forward` of ZeRO-3 has a file. When the engine
is meant to change, run this file with FSDP_REF_WRITE_GOLDEN=1, look at the difference, and commit it.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_ref import Ledger, ledger
from fsdp_ref.engine import data_parallel, fully_shard
from fsdp_ref.ledger import Category, Lane
from fsdp_ref.placements import DDP, ZERO1, ZERO2, ZERO3

GOLDEN = Path(__file__).parent / "golden"
ROWS = {"ddp": DDP, "zero1": ZERO1, "zero2": ZERO2, "zero3": ZERO3}
RESHARD = {"zero3-default": None, "zero3-freed": True, "zero3-kept": False, "zero3-kept-by-two": 2}
CASES = [*ROWS, *RESHARD]
WORLD = {"zero3-kept-by-two": 4}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(2)), nn.Linear(8, 3))


def _record(rank, world, case):
    model = _model()
    if case in ROWS:
        model = data_parallel(model, ROWS[case], units=[model[0], model[1]])
    else:
        for module in (model[0], model[1], model):
            fully_shard(module, reshard_after_forward=RESHARD[case])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with ledger.record(activations=True) as rows:
        step()
    return rows.to_json()


def _life(row, zero, end):
    """Whether an allocation was there before the step, and whether it outlived it."""
    return [row.start <= zero, row.end is None or row.end >= end]


def plain(rows: Ledger) -> dict:
    """The parts of one rank's ledger that do not depend on the clock."""
    own = [e for e in rows.events if e.sequence < 0 and e.lane != Lane.WAIT]
    sent = sorted((e for e in rows.events if e.sequence >= 0), key=lambda e: e.sequence)
    first = min((e.sequence for e in sent), default=0)
    alive = sorted((str(a.category), a.unit, a.bytes, *_life(a, rows.start, rows.end)) for a in rows.allocations
                   if a.category != Category.ACTIVATION)
    return {"computed": [[str(e.lane), e.name, e.unit, e.phase] for e in own],
            "sent": [[e.sequence - first, e.name, e.unit, e.phase, e.bytes, e.wire_bytes] for e in sent],
            "waited for": sorted({e.name for e in rows.events if e.lane == Lane.WAIT}),
            "alive": [list(row) for row in alive],
            "shards": [[s.unit, s.name, list(s.shape), s.offset, s.rows, s.padded_rows] for s in rows.shards]}


def _one_row_a_line(ranks):
    """JSON in which a difference is a line."""
    parts = [",\n".join(f" {json.dumps(part)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "]" for part,
                        rows in rank.items())
             for rank in ranks]
    return "[\n" + ",\n".join(f"{{\n{part}}}" for part in parts) + "\n]\n"


@pytest.fixture(scope="module")
def recorded(ranks):
    return {case: [Ledger.from_json(data) for data in ranks(WORLD.get(case, 2), _record, case)[:2]] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_one_step_writes_what_it_always_wrote(recorded, case):
    found = json.loads(json.dumps([plain(rows) for rows in recorded[case]]))
    path = GOLDEN / f"{case}.json"
    if os.environ.get("FSDP_REF_WRITE_GOLDEN"):
        path.write_text(_one_row_a_line(found))
    golden = json.loads(path.read_text())
    for rank in range(2):
        for part in golden[rank]:
            assert found[rank][part] == golden[rank][part], f"{part} of rank {rank}"


def test_the_golden_files_say_what_the_papers_say():
    """Bytes on the wire, in P(n-1)/n: DDP, ZeRO-1 and ZeRO-2 send 2, ZeRO-3 3, with kept weights 2; a head that rests whole saves its part.

    Kept by two of four, backward gathers P/2 for the two blocks instead of 3P/4: 2 + 2/3. Padding of 3 rows on 2 or 4 ranks adds a little.
    """
    times = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3, "zero3-default": 3, "zero3-freed": 3, "zero3-kept": 2,
             "zero3-kept-by-two": 2 + 2 / 3}
    parameters = sum(p.numel() for p in _model().parameters()) * 4
    for case in CASES:
        rank0, size = json.loads((GOLDEN / f"{case}.json").read_text())[0], WORLD.get(case, 2)
        sent = sum(row[-1] for row in rank0["sent"]) / (parameters * (size - 1) / size)
        assert sent == pytest.approx(times[case], abs=0.15), case


def test_the_categories_add_up_to_what_is_there(recorded):
    """At rest the books are the bytes of the model's own tensors, exactly: shards, and AdamW's two moments and a step count each."""
    for case in ("ddp", "zero3"):
        for rows in recorded[case]:
            rest = [a for a in rows.allocations if a.start <= rows.start]
            held = {c: sum(a.bytes for a in rest if a.category == c) for c in Category}
            elements = sum(p.numel() for p in _model().parameters())
            padded = elements if case == "ddp" else sum(s.padded_rows * _width(s) for s in rows.shards)
            own = elements if case == "ddp" else sum(s.rows * _width(s) for s in rows.shards)
            assert held[Category.SHARDED_PARAM] + held[Category.UNSHARDED_PARAM] == 4 * padded
            assert held[Category.OPTIMIZER] == 2 * 4 * own + 4 * len(rows.shards)


def _width(shard):
    width = 1
    for size in shard.shape[1:]:
        width *= size
    return width
