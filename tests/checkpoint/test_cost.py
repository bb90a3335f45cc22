"""What saving and loading cost beside time: memory, and the bytes that are read. Nothing here looks at a clock."""

import gc
import sys

import pytest
import torch
from torch import nn

from fsdp_ref import checkpoint, collectives
from fsdp_ref.bench import memory
from fsdp_ref.checkpoint import files, layout
from fsdp_ref.checkpoint.verify import divide
from fsdp_ref.engine import fully_shard
from fsdp_ref.errors import CheckpointError
from tests.ranks import RankPool

from . import crashing, support

MIB = 1 << 20
SHARE = 48 * MIB               # bytes of state on each rank


def build(seed: int, size: int) -> nn.Module:
    """Weights of 4 MiB a rank, and one matrix of half the state, sharded."""
    model = nn.ParameterList([torch.full((size * 1024, 1024), float(seed)) for _ in range(6)]
                             + [torch.full((size * 1024, 6 * 1024), float(seed))])
    fully_shard(model)
    return model


@pytest.fixture(scope="module")
def ranks():
    """Fresh processes: memory that another test freed, and the system still counts as theirs, would be used instead of new."""
    pool = RankPool(2)
    yield pool
    pool.close()


def peak_of(work) -> float:
    """MiB of the peak while `work` runs, above what there was before."""
    gc.collect()
    before = memory.start(torch.device("cpu"))
    work()
    return (memory.peak(torch.device("cpu")) - before) / MIB


def measure(rank, size, root):
    small, _ = crashing.small(1, shard=True)                     # buffers and code that a first save brings
    checkpoint.save(root / "small", step=1, model=small)
    checkpoint.load(root / "small", model=small)
    model = build(1, size)
    nbytes = sum(p.to_local().numel() * 4 for p in model.parameters())
    peaks = {"save": peak_of(lambda: checkpoint.save(root, step=1, model=model)),
             "first async_save": peak_of(lambda: checkpoint.async_save(root, step=2, model=model).wait()),
             "second async_save": peak_of(lambda: checkpoint.async_save(root, step=3, model=model).wait())}
    other = build(2, size)
    peaks["load"] = peak_of(lambda: checkpoint.load(root, model=other))
    same = all(bool((p.to_local() == 1).all()) for p in other.parameters())
    return nbytes, same, peaks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sets the peak back")
def test_peak_memory(ranks, tmp_path):
    """Saving and loading take buffers of a few MiB; the first save in the background one copy of the rank's state, the next nothing."""
    for nbytes, same, peaks in ranks(2, measure, tmp_path):
        assert nbytes == SHARE and same
        assert peaks["save"] < 8 and peaks["load"] < 8 and peaks["second async_save"] < 8, peaks
        assert SHARE / MIB * 0.9 < peaks["first async_save"] < SHARE / MIB + 8, peaks


class Reads(files.Files):
    """Counts the bytes that are read from shards."""

    def __init__(self) -> None:
        self.names, self.bytes = {}, 0

    def open(self, path):
        descriptor = super().open(path)
        self.names[descriptor] = path.name
        return descriptor

    def read_into(self, descriptor, buffer, offset):
        count = super().read_into(descriptor, buffer, offset)
        self.bytes += count if self.names[descriptor].endswith(".safetensors") else 0
        return count


def read_bytes(rank, size, root, verify):
    model = build(2, size)
    with files.use(Reads()) as layer:
        report = checkpoint.load(root, model=model, verify=verify)
    return layer.bytes, report.counts["bytes"], sum(p.to_local().numel() * 4 for p in model.parameters())


def save_two(rank, size, root):
    checkpoint.save(root, step=1, model=build(1, size))


def test_each_rank_reads_its_own_bytes_and_its_share_of_the_digests(ranks, tmp_path):
    """With verification every byte is read twice by the ranks together, without it once; headers come on top."""
    ranks(2, save_two, tmp_path)
    for verify, times in ((True, 2), (False, 1)):
        for read, counted, mine in ranks(2, read_bytes, tmp_path, verify):
            assert counted == mine and 0 <= read - times * mine < 65536


def test_without_verify_only_the_bytes_of_tensors_go_unchecked(tmp_path):
    path = tmp_path / "step-00000001"
    model, optimizer = crashing.small(1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    shard, whole = path / "model-00000-of-00001.safetensors", (path / "model-00000-of-00001.safetensors").read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 0x40
    shard.write_bytes(flipped)
    fresh, _ = crashing.small(2)
    with pytest.raises(CheckpointError, match="is damaged: tensor .* does not give the digest"):
        checkpoint.load(path, model=fresh)
    assert support.model_bits(fresh) == support.model_bits(crashing.small(2)[0])
    checkpoint.load(path, model=fresh, verify=False)
    assert support.model_bits(fresh) != support.model_bits(model)              # the flipped bit, unnoticed, as documented
    for damaged, says in ((whole[:-1], "bytes instead of"), (whole[:20] + b"!" + whole[21:], "model-00000-of-00001.safetensors")):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=says):
            checkpoint.load(path, model=fresh, verify=False)
    shard.write_bytes(whole)
    state = path / layout.random_name(0)
    state.write_bytes(state.read_bytes().replace(b'"rank": 0', b'"rank": 1'))
    with pytest.raises(CheckpointError, match="rank-00000.json is damaged"):
        checkpoint.load(path, model=fresh, verify=False)


def loaded_between(rank, size, root):
    """Loading changes weights that a backward still needs; autograd says so, as for every other change in place."""
    model = nn.Linear(4, 4)
    checkpoint.save(root, step=1, model=model)
    loss = model(model(torch.ones(2, 4))).sum()
    checkpoint.load(root, model=model)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)


def test_a_load_between_forward_and_backward_is_noticed(ranks, tmp_path):
    assert "modified by an inplace operation" in ranks(1, loaded_between, tmp_path)[0]


def test_files_are_shared_out_by_size():
    assert divide({"a": 5, "b": 3, "c": 3}, 2) == [["a"], ["b", "c"]]
    assert divide({"a": 1}, 3) == [["a"], [], []]
    sizes = {str(index): (index * 37) % 101 for index in range(50)}
    for shares in (1, 2, 7):
        parts = divide(sizes, shares)
        assert sorted(sum(parts, [])) == sorted(sizes) and len(parts) == shares
        loads = [sum(sizes[name] for name in part) for part in parts]
        assert max(loads) - min(loads) <= 101


def test_a_write_that_takes_no_byte_ends(tmp_path):
    class Stuck(files.Files):
        def write_some(self, descriptor, data):
            return 0
    with files.use(Stuck()), pytest.raises(CheckpointError, match="could not save step 1: a write took no byte"):
        checkpoint.save(tmp_path, step=1, model=crashing.small(1)[0])
    assert collectives.gather_json(0) == [0] and support.names(tmp_path) == []
