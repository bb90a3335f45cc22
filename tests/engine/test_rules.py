"""The rules around a sharded model: what may be sharded, what is refused and how, and what survives."""

import copy
import gc
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_ref import ledger
from fsdp_ref.engine import FSDPModule, MixedPrecisionPolicy, data_parallel, fully_shard, register_fsdp_forward_method, wrap
from fsdp_ref.engine.param import chunk_rows
from fsdp_ref.errors import ConfigError, WorldError
from fsdp_ref.ledger import Category
from fsdp_ref.placements import DDP, ZERO3
from tests.engine.toys import Block, batch, loss_of, toy


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 8, 13])
def test_rows_are_cut_like_torch_chunk(rows, world):
    pieces = list(torch.arange(rows).chunk(world)) if rows else []
    for rank in range(world):
        chunk, first, own = chunk_rows(rows, world, rank)
        expected = pieces[rank].tolist() if rank < len(pieces) else []
        assert list(range(first, first + own)) == expected and own <= chunk


def _shapes(rank, world):
    """Parameters of 0, 1 and fewer rows than ranks train like the whole ones."""
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rows = nn.ParameterList(nn.Parameter(torch.randn(n, 3)) for n in (1, 2, 3, 5, 6, 0))

        def forward(self, x):
            return sum(((p @ x) ** 2).sum() for p in self.rows)

    model, reference = fully_shard(Odd()), Odd()
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            each(torch.arange(3.0)).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    return [tuple(p.to_local().shape) for p in model.parameters()]


def test_parameters_with_few_rows(ranks):
    shapes = ranks(4, _shapes)
    assert [s[0] for s in shapes] == [(1, 3), (0, 3), (0, 3), (0, 3)]
    assert [s[3] for s in shapes] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [s[5] for s in shapes] == [(0, 3)] * 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def _tied(rank, world):
    model, reference = fully_shard(Tied()), Tied()
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 1
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(each, batch(step, 0, vocab=9)).backward()
            optimizer.step()
    torch.testing.assert_close(model.head.weight.full_tensor(), reference.head.weight)
    split = Tied()
    fully_shard(split.embedding)
    fully_shard(split.head)
    fully_shard(split)
    with pytest.raises(ValueError, match=r"head.*shared.*already managed by another.*embedding"):
        split(batch(0, 0, vocab=9))
    return True


def test_tied_parameters_share_a_unit_or_are_refused(ranks):
    assert all(ranks(2, _tied))


def _frozen(rank, world):
    model = toy()
    model.norm.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    data_parallel(model, ZERO3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
    for name, param in model.named_parameters():
        assert (param.grad is None) == (name in before), name
        if name in before:
            assert torch.equal(param.full_tensor(), before[name]), name
    model.requires_grad_(True)
    loss_of(model, batch(2, rank)).backward()
    return all(p.grad is not None for p in model.parameters())


def test_frozen_parameters_rest_and_can_be_thawed(ranks):
    assert all(ranks(2, _frozen))


def _low_precision(rank, world, accumulate):
    def build(apply, policy):
        model, mesh = toy(), init_device_mesh("cpu", (world,))
        low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        for block in model.blocks:
            apply(block, mesh=mesh, mp_policy=policy(**low))
        return apply(model, mesh=mesh, mp_policy=policy(**low, output_dtype=torch.float32))

    ours, theirs = build(fully_shard, MixedPrecisionPolicy), build(torch_fully_shard, TorchPolicy)
    for step in range(2):
        for micro in range(3 if accumulate else 0):
            for model in (ours, theirs):
                model.set_requires_gradient_sync(False)
                loss_of(model, batch(10 + micro, rank)).backward()
                model.set_requires_gradient_sync(True)
        losses = [loss_of(model, batch(step, rank)) for model in (ours, theirs)]
        assert torch.equal(*losses) and losses[0].dtype == torch.float32
        for loss in losses:
            loss.backward()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert a.dtype == a.grad.dtype == torch.float32
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), name
    return True


def test_bf16_compute_keeps_fp32_shards_and_torchs_bits(ranks):
    assert all(ranks(3, _low_precision, False))
    assert all(ranks(3, _low_precision, True))             # gradients of unsynced micro-batches are kept in fp32


@dataclass
class Pair:
    left: torch.Tensor
    right: dict


def _structures(rank, world):
    class Nest(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, pair, *, scale):
            return Pair(self.inner(pair.left) * scale["by"], {"twice": [self.inner(pair.right["x"])], "also": self.inner(pair.left)})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.nest = nn.Linear(4, 4), Nest()

        def forward(self, x):
            y = self.first(x)
            out = self.nest(Pair(y, {"x": y}), scale={"by": torch.tensor(2.0)})
            return out.left.sum() + out.right["twice"][0].sum()

    torch.manual_seed(1)
    reference = Outer()
    model = copy.deepcopy(reference)
    fully_shard(model.nest)
    fully_shard(model)
    for each in (model, reference):
        for _ in range(2):
            each(torch.ones(2, 4)).backward()
    assert model.nest.unused.weight.grad is None
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), reference.first.weight.grad)
    torch.testing.assert_close(model.nest.inner.weight.grad.full_tensor(), reference.nest.inner.weight.grad)
    return True


def test_nested_inputs_outputs_and_unused_parameters(ranks):
    assert all(ranks(2, _structures))


def _classes(rank, world):
    model = toy()
    for block in model.blocks:
        fully_shard(block)
    assert fully_shard(model) is model
    block = model.blocks[0]
    assert type(block).__name__ == "FSDPBlock" and isinstance(block, (FSDPModule, Block)) and isinstance(model.blocks[1], FSDPModule)
    sequential = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not isinstance(sequential[:1], FSDPModule)
    with pytest.raises(AssertionError, match="already been applied"):
        fully_shard(block)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="containers that do not implement forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="doesn't support scalar parameters"):
        scalar = nn.Module()
        scalar.gain = nn.Parameter(torch.tensor(1.0))
        fully_shard(scalar)
    with pytest.raises(ValueError, match="1D or 2D DeviceMesh"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, world)))
    with pytest.raises(ValueError, match="factor of 2"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
    with pytest.raises(ConfigError, match="cannot be cast"):
        data_parallel(nn.Linear(2, 2), DDP, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return True


def test_classes_and_refusals(ranks):
    assert all(ranks(2, _classes))


def _early_optimizer(rank, world):
    model = toy()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    loss_of(model, batch(0, rank)).backward()
    with pytest.raises(ConfigError, match="built before the model was sharded"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return True


def test_an_optimizer_built_before_sharding_is_refused(ranks):
    assert all(ranks(2, _early_optimizer))


def _children_and_methods(rank, world):
    model = toy()
    model.encode = lambda tokens: model.embedding(tokens)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    tokens = batch(0, rank)
    encoded = model.encode(tokens)
    assert not isinstance(encoded, DTensor) and encoded.shape == (*tokens.shape, 6)
    alone = model.blocks[1](encoded.detach())
    torch.testing.assert_close(alone, toy().blocks[1](encoded.detach()))
    loss_of(model, tokens).backward()
    return all(p.grad is not None for p in model.parameters())


def test_a_child_alone_and_a_method_besides_forward(ranks):
    assert all(ranks(2, _children_and_methods))


def _child_first(rank, world):
    model = toy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.blocks[0](torch.randn(2, 6))
    with pytest.raises(RuntimeError, match="requires running forward through the root module first"):
        model(batch(0, rank))
    return True


def test_the_root_must_run_first(ranks):
    assert all(ranks(2, _child_first))


def _moved(rank, world):
    model = toy()
    data_parallel(model, ZERO3)
    model.to(torch.float64)
    reference = toy().to(torch.float64)
    for each in (model, reference):
        loss_of(each, batch(0, 0)).backward()
    assert model.head.weight.grad.dtype == torch.float64
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad)

    with torch.device("meta"):
        meta = toy()
    data_parallel(meta, ZERO3)
    with pytest.raises(RuntimeError, match=r"still on meta device: .*'embedding.weight'"):
        loss_of(meta, batch(0, 0))
    meta.to_empty(device="cpu")
    meta.load_state_dict({name: value.to(torch.float32) for name, value in model.state_dict().items()})
    loss_of(meta, batch(0, 0)).backward()
    torch.testing.assert_close(meta.head.weight.grad.full_tensor(), reference.head.weight.grad.float())
    return True


def test_dtype_change_and_meta_construction_after_sharding(ranks):
    assert all(ranks(3, _moved))


def _interrupted(rank, world, where, explicit):
    model = toy()
    data_parallel(model, ZERO3)
    loss_of(model, batch(0, rank)).backward()
    expected = model.head.weight.grad.full_tensor().clone()
    model.zero_grad()
    def stop(*_):
        raise ZeroDivisionError

    if where == "forward":
        handle = model.blocks[1].register_forward_hook(stop)
    else:
        handle = model.blocks[1].register_full_backward_hook(stop)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(0, rank)).backward()
    handle.remove()
    if explicit:
        model.reset_iter_state()
        before = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        model.reset_iter_state()                            # nothing of the broken step arrives later
        after = [None if p.grad is None else p.grad.to_local() for p in model.parameters()]
        assert all(a is None and b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))
        gc.collect()                                        # models of earlier tests
        assert not ledger.live_bytes(Category.REDUCE_SCATTER) and not ledger.live_bytes(Category.UNSHARDED_GRAD)
    model.zero_grad()
    loss_of(model, batch(0, rank)).backward()
    return torch.equal(model.head.weight.grad.full_tensor(), expected)


@pytest.mark.parametrize("explicit", [True, False], ids=["reset_iter_state", "by itself"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_cut_short_by_an_exception_is_forgotten(ranks, where, explicit):
    assert all(ranks(2, _interrupted, where, explicit))


def _inference_first(rank, world):
    model = toy()
    data_parallel(model, ZERO3)
    with torch.inference_mode():
        model(batch(0, rank))
    loss_of(model, batch(0, rank)).backward()
    reference = toy()
    data_parallel(reference, ZERO3)
    loss_of(reference, batch(0, rank)).backward()
    return torch.equal(model.head.weight.grad.to_local(), reference.head.weight.grad.to_local())


def test_inference_mode_before_training(ranks):
    assert all(ranks(2, _inference_first))


class Chunked(nn.Module):
    """Norm and head share a unit; the loss is made chunk by chunk, with a backward for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 9)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def _chunks(rank, world):
    def run(model, of=rank):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(of))
        model(x).sum().backward()                           # norm runs before head: its marker must not fire too early
        hidden = torch.randn(4, 6, generator=torch.Generator().manual_seed(7 + of), requires_grad=True)
        for chunk in hidden.chunk(2):
            model.head(chunk).square().sum().backward()
        return [p.grad for p in model.parameters()]

    def build(apply):
        model = Chunked()
        apply([model.norm, model.head])
        return apply(model)

    ours, plain = run(build(fully_shard)), Chunked()
    for other in range(world):
        summed = run(plain, other)                          # gradients accumulate over the ranks' batches
    for a, b in zip(ours, summed, strict=True):
        torch.testing.assert_close(a.full_tensor(), b / world)
    if torch.__version__ < "2.13":                          # torch's own could not do it yet
        return True
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(ours, run(build(torch_fully_shard)), strict=True))


def test_modules_that_share_a_unit_together_and_one_alone(ranks):
    assert all(ranks(2, _chunks))


def _outside(rank, world):
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        with pytest.raises(WorldError, match="rank 2 is not part of"):
            fully_shard(nn.Linear(2, 2), mesh=mesh)
        with pytest.raises(WorldError, match="rank 2 is not part of"):
            data_parallel(nn.Linear(2, 2), ZERO3, mesh)
    return True


def test_a_mesh_without_this_rank_is_refused(ranks):
    assert all(ranks(3, _outside))


def _clip(rank, world):
    model, reference = toy(), toy()
    data_parallel(model, ZERO3)
    loss_of(model, batch(0, 0)).backward()
    loss_of(reference, batch(0, 0)).backward()
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad)
    return True


def test_torchs_clipping_sees_the_global_norm(ranks):
    assert all(ranks(4, _clip))


def _ignored(rank, world):
    model = toy(seed=rank)
    fully_shard(model, ignored_params={model.gain})
    assert not isinstance(model.gain, DTensor)
    loss_of(model, batch(0, rank)).backward()
    grads = [torch.empty(1) for _ in range(world)]
    dist.all_gather(grads, model.gain.grad)
    return grads[0].item() != grads[1].item()              # nobody averaged it


def test_ignored_parameters_are_left_alone(ranks):
    assert all(ranks(2, _ignored))


def test_units_are_chosen_innermost_first():
    model = toy()
    assert wrap.blocks(model) == list(reversed(model.blocks))
    assert set(wrap.by_class(model, Block, nn.Embedding)) == {model.embedding, *model.blocks}
