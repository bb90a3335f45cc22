"""The flat parameter: right numbers, the layout and the limits that its module docstring promises, and the memory it really frees."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from fsdp_ref import ledger
from fsdp_ref.contrast.flat import flat_shard, full_state_dict, units_of
from fsdp_ref.engine import fully_shard
from fsdp_ref.errors import ConfigError
from fsdp_ref.ledger import Category, Lane
from tests.contrast.oracles import Again, Tied, Two, nbytes, peak, settle, three_steps, whole_batch_loss
from tests.engine.toys import batch, loss_of, toy


def whole_gradients(model):
    """The gradients under their original names: the slices' `.grad` take the slices' place for one full state dict."""
    units = units_of(model)
    kept = [unit.shard.data for unit in units]
    for unit in units:
        unit.shard.data = unit.shard.grad
    gathered = full_state_dict(model)
    for unit, data in zip(units, kept, strict=True):
        unit.shard.data = data
    return gathered


def _three_steps(rank, world):
    return three_steps(flat_shard(toy()), rank, world, whole_gradients, full_state_dict)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_three_steps_beside_one_process_and_torch(ranks, world):
    assert all(ranks(world, _three_steps))


def _padded(rank, world):
    model = flat_shard(Two())
    at_rest = model.flat_param.tolist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3) * (rank + 1)).backward()
        optimizer.step()
    reference = Two()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        theirs.zero_grad()
        torch.stack([reference(torch.ones(3) * (r + 1)) for r in range(world)]).mean().backward()
        theirs.step()
    expected = torch.cat([reference.a.grad.flatten(), reference.b.grad, torch.zeros(-10 % world)]).chunk(world)[rank]
    torch.testing.assert_close(model.flat_param.grad, expected)
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach())
    with ledger.record() as book:
        pass
    (row,) = (row for row in book.shards if row.name == "flat_param")
    return at_rest, model.flat_param.tolist()[-1], (row.offset, row.rows, row.padded_rows)


def test_ten_elements_on_four_ranks_are_padded_at_the_right(ranks):
    results = ranks(4, _padded)
    assert [r[0] for r in results] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 0]]
    assert results[3][1] == 0.0, "the padding gets no gradient, so it stays what it was"
    assert [r[2] for r in results] == [(0, 3, 3), (3, 3, 3), (6, 3, 3), (9, 1, 3)]


def _refused(rank, world):
    low, frozen, tied, meta, twice, mine = (toy() for _ in range(6))
    low.blocks[1].up.to(torch.bfloat16)
    frozen.blocks[0].norm.requires_grad_(False)
    tied.blocks[2].up.weight = tied.blocks[0].up.weight
    meta.head.to_empty(device="meta")
    flat_shard(twice)
    cases = [(lambda: flat_shard(low), r"unit blocks\.1 mixes.*float32, trainable: blocks\.1\.norm.*bfloat16, trainable: blocks\.1\.up"),
             (lambda: flat_shard(frozen), r"unit blocks\.0 mixes.*frozen: blocks\.0\.norm\.weight, blocks\.0\.norm\.bias.*trainable: "),
             (lambda: flat_shard(tied), r"blocks\.2\.up\.weight of unit blocks\.2 is tied to blocks\.0\.up\.weight of unit blocks\.0"),
             (lambda: flat_shard(meta), r"head\.weight is on the meta device"),
             (lambda: flat_shard(twice), r"flat_param is .*sharded already"),
             (lambda: flat_shard(fully_shard(toy())), r"is .*sharded already"),
             (lambda: flat_shard(mine, units=[toy().head]), r"a Linear cannot be a unit"),
             (lambda: flat_shard(mine, units=[mine.blocks]), r"a ModuleList cannot be a unit")]
    for call, message in cases:
        with pytest.raises(ConfigError, match=message):
            call()
    for model in (low, frozen, tied, mine):
        assert {n.rpartition(".")[2] for n, _ in model.named_parameters()} == {"weight", "bias", "gain"}, "nothing was changed"
    model = flat_shard(toy())
    assert sorted(name for name, _ in model.named_parameters()) == [f"blocks.{i}.flat_param" for i in range(3)] + ["flat_param"]
    return not hasattr(model.head, "weight")                  # outside the unit's forward the weight does not exist


def test_the_limits_are_checked_before_anything_changes(ranks):
    assert all(ranks(2, _refused))


def _state_dict(rank, world):
    model = flat_shard(Tied())
    whole, original = full_state_dict(model), Tied().state_dict()
    assert set(whole) == set(original) == {"embedding.weight", "head.weight", "scale"}
    assert set(model.state_dict()) == {"flat_param", "scale"}
    assert all(torch.equal(whole[name], original[name]) for name in original)
    flat_shard(Tied()).load_state_dict(model.state_dict())
    alone = Tied()
    for each in (model, alone):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(each, batch(step, 0, vocab=9)).backward()
            optimizer.step()
    after = full_state_dict(model)
    assert torch.equal(after["head.weight"], after["embedding.weight"])
    torch.testing.assert_close(after["head.weight"], alone.head.weight.detach())
    alone.load_state_dict(after)
    return True


def test_full_state_dict_has_the_original_names_and_ties(ranks):
    assert all(ranks(3, _state_dict))


def _frozen(rank, world):
    model, alone = toy(), toy()
    for each in (model, alone):
        each.blocks[1].requires_grad_(False)
    before = alone.blocks[1].up.weight.clone()
    flat_shard(model)
    optimizers = [torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01) for each in (model, alone)]
    for step in range(2):
        with ledger.record() as book:
            loss_of(model, batch(step, rank)).backward()
        whole_batch_loss(alone, step, world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_state_dict(model)
    assert torch.equal(whole["blocks.1.up.weight"], before)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(whole[name], param.detach(), rtol=1e-5, atol=1e-6)
    ends = {row.unit: row.end for row in book.allocations if row.category == Category.UNSHARDED_PARAM}       # of backward: the last of each
    assert ends["blocks.2"] < ends["blocks.1"] < ends["blocks.0"], "a frozen unit is freed when backward has passed it"
    reduced = [e.unit for e in book.events if e.lane == Lane.REDUCE_SCATTER]
    model.requires_grad_(True)
    loss_of(model, batch(2, rank)).backward()
    assert model.blocks[1].flat_param.grad.abs().sum() > 0
    return reduced


def test_a_frozen_unit_is_gathered_freed_and_not_reduced_and_can_be_thawed(ranks):
    assert ranks(2, _frozen) == [["blocks.2", "blocks.0", "(root)"]] * 2


def _one_step(rank, world, **sizes):
    model, whole = toy(**sizes), toy(**sizes)
    flat_shard(model)
    loss_of(model, batch(0, rank, vocab=9)).backward()
    model.zero_grad()
    with ledger.record() as book:
        with ledger.mark("forward"):
            loss = loss_of(model, batch(1, rank, vocab=9))
            assert all(unit.whole.untyped_storage().size() == 0 for unit in units_of(model)), "freed in truth, not in the books alone"
        loss.backward()
        assert all(unit.whole.untyped_storage().size() == 0 for unit in units_of(model))
    settle()
    kept = {category: ledger.live_bytes(category) for category in Category}
    model.zero_grad()
    return book, whole, kept, ledger.live_bytes(Category.SHARDED_GRAD)


def _padded_bytes(numel, world):
    return 4 * (numel + -numel % world)


def _collectives(rank, world):
    book, whole, _, _ = _one_step(rank, world)
    seen = [(e.lane, e.phase, e.unit, e.bytes) for e in sorted(book.events, key=lambda e: e.start) if e.group_size > 1]
    numels = {f"blocks.{i}": sum(p.numel() for p in whole.blocks[i].parameters()) for i in range(3)}
    numels["(root)"] = sum(p.numel() for p in whole.parameters()) - sum(numels.values())
    sizes = {unit: _padded_bytes(numel, world) for unit, numel in numels.items()}
    expected = [(Lane.ALL_GATHER, "forward", unit, sizes[unit]) for unit in ("(root)", "blocks.0", "blocks.1", "blocks.2")]
    expected += [(Lane.ALL_GATHER, "backward", "(root)", sizes["(root)"])]
    for unit in ("blocks.2", "blocks.1", "blocks.0"):
        expected += [(lane, "backward", unit, sizes[unit]) for lane in (Lane.ALL_GATHER, Lane.REDUCE_SCATTER)]
    expected += [(Lane.REDUCE_SCATTER, "backward", "(root)", sizes["(root)"])]
    assert seen == expected
    spans = sorted((e.phase, e.unit) for e in book.events if e.lane == Lane.COMPUTE and e.phase != "mark")
    assert spans == sorted((phase, unit) for phase in ("forward", "backward") for unit in numels)
    return True


@pytest.mark.parametrize("world", [2, 3])
def test_two_gathers_and_one_reduction_a_unit_in_the_order_of_the_step(ranks, world):
    assert all(ranks(world, _collectives))


def _memory(rank, world):
    gc.collect()
    book, whole, kept, after_zero_grad = _one_step(rank, world, vocab=9, dim=16, hidden=32, layers=8)
    model, block = nbytes(whole.parameters()), nbytes(whole.blocks[0].parameters())
    root, padding = model - 8 * block, 9 * 4 * world
    forward = book.window("forward")
    forward.allocations = [row for row in forward.allocations if row.start < forward.end]
    assert root + block <= peak(forward, Category.UNSHARDED_PARAM) <= root + block + padding
    # the root waits for its reduction to the end; on top stand one block's weights, its gradients, and the flat one they are joined into
    assert peak(book) <= 2 * model / world + 2 * root + 3 * block + 4 * padding
    assert peak(book) < model, "flat frees: less than the model at every moment, shards and gradients included"
    assert peak(book, Category.REDUCE_SCATTER) >= max(block, root) and peak(book, Category.ALL_GATHER) == 0       # gathered in place
    assert kept[Category.UNSHARDED_PARAM] == kept[Category.UNSHARDED_GRAD] == kept[Category.REDUCE_SCATTER] == 0
    assert model / world <= kept[Category.SHARDED_PARAM] == kept[Category.SHARDED_GRAD] <= model / world + padding
    assert after_zero_grad == 0
    return True


def test_memory_stays_below_the_whole_model(ranks):
    assert all(ranks(4, _memory))


def _checkpointed(rank, world, what):
    model, alone = toy(), toy()
    if what != "parts":
        units = list(model.blocks)
        model.blocks = nn.ModuleList(Again(block) for block in units)
    else:                                                     # parts of a unit: all but one block belong to the root
        units = [model.blocks[0]]
        model.blocks[1], model.blocks[2] = Again(model.blocks[1]), Again(model.blocks[2])
    flat_shard(model, units)
    for step in range(2):
        with set_checkpoint_early_stop(what != "units to their end"):                 # else recomputation never comes to the unit's end
            loss_of(model, batch(step, rank)).backward()
        whole_batch_loss(alone, step, world).backward()
    for name, grad in whole_gradients(model).items():
        torch.testing.assert_close(grad, alone.get_parameter(name.replace("inner.", "")).grad, rtol=1e-5, atol=1e-6)
    assert all(unit.whole.untyped_storage().size() == 0 for unit in units_of(model))
    return True


@pytest.mark.parametrize("what", ["units", "units to their end", "parts"])
def test_checkpointing_recomputes_with_gathered_weights_and_gradients_accumulate(ranks, what):
    assert all(ranks(2, _checkpointed, what))


def _odd_uses(rank, world):
    model, alone = flat_shard(toy()), toy()

    class Stop(Exception):
        pass

    def interrupt(*_):
        raise Stop

    handle = model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(Stop):
        loss_of(model, batch(0, rank))
    handle.remove()
    with torch.no_grad():                                      # weights that the broken step left gathered must not be used
        for unit in units_of(model):
            unit.shard.mul_(1.5)
        for param in alone.parameters():
            param.mul_(1.5)
        torch.testing.assert_close(loss_of(model, batch(3, rank)), loss_of(alone, batch(3, rank)))
    (loss_of(model, batch(1, rank)) + loss_of(model, batch(2, rank))).backward()                   # two forwards before one backward
    (whole_batch_loss(alone, 1, world) + whole_batch_loss(alone, 2, world)).backward()
    for name, grad in whole_gradients(model).items():
        torch.testing.assert_close(grad, alone.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
    tail = model.blocks[0](torch.ones(2, 6, requires_grad=True))                                   # one unit alone
    tail.sum().backward()
    return all(unit.whole.untyped_storage().size() == 0 for unit in units_of(model))


def test_a_broken_step_two_forwards_and_a_unit_alone(ranks):
    assert all(ranks(2, _odd_uses))


def _gone(rank, world):
    gc.collect()
    before = ledger.live_bytes()
    model = flat_shard(toy())
    loss_of(model, batch(0, rank)).backward()
    assert ledger.live_bytes() > before
    settle()
    del model
    gc.collect()
    return ledger.live_bytes() == before


def test_a_model_that_is_gone_leaves_the_books(ranks):
    assert all(ranks(2, _gone))
