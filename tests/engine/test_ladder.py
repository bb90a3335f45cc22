"""The ZeRO ladder: the same bits on every row, bytes at rest and on the wire as the formulas say, and rows that make no sense refused."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_ref import ledger
from fsdp_ref.engine import CPUOffloadPolicy, MixedPrecisionPolicy, data_parallel
from fsdp_ref.errors import ConfigError
from fsdp_ref.ledger import Category, Lane
from fsdp_ref.placements import DDP, HSDP, LADDER, ZERO1, ZERO2, ZERO3, Placement, Placements
from tests.engine.toys import batch, loss_of, toy, train, train_with

ROWS = (DDP, ZERO1, ZERO2, ZERO3)
EVEN = dict(vocab=64, dim=32, hidden=64, layers=3)          # every dim divides by 2 and 4: no padding, so formulas are exact


def by_name(row):
    return row.name


def mesh_for(row, world):
    shape, names = ((2, world // 2), ("replicate", "shard")) if row.replicas else ((world,), None)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(param):
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def _fused(rank, world, row):
    """Optimizers whose steps write behind the version counters' back."""
    model = data_parallel(toy(), row, mesh_for(row, world))
    losses = []
    for kind, options in ((torch.optim.AdamW, dict(fused=True)), (torch.optim.AdamW, dict(foreach=True)), (torch.optim.Adam, dict(lr=0.01)),
                          (torch.optim.SGD, dict(lr=0.1, momentum=0.9, foreach=True)), (torch.optim.Adagrad, {})):
        losses += train_with(kind(model.parameters(), **options), model, rank)
    return losses


def test_whole_weights_follow_every_optimizer(ranks):
    reference = ranks(2, _fused, DDP)
    for row in (ZERO1, ZERO2, ZERO3):
        assert ranks(2, _fused, row) == reference, row.name


def _beside_a_model_that_is_gone(rank, world, row):
    """Rank 0 still holds a model whose shards have changed (a state was loaded, say); the other rank has dropped it."""
    gone = data_parallel(toy(), row, mesh_for(row, world))
    with torch.no_grad():
        for param in gone.parameters():
            param.to_local().add_(1.0)
    if rank:
        del gone, param
        gc.collect()
    model = data_parallel(toy(), row, mesh_for(row, world))
    return train_with(torch.optim.AdamW(model.parameters()), model, rank)


@pytest.mark.parametrize("row", [ZERO1, ZERO2], ids=by_name)
def test_an_optimizer_brings_up_to_date_its_own_models_weights_alone(ranks, row):
    assert all(torch.isfinite(torch.tensor(losses)).all() for losses in ranks(2, _beside_a_model_that_is_gone, row))


def _trained(rank, world, row):
    model = data_parallel(toy(seed=rank), row, mesh_for(row, world))
    losses = train(model, rank, steps=4)
    return losses, {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_row_trains_to_the_same_bits(ranks, world):
    """Sums are taken in rank order on every row, wherever a number stands: losses and parameters are equal, bit for bit."""
    reference = ranks(world, _trained, DDP)
    for row in (ZERO1, ZERO2, ZERO3):
        for (losses, params), (expected, wanted) in zip(ranks(world, _trained, row), reference, strict=True):
            assert losses == expected, row.name
            assert all(torch.equal(params[name], wanted[name]) for name in wanted), row.name


def test_hsdp_trains_to_the_same_within_roundings(ranks):
    """Hybrid sharding sums in pairs, (a + b) + (c + d): other roundings. fp32 Adam moves a weight by at most lr a step, and
    gradients differ by at most 4 eps of their size, so four steps of lr 0.01 stay far below 1e-4."""
    for (losses, params), (expected, wanted) in zip(ranks(4, _trained, HSDP), ranks(4, _trained, DDP), strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name in wanted:
            torch.testing.assert_close(params[name], wanted[name], rtol=0, atol=1e-4)


def _bytes(rank, world, row, mp=None):
    model = data_parallel(toy(**EVEN), row, mesh_for(row, world), mp_policy=mp or MixedPrecisionPolicy())
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number):
        loss_of(model, batch(number, rank, vocab=64)).backward()
        optimizer.step()

    step(0)
    optimizer.zero_grad()
    with ledger.record() as book:
        step(1)
        at_rest = {category: ledger.live_bytes(category) for category in Category}
    optimizer.zero_grad()
    wire = sum(event.wire_bytes for event in book.events)
    lanes = [(event.lane, event.phase) for event in book.events if event.lane not in (Lane.COMPUTE, Lane.WAIT)]
    total = sum(param.numel() for param in model.parameters())
    return at_rest, wire, total, lanes, len(list(model.parameters())), sum(ledger.live_bytes(c) for c in Category)


FORMULAS = {        # bytes at rest of one parameter on each of n ranks (fp32, Adam); elements a step on the wire, times (n-1)/n
    DDP: (lambda n: 16, 2), ZERO1: (lambda n: 8 + 8 / n, 2), ZERO2: (lambda n: 4 + 12 / n, 2), ZERO3: (lambda n: 16 / n, 3)}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_bytes_are_those_of_the_formulas(ranks, row, world):
    per_parameter, sent = FORMULAS[row]
    for rank, (at_rest, wire, total, _, tensors, _) in enumerate(ranks(world, _bytes, row)):
        scalar = (world - 1) * 4 * 4                        # the gain of one element is padded to one a rank: 4 kinds of state
        steps = 4 * tensors                                 # Adam's step counters
        assert abs(sum(at_rest.values()) - steps - per_parameter(world) * total) <= scalar + 64, (rank, at_rest)
        assert wire == pytest.approx(sent * total * 4 * (world - 1) / world, abs=3 * 4 * world + 64)


def _kept_for_backward(rank, world):
    model = data_parallel(toy(**EVEN), ZERO3, reshard_after_forward=None)
    wires = []
    for number in range(2):
        with ledger.record() as book:
            loss_of(model, batch(number, rank, vocab=64)).backward()
        wires.append([event.unit for event in book.events if event.lane == Lane.ALL_GATHER and event.phase == "backward"])
    return wires


def test_the_root_and_the_last_unit_may_be_kept_for_backward(ranks):
    """The first forward shows which unit is the last."""
    first, second = ranks(2, _kept_for_backward)[0]
    assert first == ["blocks.2", "blocks.1", "blocks.0"] and second == ["blocks.1", "blocks.0"]


def test_bytes_of_hsdp(ranks):
    """16P/S at rest with S shards; gathers inside a group of S, and the rows of a shard across the R groups."""
    at_rest, wire, total, _, tensors, _ = ranks(4, _bytes, HSDP)[0]
    assert abs(sum(at_rest.values()) - 4 * tensors - 16 / 2 * total) <= 64
    inside, across = 3 * total * 4 / 2, 2 * total / 2 * 4 / 2
    assert wire == pytest.approx(inside + across, abs=128)


def test_where_each_row_keeps_what(ranks):
    total = ranks(2, _bytes, DDP)[0][2]
    held = {row.name: ranks(2, _bytes, row)[0][0] for row in ROWS}
    kib = lambda row, category: round(held[row.name][category] / total, 1)  # noqa: E731        bytes a parameter
    assert [kib(row, Category.UNSHARDED_PARAM) for row in ROWS] == [4, 4, 4, 0]
    assert [kib(row, Category.SHARDED_PARAM) for row in ROWS] == [0, 0, 0, 2]
    assert [kib(row, Category.UNSHARDED_GRAD) for row in ROWS] == [4, 4, 0, 0]
    assert [kib(row, Category.SHARDED_GRAD) for row in ROWS] == [0, 0, 2, 2]
    assert [kib(row, Category.OPTIMIZER) for row in ROWS] == [8, 4, 4, 4]


@pytest.mark.parametrize("row", [ZERO1, ZERO2], ids=by_name)
def test_whole_weights_are_gathered_after_the_step_and_never_in_it(ranks, row):
    lanes = ranks(2, _bytes, row)[0][3]
    step = lanes.index((Lane.OPTIMIZER, "optimizer"))
    assert {phase for lane, phase in lanes[:step] if lane == Lane.ALL_GATHER} == set()
    assert [lane for lane, _ in lanes[step + 1:]] == [Lane.ALL_GATHER] * 4
    assert [lane for lane, _ in lanes[:step]] == [Lane.REDUCE_SCATTER] * 4


def test_low_precision_weights_at_rest_beside_fp32_shards(ranks):
    """ZeRO-1 with bf16 compute: 2P whole, and the optimizer's fp32 shard 4P/N."""
    at_rest, wire, total, *_ = ranks(2, _bytes, ZERO2, MixedPrecisionPolicy(torch.bfloat16, torch.float32))[0]
    assert at_rest[Category.UNSHARDED_PARAM] == pytest.approx(2 * total, abs=512)
    assert at_rest[Category.SHARDED_PARAM] == pytest.approx(4 * total / 2, abs=64)
    assert wire == pytest.approx((2 + 4) * total / 2, abs=128)          # gathered as bf16, reduced as fp32


def _gradients_of_zero1_wait(rank, world, row):
    model = data_parallel(toy(**EVEN), row)
    with ledger.record() as book:
        loss_of(model, batch(0, rank, vocab=64)).backward()
    reduced = min(e.start for e in book.events if e.lane == Lane.REDUCE_SCATTER)
    computed = max(e.end for e in book.events if e.lane == Lane.COMPUTE and e.phase == "backward" and e.unit != "(root)")
    return reduced > computed


def test_zero1_reduces_once_backward_is_over_and_zero2_during_it(ranks):
    assert ranks(2, _gradients_of_zero1_wait, ZERO1) == [True, True]
    assert ranks(2, _gradients_of_zero1_wait, ZERO2) == [False, False]


def _accumulate(rank, world, row, sync):
    """Three micro-batches, then one step; the losses of a second step tell whether the weights are right."""
    model = data_parallel(toy(), row, mesh_for(row, world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(3):
        if row is not DDP or sync != "replicas":
            getattr(model, "set_requires_all_reduce" if sync == "replicas" else "set_requires_gradient_sync")(sync == "each" or micro == 2)
        loss_of(model, batch(micro, rank)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss_of(model, batch(9, rank)).item(), whole(norm).item()


@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("row", [ZERO1, ZERO2, ZERO3, HSDP], ids=by_name)
def test_accumulation_and_clipping_on_every_row(ranks, row, sync):
    world = 4 if row is HSDP else 2
    for ours, reference in zip(ranks(world, _accumulate, row, sync), ranks(world, _accumulate, DDP, sync), strict=True):
        assert ours == pytest.approx(reference, rel=2e-6)               # the norm is summed in another order


def test_replicas_are_reduced_once_for_many_micro_batches(ranks):
    for ours, reference in zip(ranks(4, _accumulate, HSDP, "replicas"), ranks(4, _accumulate, DDP, "each"), strict=True):
        assert ours == pytest.approx(reference, rel=2e-6)


def _written_by_hand(rank, world):
    """[Note: when the whole is stale] Whatever writes to the shards is seen by the next forward, on every rank."""
    model, tokens = data_parallel(toy(), ZERO2), batch(0, 0)
    with torch.no_grad():
        model.head.bias.add_(3.0)
    by_hand = loss_of(model, tokens)
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    loaded = loss_of(model, tokens)
    reference = toy()
    with torch.no_grad():
        reference.head.bias.add_(3.0)
        expected = loss_of(reference, tokens)
        for param in reference.parameters():
            param.mul_(0.5)
        return torch.equal(by_hand, expected) and torch.equal(loaded, loss_of(reference, tokens))


def test_writes_to_the_shards_reach_the_whole_weights(ranks):
    assert all(ranks(3, _written_by_hand))


def _at_rest(rank, world, row):
    model = data_parallel(toy(), row, mesh_for(row, world))
    loss_of(model, batch(0, rank)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [(name, param.placements if isinstance(param, DTensor) else None, tuple(param.shape))
            for name, param in model.named_parameters()]


def test_what_the_user_sees_at_rest(ranks):
    shapes = [(name, tuple(param.shape)) for name, param in toy().named_parameters()]
    for row, placements in ((DDP, None), (ZERO1, (Shard(0),)), (ZERO2, (Shard(0),)), (ZERO3, (Shard(0),)), (HSDP, (Replicate(), Shard(0)))):
        assert ranks(4, _at_rest, row)[3] == [(name, placements, shape) for name, shape in shapes]


def _no_batch(rank, world):
    model = nn.Linear(2, 2)
    flat, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s"))
    cases = [(ZERO3, dict(mesh=square), "1-D mesh"), (HSDP, dict(mesh=flat), "2-D mesh"), (HSDP, {}, "say which belong together"),
             (DDP, dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16)), "cannot be cast"),
             (ZERO2, dict(offload_policy=CPUOffloadPolicy()), "nothing to offload"), (ZERO3, dict(prefetch=-1), "number of units")]
    for row, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            data_parallel(model, row, **options)
    return not isinstance(model.weight, DTensor)            # refused before anything was changed


def test_rows_that_do_not_fit_are_refused_before_anything_is_changed(ranks):
    assert all(ranks(4, _no_batch))


def test_illegal_rows():
    r, s = Placement.REPLICATE, Placement.SHARD
    for parts, why in (((s, s, r), "replicated optimizer"), ((s, r, s), "replicated gradient"), ((r, s, r), "replicated optimizer"),
                       ((Placement.PARTIAL, r, r), "partial sum")):
        with pytest.raises(ConfigError, match=why):
            Placements(*parts)
    with pytest.raises(ConfigError, match="leave replicas out"):
        Placements(r, r, s, replicas=True)
    assert [row.name for row in LADDER] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP"]
