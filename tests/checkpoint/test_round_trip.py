"""What is saved comes back bit for bit, on any number of ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import safetensors_file
from fsdp_ref.engine import data_parallel
from fsdp_ref.placements import LADDER

from . import support
from .support import Toy, adamw, everything, sharded, train

SIZES = (1, 2, 3, 4)


def build(seed, kind):
    """The toy on one rung of the ladder, or untouched ("plain")."""
    if kind == "plain":
        return Toy(seed)
    return sharded(seed) if kind == "ZeRO-3" else data_parallel(Toy(seed), {row.name: row for row in LADDER}[kind])


def save_trained(rank, size, root, kind="ZeRO-3"):
    model = build(0, kind)
    optimizer = adamw(model)
    torch.manual_seed(0)                                         # replicas stay equal through dropout
    train(model, optimizer, 2)
    state = everything(model, optimizer)
    checkpoint.save(root, step=2, model=model, optimizer=optimizer)
    return state


def load_fresh(rank, size, root, kind="ZeRO-3", stepped=False):
    model = build(1, kind)
    optimizer = adamw(model, lr=7.0)
    if stepped:
        train(model, optimizer, 1)
    report = checkpoint.load(root, model=model, optimizer=optimizer)
    return everything(model, optimizer), report, model.head.weight is model.embed


@pytest.mark.parametrize("saved_by", SIZES)
def test_b23_any_world_size_to_any_other(ranks, tmp_path, saved_by):
    expected = ranks(saved_by, save_trained, tmp_path)[0]
    for loaded_by in SIZES:
        for state, report, tied in ranks(loaded_by, load_fresh, tmp_path):
            assert state == expected
            assert tied
            assert (report.step, report.saved_world_size, report.world_size) == (2, saved_by, loaded_by)
            assert report.resharded == (saved_by != loaded_by)
            assert report.random_state == ("exact" if saved_by == loaded_by else "derived")
            assert report.counts["model"] == len(expected["model"]) - 1              # the tied pair is one


@pytest.mark.parametrize("kind", ("plain", "DDP"))
def test_replicated_to_sharded_and_back(ranks, tmp_path, kind):
    expected = ranks(2, save_trained, tmp_path / "replicated", kind)[0]
    assert ranks(3, load_fresh, tmp_path / "replicated")[2][0] == expected
    expected = ranks(3, save_trained, tmp_path / "sharded")[0]
    assert ranks(2, load_fresh, tmp_path / "sharded", kind)[1][0] == expected


def test_a_replicated_model_is_written_by_all_ranks(ranks, tmp_path):
    ranks(2, save_trained, tmp_path, "plain")
    held = [safetensors_file.read_header(tmp_path / "step-00000002" / f"model-{rank:05d}-of-00002.safetensors").entries for rank in (0, 1)]
    assert held[0]["embed"].shape == (3, 6) and held[1]["embed"].shape == (2, 6)
    assert "narrow.bias" in held[0] and "narrow.bias" not in held[1]


def test_an_optimizer_that_has_state_already(ranks, tmp_path):
    expected = ranks(2, save_trained, tmp_path)[0]
    assert ranks(2, load_fresh, tmp_path, stepped=True)[0][0] == expected


def test_absent_state_stays_absent(tmp_path):
    """A parameter without state in the checkpoint has none afterwards, even if it had."""
    model = Toy()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = Toy(seed=1)
    target = adamw(other)
    (other.unused.sum() + other.embed.sum()).backward()
    target.step()
    assert target.state[other.unused]
    checkpoint.load(tmp_path, model=other, optimizer=target)
    assert other.unused not in target.state
    assert everything(other, target) == everything(model, optimizer)


class Zoo(nn.Module):
    """Every type and every odd shape, as buffers (they need no gradient)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pattern = np.random.RandomState(seed)
        for name, dtype in safetensors_file.DTYPES.items():
            for shape in ((), (0,), (0, 3), (1,), (3, 0), (5, 3), (2, 3, 4)):
                count = int(np.prod(shape)) * dtype.itemsize
                raw = pattern.randint(0, 2 if dtype is torch.bool else 256, count).astype(np.uint8)
                tensor = torch.empty(shape, dtype=dtype)
                if count:
                    tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
                self.register_buffer(f"{name}_{'x'.join(map(str, shape)) or 'scalar'}", tensor)
        special = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, 0x7F800000], dtype=torch.int32).view(torch.float32)
        self.register_buffer("special", special)                 # NaN payloads, a signalling NaN, -0.0, a denormal, infinity
        self.register_buffer("sliced", torch.arange(24.0).reshape(4, 6)[:, ::2])
        self.register_buffer("turned", torch.arange(6).reshape(2, 3).t())


def zoo_save(rank, size, root):
    checkpoint.save(root, step=0, model=Zoo(0))
    return support.model_bits(Zoo(0))


def zoo_load(rank, size, root):
    model = Zoo(1)
    checkpoint.load(root, model=model)
    return support.model_bits(model)


@pytest.mark.parametrize("size", (1, 3))
def test_types_shapes_and_odd_bits(ranks, tmp_path, size):
    expected = ranks(size, zoo_save, tmp_path)[0]
    for state in ranks(2, zoo_load, tmp_path):
        assert state.keys() == expected.keys()
        assert [name for name in state if state[name] != expected[name]] == []


def test_pieces_larger_than_the_buffer(tmp_path, monkeypatch):
    """Small pieces take the paths that large tensors take: rows split, long rows split, columns gathered from rows."""
    monkeypatch.setattr("fsdp_ref.checkpoint.files.PIECE", 64)
    monkeypatch.setattr(safetensors_file.byte_pieces, "__defaults__", (64,))
    model = nn.Module()
    model.register_buffer("wide", torch.arange(600.0).reshape(2, 300))
    model.register_buffer("strided", torch.arange(600.0).reshape(300, 2).t())
    model.register_buffer("flat", torch.arange(100))
    checkpoint.save(tmp_path, step=0, model=model)
    expected = support.model_bits(model)
    for buffer in model.buffers():
        buffer.zero_()
    checkpoint.load(tmp_path, model=model)
    assert support.model_bits(model) == expected


def columns(rank, size, root, saving):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (size,)) if size != 4 else init_device_mesh("cpu", (2, 2))
    placements = [Shard(1)] if size != 4 else [Replicate(), Shard(0)]
    model = nn.Module()
    value = torch.arange(35.0).reshape(5, 7) if saving else torch.zeros(5, 7)
    model.weight = nn.Parameter(distribute_tensor(value, mesh, placements))
    if saving:
        checkpoint.save(root, step=0, model=model)
    else:
        checkpoint.load(root, model=model)
    return support.bits(model.weight)


@pytest.mark.parametrize(("saved_by", "loaded_by"), ((3, 2), (4, 3), (2, 4)))
def test_columns_and_replicated_shards(ranks, tmp_path, saved_by, loaded_by):
    """Shard(1) on 2 or 3 ranks, and a 2 x 2 mesh with two replicas of each shard."""
    ranks(saved_by, columns, tmp_path, True)
    assert set(ranks(loaded_by, columns, tmp_path, False)) == {support.bits(torch.arange(35.0).reshape(5, 7))}


def save_twice(rank, size, root):
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    before = support.random_states()
    first = checkpoint.save(root / "a", step=7, model=model, optimizer=optimizer, extra={"note": [1, (2.5, None)]})
    second = checkpoint.save(root / "b", step=7, model=model, optimizer=optimizer, extra={"note": [1, (2.5, None)]})
    return first, second, before == support.random_states()


def test_f11_the_same_state_gives_the_same_bytes_and_draws_nothing(ranks, tmp_path):
    for first, second, untouched in ranks(2, save_twice, tmp_path):
        assert support.contents(first) == support.contents(second)
        assert untouched
    assert {path.stat().st_mode & 0o777 for path in first.iterdir()} == {0o644}


def differing_buffers(rank, size, root, saving):
    model = sharded()
    if saving:
        model.scale.fill_(float(rank))
        checkpoint.save(root, step=1, model=model)
    else:
        checkpoint.load(root, model=model)
    return model.scale.tolist()


def test_ranks_that_differ_are_not_mixed(ranks, tmp_path):
    ranks(3, differing_buffers, tmp_path, True)
    assert ranks(3, differing_buffers, tmp_path, False) == [[0.0, 0.0, 0.0]] * 3


def torch_sharded(rank, size, root):
    from torch.distributed.fsdp import fully_shard
    model = Toy()
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    checkpoint.save(root, step=2, model=model, optimizer=optimizer)
    return everything(model, optimizer)


def test_torch_fully_shard_is_saved_alike(ranks, tmp_path):
    expected = ranks(2, torch_sharded, tmp_path)[0]
    assert ranks(3, load_fresh, tmp_path)[0][0] == expected
