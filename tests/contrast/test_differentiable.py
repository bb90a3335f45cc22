"""The gather that autograd differentiates: right numbers, torch's rows, and the memory that autograd keeps, or with checkpoint does not."""

import gc
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Shard

from fsdp_ref import ledger
from fsdp_ref.contrast.differentiable import differentiable_shard
from fsdp_ref.contrast.flat import flat_shard
from fsdp_ref.errors import ConfigError
from fsdp_ref.ledger import Category, Lane
from tests.contrast.oracles import Again, Tied, nbytes, peak, settle, three_steps, whole_batch_loss
from tests.engine.toys import batch, loss_of, toy


def whole(model):
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def whole_gradients(model):
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


def _three_steps(rank, world, again):
    return three_steps(differentiable_shard(toy(), checkpoint=again), rank, world, whole_gradients, whole)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_three_steps_beside_one_process_and_torch(ranks, world, again):
    assert all(ranks(world, _three_steps, again))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(n, 3)) for n in (1, 2, 3, 5, 10, 0))

    def forward(self, x):
        return sum(((p @ x) ** 2).sum() for p in self.rows)


def _rows(rank, world):
    model, alone = differentiable_shard(Odd()), Odd()
    for shard, param in zip(model.parameters(), alone.parameters(), strict=True):
        pieces = [*param.detach().chunk(world), *[param.detach()[:0]] * world] if len(param) else [param.detach()] * world
        assert torch.equal(shard.to_local(), pieces[rank]) and shard.shape == param.shape and shard.placements == (Shard(0),)
    with ledger.record() as book:
        for each in (model, alone):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                each(torch.arange(3.0)).backward()
                optimizer.step()
    for shard, param in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), param)
    return [(row.offset, row.rows, row.padded_rows) for row in book.shards if row.name.startswith("rows.")]


def test_rows_are_cut_like_torch_chunk_and_padded(ranks):
    results = ranks(4, _rows)
    assert [r[3] for r in results] == [(0, 2, 2), (2, 2, 2), (4, 1, 2), (5, 0, 2)]
    assert [r[4] for r in results] == [(0, 3, 3), (3, 3, 3), (6, 3, 3), (9, 1, 3)]


def saved_weights(model, tokens):
    """The parameters that autograd keeps for backward, once for every time: what a plain model's saved tensors share memory with."""
    names = {param.untyped_storage().data_ptr(): name for name, param in model.named_parameters()}
    saved = Counter()

    def pack(tensor):
        if name := names.get(tensor.untyped_storage().data_ptr()):
            saved[name] += 1
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, tokens)
    return saved


def _padded_bytes(param, world):
    rows = len(param) + -len(param) % world
    return rows * (param.numel() // len(param)) * 4


def _one_step(rank, world, again, **sizes):
    model, plain, tokens = differentiable_shard(toy(**sizes), checkpoint=again), toy(**sizes), batch(1, rank, vocab=9)
    loss_of(model, batch(0, rank, vocab=9)).backward()
    model.zero_grad()
    gc.collect()
    at_rest = {category: ledger.live_bytes(category) for category in Category}
    with ledger.record() as book:
        loss = loss_of(model, tokens)
        settle()
        between = ledger.live_bytes(Category.UNSHARDED_PARAM)
        loss.backward()
    settle()
    kept = {category: ledger.live_bytes(category) for category in Category}
    del loss
    model.zero_grad()
    return book, plain, saved_weights(plain, tokens), at_rest, between, kept


def _collectives(rank, world, again):
    book, plain, saved, *_ = _one_step(rank, world, again)
    params = dict(plain.named_parameters())
    seen = Counter((e.lane, e.phase, e.unit, e.bytes) for e in book.events if e.lane in (Lane.ALL_GATHER, Lane.REDUCE_SCATTER))
    expected = Counter()
    for name, param in params.items():
        size = _padded_bytes(param, world)
        expected[Lane.ALL_GATHER, "forward", name, size] = 1                            # every module reads each of its weights once
        expected[Lane.REDUCE_SCATTER, "backward", name, size] = 1
        if again and saved[name]:
            expected[Lane.ALL_GATHER, "backward", name, size] = saved[name]
    assert seen == expected
    assert 0 < len(saved) < len(params)                                                # backward does not read biases and embeddings
    assert sorted(e.phase for e in book.events if e.lane == Lane.COMPUTE) == ["backward", "forward"]
    return True


@pytest.mark.parametrize("again", [False, True])
def test_one_gather_and_one_reduction_a_parameter(ranks, again):
    assert all(ranks(3, _collectives, again))


def _memory(rank, world, again):
    book, plain, saved, at_rest, between, kept = _one_step(rank, world, again, vocab=9, dim=16, hidden=32, layers=8)
    params = dict(plain.named_parameters())
    model, padding = nbytes(params.values()), sum(_padded_bytes(p, world) for p in params.values()) - nbytes(params.values())
    if again:                                   # whole at a time: a weight, its bias, and what the thread that carries messages had last
        largest = max(_padded_bytes(p, world) for p in params.values())
        assert between == 0 and peak(book, Category.UNSHARDED_PARAM) <= 3 * largest, "with checkpoint every weight goes after its use"
        assert peak(book) <= 2 * (model + padding) / world + 6 * largest                # shards and their gradients; buffers of one weight
        assert world == 2 or peak(book) < model
    else:
        assert between == sum(_padded_bytes(params[name], world) for name in saved), "alive at the end of forward: what autograd saved"
        assert between > 0.9 * model
        assert peak(book) >= model, "the whole model is in memory before backward begins"
    assert {category for category, left in kept.items() if left} == {Category.SHARDED_PARAM, Category.SHARDED_GRAD}
    assert model / world - padding <= at_rest[Category.SHARDED_PARAM] <= model / world + padding
    assert model / world <= kept[Category.SHARDED_GRAD] == (model + padding) / world
    assert at_rest[Category.SHARDED_GRAD] == ledger.live_bytes(Category.SHARDED_GRAD) == 0
    return peak(book)


@pytest.mark.parametrize("world", [2, 4])
def test_autograd_keeps_the_whole_model_unless_weights_are_gathered_again(ranks, world):
    kept, again = ranks(world, _memory, False), ranks(world, _memory, True)
    assert max(again) < min(kept)


def _against_flat(rank, world):
    """The comparison that the lesson draws: one model, both contrasts, one ledger each."""
    sizes = {"vocab": 9, "dim": 16, "hidden": 32, "layers": 8}
    peaks = {}
    for apply in (flat_shard, differentiable_shard):
        gc.collect()
        model = apply(toy(**sizes))
        with ledger.record() as book:
            loss_of(model, batch(0, rank, vocab=9)).backward()
        peaks[apply.__name__] = peak(book, Category.UNSHARDED_PARAM)
        del model
    return peaks["flat_shard"] * 2 < peaks["differentiable_shard"]


def test_flat_holds_less_than_half_the_weights_that_autograd_keeps(ranks):
    assert all(ranks(2, _against_flat))


def _frozen(rank, world, again):
    model, alone = toy(), toy()
    for each in (model, alone):
        each.norm.requires_grad_(False)
        each.blocks[1].up.bias.requires_grad_(False)                                   # mixed with trainable ones in one module: no matter
    differentiable_shard(model, checkpoint=again)
    with ledger.record() as book:
        loss_of(model, batch(0, rank)).backward()
    whole_batch_loss(alone, 0, world).backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not theirs.requires_grad), name
        if theirs.requires_grad:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)
    return sorted(set(dict(alone.named_parameters())) - {e.unit for e in book.events if e.lane == Lane.REDUCE_SCATTER})


@pytest.mark.parametrize("again", [False, True])
def test_frozen_weights_mix_with_others_and_are_not_reduced(ranks, again):
    assert ranks(2, _frozen, again) == [["blocks.1.up.bias", "norm.bias", "norm.weight"]] * 2


def _tied(rank, world, again):
    model, alone = differentiable_shard(Tied(), checkpoint=again), Tied()
    assert len(list(model.parameters())) == 1 and model._modules["head"]._parameters["weight"] is model.embedding._parameters["weight"]
    for each in (model, alone):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(each, batch(step, 0, vocab=9)).backward()
            optimizer.step()
    torch.testing.assert_close(model.embedding._parameters["weight"].full_tensor(), alone.head.weight)
    return True


@pytest.mark.parametrize("again", [False, True])
def test_tied_weights_sum_their_gradients(ranks, again):
    assert all(ranks(3, _tied, again))


def _state_dict(rank, world):
    model, alone = differentiable_shard(toy()), toy()
    saved = model.state_dict()
    assert list(saved) == list(alone.state_dict()) and all(isinstance(value, DTensor) for value in saved.values())
    other = differentiable_shard(toy(seed=1))
    other.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(loss_of(other, batch(0, 0)), loss_of(alone, batch(0, 0)))
        settle()
        between = ledger.live_bytes(Category.UNSHARDED_PARAM)
    for step in range(2):                                                              # gradients accumulate
        loss_of(model, batch(step, rank)).backward()
        whole_batch_loss(alone, step, world).backward()
    ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
    for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    return between


def test_state_dict_and_clipping_need_nothing_special(ranks):
    assert ranks(3, _state_dict) == [0] * 3                                            # without gradients nothing is kept


def _checkpointed(rank, world, again):
    model, alone = toy(), toy()
    model.blocks = nn.ModuleList(Again(block) for block in model.blocks)
    differentiable_shard(model, checkpoint=again)
    loss_of(model, batch(0, rank)).backward()
    whole_batch_loss(alone, 0, world).backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-5, atol=1e-6)
    return True


@pytest.mark.parametrize("again", [False, True])
def test_activation_checkpointing_of_blocks(ranks, again):
    assert all(ranks(2, _checkpointed, again))


def _refused(rank, world):
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))

    meta, recurrent = toy(), nn.ModuleDict({"memory": nn.LSTM(3, 4)})
    meta.head.to_empty(device="meta")
    for model, message in ((Scalar(), "gain is a scalar"), (recurrent, r"memory\.weight_ih_l0 is a weight of a torch RNN"),
                           (meta, r"head\.weight is on the meta device"), (differentiable_shard(toy()), "is .*sharded already"),
                           (flat_shard(toy()), r"flat_param is .*sharded already")):
        with pytest.raises(ConfigError, match=message):
            differentiable_shard(model)
    return type(recurrent["memory"]) is nn.LSTM and type(meta.head) is nn.Linear         # nothing was changed


def test_limits_are_checked_before_anything_changes(ranks):
    assert all(ranks(2, _refused))


def _gone(rank, world):
    gc.collect()
    before = ledger.live_bytes()
    model = differentiable_shard(toy())
    loss = loss_of(model, batch(0, rank))
    assert ledger.live_bytes() > before
    settle()
    del model, loss
    gc.collect()
    return ledger.live_bytes() == before


def test_a_model_that_is_gone_leaves_the_books(ranks):
    assert all(ranks(2, _gone))
