"""Options of fully_shard: a smaller group that keeps weights, other dims, host memory, unused parameters, limits on what is in flight."""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ref import collectives, ledger
from fsdp_ref.engine import CPUOffloadPolicy, data_parallel, fully_shard
from fsdp_ref.ledger import Category, Lane
from fsdp_ref.placements import ZERO3
from tests.engine.toys import batch, loss_of, toy, train

EVEN = dict(vocab=24, dim=8, hidden=16, layers=3)


def sharded(apply=fully_shard, **options):
    model = toy(**options.pop("sizes", {}))
    for block in model.blocks:
        apply(block, **options)
    return apply(model, **options)


def _same_as_torch(rank, world, options, sizes):
    """Losses and shards of three AdamW steps, bit for bit. gloo's own sums, so that more than two ranks agree too."""
    with collectives.route("library"):
        if options.pop("hsdp", False):
            options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        models = [sharded(apply, **options, sizes=sizes) for apply in (fully_shard, torch_fully_shard)]
        losses = [train(model, rank) for model in models]
    for (name, ours), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        assert ours.placements == theirs.placements and ours.device_mesh == theirs.device_mesh, name
        assert torch.equal(ours.to_local(), theirs.to_local()) and ours.to_local().stride() == theirs.to_local().stride(), name
    return losses[0] == losses[1]


def widest(param):
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def last_of_matrices(param):
    return Shard(-1) if param.ndim == 2 and param.shape[-1] % 4 == 0 else None


@pytest.mark.parametrize("options, sizes", [
    (dict(reshard_after_forward=2), {}), (dict(reshard_after_forward=2), EVEN), (dict(hsdp=True), {}), (dict(hsdp=True), EVEN),
    (dict(hsdp=True, reshard_after_forward=False), {}), (dict(shard_placement_fn=last_of_matrices), EVEN),
    (dict(shard_placement_fn=last_of_matrices, hsdp=True), EVEN),
], ids=["kept on 2", "kept on 2, even", "hybrid", "hybrid, even", "hybrid, whole", "columns", "columns, hybrid"])
def test_bits_equal_torch_on_four_ranks(ranks, options, sizes):
    assert all(ranks(4, _same_as_torch, dict(options), sizes))


@pytest.mark.parametrize("options, sizes", [(dict(shard_placement_fn=widest), EVEN), (dict(offload_policy=CPUOffloadPolicy()), {})],
                         ids=["widest dim", "offload"])
def test_bits_equal_torch_on_two_ranks(ranks, options, sizes):
    if "offload_policy" in options:
        assert all(ranks(2, _offload_changes_nothing))
    else:
        assert all(ranks(2, _same_as_torch, dict(options), sizes))


def _offload_changes_nothing(rank, world):
    plain, offloaded = sharded(), sharded(offload_policy=CPUOffloadPolicy())
    assert train(plain, rank) == train(offloaded, rank)
    return all(p.device.type == p.grad.device.type == "cpu" for p in offloaded.parameters())


def _kept(rank, world):
    model = sharded(reshard_after_forward=2, sizes=EVEN)
    with ledger.record() as book:
        loss = loss_of(model, batch(0, rank, vocab=24))
        weight = model.blocks[0].up.weight
        between = ledger.live_bytes(Category.UNSHARDED_PARAM)
        loss.backward()
    assert isinstance(weight, DTensor) and weight.device_mesh.ndim == 1            # the user sees the shard, as at rest
    assert torch.equal(weight.full_tensor(), toy(**EVEN).blocks[0].up.weight)
    gathers = [event for event in book.events if event.lane == Lane.ALL_GATHER]
    sizes = {phase: {event.group_size for event in gathers if event.phase == phase} for phase in ("forward", "backward")}
    total = 4 * sum(p.numel() for p in model.parameters())
    return sizes, between, total, all(isinstance(p, DTensor) and p.device_mesh.ndim == 1 for p in model.parameters())


def test_weights_kept_on_two_neighbours_are_gathered_from_there(ranks):
    """Between forward and backward half of every weight is alive on each rank, and backward's gathers stay inside pairs of ranks."""
    for sizes, between, total, back in ranks(4, _kept):
        assert sizes == {"forward": {4}, "backward": {2}} and back
        assert between == pytest.approx(total / 2, abs=64)


def _toggled(rank, world):
    """state_dict, set_reshard_after_forward and a second forward, all while a part is kept."""
    model = sharded(reshard_after_forward=2, sizes=EVEN)
    loss = loss_of(model, batch(0, rank, vocab=24))
    state = model.state_dict()
    assert all(value.device_mesh.ndim == 1 for value in state.values())
    loss.backward()
    model.set_reshard_after_forward(False)
    loss_of(model, batch(0, rank, vocab=24))
    return isinstance(model.blocks[0].up.weight, DTensor)


def test_a_kept_part_is_dropped_for_a_state_dict_and_by_the_setter(ranks):
    assert not any(ranks(4, _toggled))


def _refusals(rank, world):
    for value in (3, 0, 8):
        with pytest.raises(ValueError, match="factor of 4"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=value)
    with pytest.raises(ValueError, match="bool or an int"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward="yes")
    with pytest.warns(UserWarning, match="world size 1"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=1)
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        fully_shard(nn.Linear(5, 4, bias=False), shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(AssertionError, match="Shard dim 2 is invalid"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(2))
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: 1)
    with pytest.raises(AssertionError, match="mesh_dim_names"):
        fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match="is a DTensor already"):
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), init_device_mesh("cpu", (world,)), [Shard(0)]))
        fully_shard(layer)
    return True


def test_refusals(ranks):
    assert all(ranks(4, _refusals))


class Fork(nn.Module):
    """Each rank may use another head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, used):
        return self.heads[used](self.trunk(x))


def _unused(rank, world):
    model = fully_shard(Fork())
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(2, 4), rank).sum().backward()
    reference = Fork()
    torch.stack([reference(torch.ones(2, 4), r).sum() for r in range(world)]).mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
    return True


def test_parameters_that_only_some_ranks_used_are_reduced_with_zeros(ranks):
    assert all(ranks(2, _unused))


def _limit(rank, world, limit):
    model = toy(layers=6)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.set_max_gathers_in_flight(limit)
    with ledger.record() as book:
        loss_of(model, batch(0, rank))
    buffers = [(a.start, a.end) for a in book.allocations if a.category == Category.ALL_GATHER]
    return max(sum(start <= moment < end for start, end in buffers) for moment, _ in buffers)


def test_a_limit_on_gathers_in_flight(ranks):
    assert ranks(2, _limit, None)[0] == 6 and ranks(2, _limit, 2)[0] == 2


def _bad_limits(rank, world):
    model = fully_shard(nn.Linear(2, 2))
    for value, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        for setter in (model.set_max_gathers_in_flight, model.set_reduce_scatter_max_input_buffers):
            with pytest.raises(error):
                setter(value)
    return True


def test_limits_that_make_no_sense(ranks):
    assert all(ranks(2, _bad_limits))


def _ahead(rank, world, prefetch):
    model = data_parallel(toy(), ZERO3, prefetch=prefetch)
    orders = []
    for step in range(2):
        with ledger.record() as book:
            loss_of(model, batch(step, rank)).backward()
        moments = [(e.start, f"U{e.unit.rsplit('.', 1)[-1]}") for e in book.events if e.lane == Lane.ALL_GATHER and e.phase == "forward"]
        moments += [(e.start, f"C{e.unit.rsplit('.', 1)[-1]}") for e in book.events if e.lane == Lane.COMPUTE and e.phase == "forward"]
        orders.append(" ".join(name for _, name in sorted(moments) if name != "C(root)"))
    return orders


@pytest.mark.parametrize("prefetch, order", [
    (0, "U(root) U0 C0 U1 C1 U2 C2"), (1, "U(root) U0 U1 C0 U2 C1 C2"), (2, "U(root) U0 U1 U2 C0 C1 C2")])
def test_data_parallel_gathers_ahead_once_it_knows_the_order(ranks, prefetch, order):
    """The first forward shows the order, the later ones use it. (C: compute of a unit begins, which is when its weights are there.)"""
    first, second = ranks(2, _ahead, prefetch)[0]
    assert first == "U(root) U0 C0 U1 C1 U2 C2"
    assert second == order


def _mistaken(rank, world):
    """A forward that goes another way than the last one leaves no gather behind, and no old weights."""
    model = data_parallel(toy(), ZERO3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(0, rank)).backward()
    full = list(model.blocks)
    model.blocks = nn.ModuleList([full[0], full[2]])
    with torch.no_grad():
        loss_of(model, batch(0, rank))                      # gathers block 1 ahead and never runs it
    optimizer.step()
    model.blocks = nn.ModuleList(full)
    loss = loss_of(model, batch(1, 0)).item()
    reference = toy()
    torch.stack([loss_of(reference, batch(0, r)) for r in range(world)]).mean().backward()
    with torch.no_grad():
        for param in reference.parameters():
            param.sub_(param.grad, alpha=0.1)
        return loss == pytest.approx(loss_of(reference, batch(1, 0)).item(), rel=1e-6)


def test_a_gather_made_for_nothing_is_undone_before_weights_change(ranks):
    assert all(ranks(2, _mistaken))


class Watch(TorchDispatchMode):
    """Counts torch's own collectives by name, as CommDebugMode does (which keeps the models it has seen alive)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def _watched(rank, world):
    model = sharded()
    with Watch() as watch:
        loss_of(model, batch(0, rank)).backward()
    return dict(watch.seen)


def test_who_counts_torchs_collectives_finds_them(ranks):
    """Root and 3 blocks; backward gathers the blocks again."""
    assert ranks(2, _watched)[0] == {"_allgather_base_": 4 + 3, "_reduce_scatter_base_": 4}


def _patched(rank, world):
    """So do tests that put a function of their own in the place of torch's."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    original, seen = getattr(dist, name), []

    def counting(output, source, **kwargs):
        seen.append(source.numel())
        return original(output, source, **kwargs)

    model = sharded()
    with contextlib.ExitStack() as stack:
        setattr(dist, name, counting)
        stack.callback(setattr, dist, name, original)
        loss_of(model, batch(0, rank)).backward()
    return len(seen)


def test_a_replaced_collective_is_called(ranks):
    assert ranks(2, _patched) == [4, 4]
