"""When units gather, free and reduce: exact orders, counts, lifetimes and bytes, all read from the ledger."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_ref import ledger
from fsdp_ref.engine import FSDPModule, data_parallel, fully_shard
from fsdp_ref.ledger import Category, Lane
from fsdp_ref.placements import DDP
from tests.engine.toys import batch, loss_of, toy


class Stack(nn.Module):
    """Three linear layers; each is a unit. The root owns a bias at the start, so that the input of every layer needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = x + self.bias
        for layer in self.layers:
            x = layer(x).relu()
        return x


def stack(reshard=None):
    model = Stack()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def short(unit):
    return {"(root)": "root"}.get(unit, unit.rsplit(".", 1)[-1])


def trace(book):
    """U(unit): gather started; R(unit): whole weights freed; PB(unit): reduction started; in the order they happened."""
    moments = []
    for event in book.events:
        letter = {Lane.ALL_GATHER: "U", Lane.REDUCE_SCATTER: "PB"}.get(event.lane)
        if letter:
            moments.append((event.start, f"{letter}({short(event.unit)})"))
    for row in book.allocations:
        if row.category == Category.UNSHARDED_PARAM and row.end is not None:
            moments.append((row.end, f"R({short(row.unit)})"))
    return " ".join(name for _, name in sorted(moments))


def _traces(rank, world, reshard):
    model, x = stack(reshard), torch.randn(4, 8)
    with ledger.record() as forward:
        out = model(x)
    with ledger.record() as backward:
        out.sum().backward()
    return trace(forward), trace(backward)


GOLDEN = {          # torch's own order (test_fully_shard_comm.py, and traces measured on torch 2.13)
    True: ("U(root) U(0) R(0) U(1) R(1) U(2) R(2) R(root)",
           "U(root) U(2) U(1) R(2) PB(2) U(0) R(1) PB(1) R(0) PB(0) R(root) PB(root)"),
    None: ("U(root) U(0) R(0) U(1) R(1) U(2) R(2)",
           "U(2) U(1) R(2) PB(2) U(0) R(1) PB(1) R(0) PB(0) R(root) PB(root)"),
    False: ("U(root) U(0) U(1) U(2)",
            "R(2) PB(2) R(1) PB(1) R(0) PB(0) R(root) PB(root)"),
}


@pytest.mark.parametrize("reshard", GOLDEN)
def test_order_of_one_step_is_torchs(ranks, reshard):
    for forward, backward in ranks(2, _traces, reshard):
        assert (forward, backward) == GOLDEN[reshard]


def _two_forwards(rank, world):
    model, x = stack(True), torch.randn(4, 8)
    first, second = model(x), model(x)
    with ledger.record() as book:
        (first.sum() + second.sum()).backward()
    return trace(book)


def test_two_forwards_before_one_backward_prefetch_their_own_predecessors(ranks):
    order = ranks(2, _two_forwards)[0]
    gathers = [word for word in order.split() if word.startswith("U")]
    assert gathers[:4] == ["U(root)", "U(2)", "U(1)", "U(0)"] and len(gathers) >= 7, order
    assert Counter(word for word in order.split() if word.startswith("PB")) == {f"PB({u})": 1 for u in ("0", "1", "2", "root")}


def _prefetch(rank, world):
    model, x = stack(True), torch.randn(4, 8)
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers[:2])
    layers[2].set_modules_to_backward_prefetch([layers[1], layers[0]])
    with ledger.record() as book:
        model(x).sum().backward()
    return trace(book)


def test_explicit_prefetch_lists_are_followed(ranks):
    order = ranks(2, _prefetch)[0].split()
    assert order[:3] == ["U(root)", "U(0)", "U(1)"]
    back = order[order.index("R(root)") + 1:]
    assert back[:4] == ["U(root)", "U(2)", "U(1)", "U(0)"]


def _accumulate(rank, world, recurse):
    model, x = stack(None), torch.randn(4, 8)
    model(x).sum().backward()
    model.zero_grad()
    with ledger.record() as book:
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last, recurse=recurse)
            model(x * (micro + 1)).sum().backward()
    counts = Counter(e.lane for e in book.events if e.lane in (Lane.ALL_GATHER, Lane.REDUCE_SCATTER))
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    reference = stack(None)
    for micro in range(3):
        reference(x * (micro + 1)).sum().backward()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(whole[name], param.grad.full_tensor())
    return counts[Lane.ALL_GATHER], counts[Lane.REDUCE_SCATTER]


@pytest.mark.parametrize(("recurse", "reductions"), [(True, 4), (False, 4 + 3 * 2)])
def test_accumulation_without_sync_skips_reductions_and_adds_up(ranks, recurse, reductions):
    assert ranks(2, _accumulate, recurse)[0] == (7 * 3, reductions)          # gathers: forward 4 + backward 3, each micro-batch


def _sum_not_mean(rank, world):
    model = stack(None)
    for layer in model.modules():
        if isinstance(layer, FSDPModule):
            layer.set_gradient_divide_factor(1.0)
    x = torch.ones(4, 8)
    model(x).sum().backward()
    reference = Stack()
    reference(x).sum().backward()
    torch.testing.assert_close(model.layers[0].weight.grad.full_tensor(), world * reference.layers[0].weight.grad)
    return True


def test_a_divide_factor_replaces_the_number_of_ranks(ranks):
    assert all(ranks(3, _sum_not_mean))


def _registered(rank, world, reshard):
    model, x = stack(reshard), torch.randn(4, 8)
    out = model(x)
    kinds = {name: isinstance(p, DTensor) for name, p in model.named_parameters()}
    out.sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    handle = model.layers[0].unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.layers[0].weight, DTensor) and model.layers[0].weight.shape == (8, 8)
    model.layers[0].reshard()
    assert isinstance(model.layers[0].weight, DTensor)
    return kinds


@pytest.mark.parametrize("reshard", [True, None, False])
def test_what_the_modules_hold_after_forward(ranks, reshard):
    kinds = ranks(2, _registered, reshard)[0]
    expected = {True: (True, True), None: (True, False), False: (False, False)}[reshard]
    assert (kinds["layers.1.weight"], kinds["bias"]) == expected


def _memory(rank, world, strategy):
    model = toy(vocab=64, dim=32, hidden=64, layers=4)
    if strategy == "zero3":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        data_parallel(model, DDP)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with ledger.record() as book:
        loss_of(model, batch(1, rank)).backward()
        optimizer.step()
        at_rest = ledger.live_bytes()             # record() has collected the models of earlier tests
        optimizer.zero_grad()
    block = sum(p.numel() for p in model.blocks[0].parameters()) * 4
    total = sum(p.numel() for p in model.parameters()) * 4
    per_category = {c: max((a.bytes for a in book.allocations if a.category == c), default=0) for c in Category}
    return book.peak_bytes(rank), at_rest, total, block, per_category, {a.category for a in book.allocations if a.end is None}


def test_bytes_of_zero3_follow_the_formula(ranks):
    """At rest 4 copies of P/N (weights, gradients, two moments); at most the root, two blocks and one block's buffer on top."""
    peak, at_rest, total, block, _, left = ranks(2, _memory, "zero3")[0]
    padding = 4 * 4 * 64                                   # less than one row of every parameter
    assert 4 * total / 2 <= at_rest <= 4 * total / 2 + padding
    root = total - 4 * block
    assert peak <= 3 * total / 2 + root + 3 * block + total / 2 + block + padding
    assert left == {Category.SHARDED_PARAM, Category.OPTIMIZER}            # the gradients went with zero_grad


def test_bytes_of_ddp_follow_the_formula(ranks):
    _, at_rest, total, _, _, left = ranks(2, _memory, "ddp")[0]
    assert 16 / 4 * total <= at_rest <= 16 / 4 * total + 4 * 200           # AdamW's step counters: 4 bytes a parameter tensor
    assert left == {Category.UNSHARDED_PARAM, Category.OPTIMIZER}


def _checkpointing(rank, world, reentrant, reshard):
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, reference = toy(), toy()
    for i, block in enumerate(model.blocks):
        fully_shard(block, reshard_after_forward=reshard)
        model.blocks[i] = Checkpointed(block)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(2):
        loss_of(model, batch(step, 0)).backward()
        loss_of(reference, batch(step, 0)).backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda m, name=name: f"{name}: {m}")
    return True


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_both_kinds(ranks, reentrant, reshard):
    assert all(ranks(2, _checkpointing, reentrant, reshard))


def _world_of_one(rank, world):
    model, x = stack(True), torch.randn(4, 8)
    with ledger.record() as book:
        model(x).sum().backward()
    return [e.lane for e in book.events if e.group_size > 1], model.layers[0].weight.grad.full_tensor().abs().sum().item() > 0


def test_a_world_of_one_needs_no_collective(ranks):
    assert ranks(1, _world_of_one) == [([], True)]
