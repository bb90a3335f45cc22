"""Whatever a model holds comes back bit for bit, from any of 1 to 8 ranks to any other: examples drawn by hypothesis.

The ranks are threads (see threads.py); tests/checkpoint/test_round_trip.py has the same over real processes, for 1 to 4.
"""

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint.layout import Box
from fsdp_ref.checkpoint.safetensors_file import DTYPES

from . import support
from .support import Schedule
from .threads import World

KINDS = ("parameter", "frozen", "buffer")
FILLS = ("random", "ones", "sign", "zero")
POISON = 0xA5

shapes = st.lists(st.sampled_from((0, 1, 1, 2, 3, 5, 8, 9)), max_size=3).map(tuple)
tensors = st.tuples(st.sampled_from(sorted(DTYPES)), shapes, st.sampled_from(KINDS), st.sampled_from(FILLS), st.booleans(), st.booleans())
worlds = st.tuples(st.integers(1, 8), st.sampled_from((None, 0, 0, 1, -1)))


def filled(dtype: str, shape: tuple[int, ...], fill: str, dice: np.random.RandomState) -> torch.Tensor:
    """A tensor of any bits: random ones, NaNs of all payloads ("ones": 0xFF everywhere), -0.0 ("sign")."""
    kind, count = DTYPES[dtype], int(np.prod(shape))
    raw = {"random": lambda: dice.randint(0, 256, count * kind.itemsize), "ones": lambda: np.full(count * kind.itemsize, 255),
           "sign": lambda: np.tile(([0] * (kind.itemsize - 1) + [128]), count), "zero": lambda: np.zeros(count * kind.itemsize)}[fill]()
    if kind is torch.bool:
        raw = raw % 2
    raw = torch.from_numpy(raw.astype(np.uint8))
    return raw.view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)


def build(recipe, seed: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer's state after a recipe. `seed=None`: what is to be filled, poisoned and without optimizer state."""
    dice, model, names = np.random.RandomState(seed or 0), nn.Module(), []
    for number, (dtype, shape, kind, fill, tied, _) in enumerate(recipe):
        tensor = filled(dtype, shape, fill, dice)
        if seed is None:
            poison(tensor)
        if kind == "buffer":
            model.register_buffer(f"t{number}", tensor)
            continue
        differentiable = kind == "parameter" and tensor.dtype.is_floating_point
        model.register_parameter(f"t{number}", nn.Parameter(tensor, requires_grad=differentiable))
        names.append(f"t{number}")
        if tied:
            model.register_parameter(f"u{number}", model.get_parameter(f"t{number}"))
    parameters = [model.get_parameter(name) for name in names if model.get_parameter(name).requires_grad]
    if not parameters:
        return model, None
    half = max(1, len(parameters) // 2)
    groups = [{"params": part, "lr": 0.1 * len(part)} for part in (parameters[:half], parameters[half:]) if part]
    optimizer = torch.optim.AdamW(groups)
    if seed is not None:
        for name, (*_, has_state) in zip([f"t{i}" for i in range(len(recipe))], recipe, strict=True):
            parameter = dict(model.named_parameters()).get(name)
            if has_state and parameter is not None and parameter.requires_grad:
                optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": filled("F32", tuple(parameter.shape), "random", dice),
                                              "exp_avg_sq": filled("BF16", tuple(parameter.shape), "random", dice), "note": "x"}
    return model, optimizer


def poison(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(POISON if tensor.dtype != torch.bool else 1)


def all_tensors(model, optimizer):
    """Name -> tensor, of model and optimizer; and the optimizer's other values."""
    held = dict(model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {}
    for parameter, state in (optimizer.state if optimizer else {}).items():
        for key, value in state.items():
            (held if isinstance(value, torch.Tensor) else values)[f"{names[id(parameter)]}.{key}"] = value
    return held, values


def box_in(shape, world: World, rank: int) -> Box:
    box = Box.whole(tuple(shape))
    return box if world.dimension is None or not shape else box.cut(world.dimension % len(shape), world.size, rank)


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def check_round_trip(recipe, seed, saved_by, loaded_by, root):
    """Save in one world, load in the other into poisoned memory; compare each rank's box, and that nothing else was written."""
    first, second = World(*saved_by), World(*loaded_by)
    truth = build(recipe, seed)
    step_dir = first.run(lambda rank: checkpoint.save(root, step=5, model=truth[0], optimizer=truth[1], loader=Schedule(at=7)))[0]
    checkpoint.verify(step_dir)
    held, values = all_tensors(*truth)

    def load(rank):
        model, optimizer = build(recipe, None)
        loader = Schedule()
        report = checkpoint.load(step_dir, model=model, optimizer=optimizer, loader=loader)
        assert loader.state == {"at": 7} and report.resharded == (first.size != second.size)
        return model, optimizer

    for rank, target in enumerate(second.run(load)):
        got, got_values = all_tensors(*target)
        assert got.keys() == held.keys() and got_values == values
        for name, tensor in got.items():
            box = box_in(tensor.shape, second, rank)
            assert support.bits(narrowed(tensor, box)) == support.bits(narrowed(held[name], box)), (name, rank)
            if name in dict(target[0].state_dict()) and tensor.numel():            # moments are made anew, and lie about nothing outside
                rest = tensor.clone()
                poison(narrowed_copy := narrowed(rest, box).clone())
                narrowed(rest, box).copy_(narrowed_copy)
                untouched = tensor.new_empty(tensor.shape)
                poison(untouched)
                assert support.bits(rest) == support.bits(untouched), (name, rank)
        for name in held:
            if name.startswith("u"):
                assert target[0].get_parameter(name) is target[0].get_parameter(f"t{name[1:]}")


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(tensors, max_size=6), st.integers(0, 2**32 - 1), worlds, worlds)
def test_anything_comes_back_on_any_number_of_ranks(recipe, seed, saved_by, loaded_by):
    root = Path(tempfile.mkdtemp())
    try:
        check_round_trip(recipe, seed, saved_by, loaded_by, root)
    finally:
        shutil.rmtree(root)


EVERYTHING = [(dtype, shape, KINDS[index % 3], FILLS[index % 4], index % 5 == 0, index % 2 == 0)
              for index, (dtype, shape) in enumerate(itertools.product(sorted(DTYPES), ((), (0,), (1,), (5, 3), (9,), (3, 0, 2))))]


@pytest.mark.slow
def test_b23_all_pairs_of_one_to_eight_ranks(tmp_path):
    """64 pairs: every type and shape, uneven and empty shards; the dimension that is cut changes too."""
    for saved_by, loaded_by in itertools.product(range(1, 9), repeat=2):
        few = EVERYTHING[(saved_by + loaded_by) % 7::7]
        root = tmp_path / f"{saved_by}-{loaded_by}"
        check_round_trip(few, saved_by, (saved_by, (0, 1, None)[saved_by % 3]), (loaded_by, (0, -1)[loaded_by % 2]), root)
        shutil.rmtree(root)


@pytest.mark.slow
def test_every_type_and_shape_at_once(tmp_path):
    check_round_trip(EVERYTHING, 1, (3, 0), (8, 1), tmp_path)
