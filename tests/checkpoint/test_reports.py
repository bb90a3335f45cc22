"""Faults that users of other systems reported, each as a test of its whole kind (docs/checkpoint_faults.md is the table of them)."""

import shutil

import pytest
import torch
from torch import nn

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint.manifest import Manifest
from fsdp_ref.engine import MixedPrecisionPolicy, fully_shard
from fsdp_ref.errors import CheckpointError

from . import support
from .support import Toy, adamw, everything, sharded, train

pytestmark = pytest.mark.slow


def shard(module, **options):
    fully_shard(module, **options)
    return module


def save_toy(rank, size, root, step=2):
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    path = checkpoint.save(root, step=step, model=model, optimizer=optimizer)
    return path, everything(model, optimizer)


# -- B07, B08: ties and frozen parameters -------------------------------------------------------------------------------------


def load_tied(rank, size, root):
    model = sharded(seed=1)
    optimizer = adamw(model)
    checkpoint.load(root, model=model, optimizer=optimizer)
    before = everything(model, optimizer)
    owners = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is model.embed]
    states = sum(parameter is model.embed for parameter in optimizer.state)
    train(model, optimizer, 1)
    return before, owners, states, support.bits(model.embed) == support.bits(model.head.weight)


def test_b07_a_tied_pair_is_one_tensor_with_one_state_before_and_after(ranks, tmp_path):
    path, expected = ranks(2, save_toy, tmp_path)[0]
    manifest = Manifest.read(path)
    assert manifest.aliases == {"head.weight": "embed"} and "head.weight" not in manifest.model
    assert not any(entry.parameter == "head.weight" for entry in manifest.optimizer.tensors.values())
    for before, owners, states, still in ranks(3, load_tied, tmp_path):
        assert before == expected and owners == ["embed", "head.weight"] and states == 1 and still


def frozen_steps(rank, size, root, load):
    model = sharded(seed=1 if load else 0)
    for part in (model.first.weight, model.first.bias):
        part.requires_grad_(False)
    start = support.model_bits(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    if load:
        checkpoint.load(root, model=model, optimizer=optimizer)
        return everything(model, optimizer), [p.requires_grad for p in model.parameters()]
    train(model, optimizer, 3)
    path = checkpoint.save(root, step=3, model=model, optimizer=optimizer)
    after = support.model_bits(model)
    unmoved = sorted(name for name in after if after[name] == start[name])
    return everything(model, optimizer), [p.requires_grad for p in model.parameters()], path, unmoved


def test_b08_frozen_parameters_rest_are_saved_and_have_no_state(ranks, tmp_path):
    expected, wants, path, unmoved = ranks(2, frozen_steps, tmp_path, False)[0]
    frozen = {"first.bias", "first.weight", "frozen"}
    assert frozen <= set(unmoved) and "narrow.weight" not in unmoved
    manifest = Manifest.read(path)
    assert frozen <= manifest.model.keys() and not frozen & {entry.parameter for entry in manifest.optimizer.tensors.values()}
    assert ranks(3, frozen_steps, tmp_path, True) == [(expected, wants)] * 3


# -- B09: any size on any number of ranks ---------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """Parameters of 0, 1, 2, 3, 5 and 6 rows, and empty ones that have rows."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        for shape in ((0,), (0, 3), (1,), (2, 2), (3,), (5, 3), (6,), (2, 0), (5, 0, 2), ()):
            self.register_parameter("p" + "x".join(map(str, shape)), nn.Parameter(torch.randn(shape)))

    def forward(self, _):
        return sum((parameter * parameter).sum() for parameter in self.parameters())


def sizes_run(rank, size, root, load):
    model = Sizes(1 if load else 0)
    scalar = model.p
    shard(model, ignored_params={scalar})                        # as in torch, a scalar has no rows to shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if load:
        checkpoint.load(root, model=model, optimizer=optimizer)
        return everything(model, optimizer)
    for _ in range(2):
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(root, step=2, model=model, optimizer=optimizer)
    return everything(model, optimizer)


def test_b09_any_size_from_nothing_up(ranks, tmp_path):
    expected = ranks(4, sizes_run, tmp_path, False)[0]
    for size in (1, 2, 3, 4):
        assert ranks(size, sizes_run, tmp_path, True) == [expected] * size


# -- B10: buffers ---------------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x):
        self.count += 1
        return self.norm(self.layer(x) * self.mask)


def buffers_run(rank, size, root):
    torch.manual_seed(0)
    model = Buffers()
    shard(model.layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    shard(model)
    x = torch.arange(12.0).reshape(4, 3) + rank                  # so the running statistics differ by rank
    for _ in range(3):
        model(x).sum().backward()
    kinds = {name: buffer.dtype for name, buffer in model.named_buffers()}
    with pytest.warns(UserWarning, match="hold different values of .* replicated tensors .*norm.running_mean") if rank == 0 \
            else support.no_warnings():
        path = checkpoint.save(root, step=3, model=model)
    return path, kinds, support.bits(model.norm.running_mean)


def buffers_load(rank, size, root):
    model = shard(Buffers())
    model.mask.fill_(7)
    checkpoint.load(root, model=model)
    return int(model.count), model.mask.tolist(), support.bits(model.norm.running_mean)


def test_b10_buffers_keep_type_and_value_and_differing_ones_are_told(ranks, tmp_path):
    results = ranks(2, buffers_run, tmp_path)
    path, kinds, mean = results[0]
    assert kinds["count"] == torch.int64 and kinds["norm.running_mean"] == torch.float32 and results[1][2] != mean
    manifest = Manifest.read(path)
    assert {"count", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= manifest.model.keys()
    assert "mask" not in manifest.model and manifest.model["count"].dtype == "I64"
    assert ranks(3, buffers_load, tmp_path) == [(3, [7.0] * 4, mean)] * 3        # rank 0's everywhere, never a mixture


# -- B18, B20, F13: the state of an optimizer -----------------------------------------------------------------------------------


def test_b18_optimizer_state_arrives_and_what_is_missing_or_too_much_is_told(tmp_path):
    """In a fresh optimizer, in one that has stepped; and the first update afterwards is that of the uninterrupted run."""
    model = Toy()
    optimizer = adamw(model)
    torch.manual_seed(0)
    train(model, optimizer, 2)
    path = checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    for stepped in (0, 1):
        other = Toy(seed=1)
        target = adamw(other, lr=3.0)
        train(other, target, stepped)
        report = checkpoint.load(path, model=other, optimizer=target)
        assert everything(other, target) == everything(model, optimizer)
        assert report.counts["optimizer"] == sum(len(state) for state in optimizer.state.values()) and report.counts["groups"] == 2
        torch.manual_seed(5)
        train(other, target, 1, first=2)
        straight, straight_optimizer = Toy(), None
        straight_optimizer = adamw(straight)
        checkpoint.load(path, model=straight, optimizer=straight_optimizer)
        torch.manual_seed(5)
        train(straight, straight_optimizer, 1, first=2)
        assert everything(other, target) == everything(straight, straight_optimizer)
    for change, told in ((lambda state: state.pop("exp_avg"), "the checkpoint lacks state exp_avg of first.bias, which the optimizer has"),
                         (lambda state: state.update(extra=torch.ones(7)), "the checkpoint has state extra of first.bias, which the"),
                         (lambda state: state.update(note=1), "the checkpoint has state note of first.bias")):
        broken = Toy()
        its = adamw(broken)
        train(broken, its, 1)
        change(its.state[broken.first.bias])
        root = tmp_path / told[15:40].replace(" ", "")
        checkpoint.save(root, step=1, model=broken, optimizer=its)
        other = Toy(seed=1)
        target = adamw(other)
        train(other, target, 1)
        before = everything(other, target)
        with pytest.raises(CheckpointError, match=told):
            checkpoint.load(root, model=other, optimizer=target)
        assert everything(other, target) == before


def load_and_use(rank, size, root):
    """Load, then let the unused parameter take part for the first time."""
    model = sharded(seed=1)
    optimizer = adamw(model)
    checkpoint.load(root, model=model, optimizer=optimizer)
    stateless = model.unused not in optimizer.state
    loaded = everything(model, optimizer)
    model.dropout.p = 0.0
    inner = model.forward
    model.forward = lambda tokens: inner(tokens) + model.unused.sum()
    train(model, optimizer, 1, first=2)
    return loaded, stateless, support.bits(model.unused)


def test_b20_a_parameter_without_state_has_none_afterwards_and_can_begin(ranks, tmp_path):
    _, expected = ranks(2, save_toy, tmp_path)[0]
    assert not any(name.startswith("unused ") and not name.endswith("options") for name in expected["optimizer"])
    results = [ranks(size, load_and_use, tmp_path)[0] for size in (1, 3)]
    for loaded, stateless, unused in results:
        assert loaded == expected and stateless
        assert unused != expected["model"]["unused"] and unused == results[0][2]


def test_f13_no_dummy_step_is_taken(tmp_path):
    """torch's get_optimizer_state_dict steps a fresh optimizer once; here a fresh one is saved as fresh, and loads as fresh."""
    model = Toy()
    optimizer = adamw(model)
    before = everything(model, optimizer)
    fresh = checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer)
    assert not optimizer.state and everything(model, optimizer) == before
    train(model, optimizer, 2)
    checkpoint.load(fresh, model=model, optimizer=optimizer)
    assert not optimizer.state and everything(model, optimizer) == before
    train(model, optimizer, 2)
    second = checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    other = Toy(seed=1)
    target = adamw(other)
    checkpoint.load(second, model=other, optimizer=target)
    assert {float(state["step"]) for state in target.state.values()} == {2.0}


# -- F1, F4, F6: what a directory may be a mixture of ---------------------------------------------------------------------------


def save_over(rank, size, root):
    try:
        save_toy(rank, size, root)
    except CheckpointError as error:
        return str(error)
    return ""


def test_f1_an_existing_step_is_never_written_into(ranks, tmp_path):
    path, _ = ranks(3, save_toy, tmp_path)[0]
    before = support.contents(path)
    told = ranks(2, save_over, tmp_path)
    assert told[0] == told[1] and "exists already and is never written into" in told[0]
    assert support.contents(path) == before and support.names(tmp_path) == ["latest", path.name]


def test_f4_a_missing_first_middle_or_last_shard_and_a_stale_one(ranks, tmp_path):
    path, _ = ranks(3, save_toy, tmp_path / "three")[0]
    other, _ = ranks(2, save_toy, tmp_path / "two")[0]
    model = Toy(seed=1)
    optimizer = adamw(model)
    before = everything(model, optimizer)
    for kind in ("model", "optimizer"):
        for rank in range(3):
            name = f"{kind}-{rank:05d}-of-00003.safetensors"
            data = (path / name).read_bytes()
            (path / name).unlink()
            with pytest.raises(CheckpointError, match=f"{name} is missing"):
                checkpoint.load(path, model=model, optimizer=optimizer)
            (path / name).write_bytes(data)
        stale = f"{kind}-00001-of-00002.safetensors"
        shutil.copy(other / stale, path / stale)
        with pytest.raises(CheckpointError, match=f"{stale} does not belong to this checkpoint"):
            checkpoint.load(path, model=model, optimizer=optimizer)
        (path / stale).unlink()
    assert everything(model, optimizer) == before
    checkpoint.load(path, model=model, optimizer=optimizer)


def own_draws(rank, size, root):
    torch.manual_seed(100 + rank)
    model = sharded()
    checkpoint.save(root, step=1, model=model)
    expected = support.draws()
    torch.manual_seed(0)
    checkpoint.load(root, model=model)
    return expected == support.draws(), expected[4]


def test_f6_what_differs_by_rank_comes_back_to_its_rank(ranks, tmp_path):
    results = ranks(3, own_draws, tmp_path)
    assert all(same for same, _ in results) and len({drawn for _, drawn in results}) == 3
