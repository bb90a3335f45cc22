"""A checkpoint that does not fit is refused with the name of what does not, on every rank, before a bit changes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import jsontext
from fsdp_ref.checkpoint.layout import Box, check_cover
from fsdp_ref.errors import CheckpointError

from . import support
from .support import Schedule, Toy, adamw, everything, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    model = Toy()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    checkpoint.save(root, step=1, model=model, optimizer=optimizer, loader=Schedule(epoch=0), scheduler=Schedule(last=1))
    return root


def without(model):
    del model.unused
    return model


def more(model):
    model.extra = nn.Linear(2, 2)
    return model


def reshaped(model):
    model.unused = nn.Parameter(torch.zeros(2, 3))
    return model


def untied(model):
    model.head.weight = nn.Parameter(model.embed.detach().clone())
    return model


def one_group(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def other_groups(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


def wide_moments(model):
    optimizer = adamw(model)
    train(model, optimizer, 1)
    optimizer.state[model.embed]["exp_avg"] = optimizer.state[model.embed]["exp_avg"].double()
    return optimizer


def more_moments(model):
    optimizer = adamw(model)
    train(model, optimizer, 1)
    optimizer.state[model.embed]["max_exp_avg_sq"] = torch.zeros(5, 6)
    return optimizer


def strangers(model):
    return torch.optim.AdamW(Toy().parameters())


MISFITS = {
    "missing": (without, None, "the checkpoint has 1 tensors that the model lacks: unused; "),
    "unexpected": (more, None, "the checkpoint lacks 2 tensors of the model: extra.bias, extra.weight; "),
    "shape": (reshaped, None, r"unused has the shape \[3, 2\] in the checkpoint and \[2, 3\] in memory"),
    "type": (lambda model: model.double(), None, "has the type F32 in the checkpoint and F64 in memory"),
    "untied": (untied, None, "head.weight and embed are one tensor in the checkpoint and two in the model"),
    "meta": (lambda model: model.to("meta"), None, "is on the meta device"),
    "number of groups": (None, one_group, "has 2 parameter groups and the optimizer has 1"),
    "groups": (None, other_groups, "group 0 of the optimizer .* has no counterpart"),
    "class": (None, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), "holds the state of AdamW and the optimizer is SGD"),
    "type of a moment": (None, wide_moments, "optimizer state exp_avg of embed has the type F32 in the checkpoint and F64 in memory"),
    "a moment is missing": (None, more_moments, "the checkpoint lacks state max_exp_avg_sq of embed, which the optimizer has"),
    "parameters of another model": (None, strangers, "parameter number 0 in group 0 of the optimizer is not one of the model's"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits(saved, case):
    change, optimizer_of, match = MISFITS[case]
    model = Toy(seed=1)
    optimizer = (optimizer_of or adamw)(model)
    if change:
        model = change(model)
        optimizer = None
    loader, scheduler = Schedule(epoch=5), Schedule(last=9)

    def state():
        """Everything that a load could change: weights, buffers, moments, options of groups, companions, random state."""
        tensors = None if case == "meta" else support.model_bits(model)
        ours = optimizer is not None and case != "parameters of another model"
        moments = support.optimizer_bits(model, optimizer) if ours else None
        return tensors, moments, loader.state, scheduler.state, support.random_states()
    before = state()
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(saved, model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
    assert state() == before


def test_tied_in_memory_only(tmp_path):
    model = untied(Toy())
    path = checkpoint.save(tmp_path, step=1, model=model)
    assert '"aliases": {}' in (path / "manifest.json").read_text()                   # equal values are not one tensor
    with pytest.raises(CheckpointError, match="shares a tensor in the model and stands alone in the checkpoint"):
        checkpoint.load(tmp_path, model=Toy())
    other = untied(Toy(seed=1))
    checkpoint.load(tmp_path, model=other)
    assert support.model_bits(other) == support.model_bits(model) and other.head.weight is not other.embed


def test_what_was_not_saved_is_asked_for(tmp_path):
    checkpoint.save(tmp_path, step=1, model=Toy())
    for name, value in (("optimizer", adamw), ("scheduler", lambda _: Schedule()), ("loader", lambda _: Schedule())):
        model = Toy(seed=1)
        with pytest.raises(CheckpointError, match=f"the checkpoint has no {name} state"):
            checkpoint.load(tmp_path, model=model, **{name: value(model)})


def test_a_companion_that_refuses(tmp_path):
    """Whoever was changed before is put back, and the tensors were not touched."""
    model = Toy()
    checkpoint.save(tmp_path, step=1, model=model, scheduler=Schedule(last=1), loader=Schedule(refuse=True))
    target, scheduler = Toy(seed=1), Schedule(last=0)
    before = support.model_bits(target)
    with pytest.raises(CheckpointError, match="the loader refused its state .ValueError: this position does not exist"):
        checkpoint.load(tmp_path, model=target, scheduler=scheduler, loader=Schedule())
    assert support.model_bits(target) == before and scheduler.state == {"last": 0}


def test_options_come_back_exactly(tmp_path):
    """Learning rates of each group, tuples as tuples, and a learning rate that is a tensor keeps its storage."""
    model = Toy()
    groups = [{"params": [model.embed], "lr": torch.tensor(0.1 + 0.2)}, {"params": [model.unused], "betas": (0.5, 0.25)}]
    optimizer = torch.optim.Adam(groups, lr=1 / 3)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = Toy(seed=1)
    target = torch.optim.Adam([{"params": [other.unused]}, {"params": [other.embed], "lr": torch.tensor(9.0)}], lr=9.0)     # another order
    place = target.param_groups[1]["lr"].data_ptr()
    checkpoint.load(tmp_path, model=other, optimizer=target)
    assert target.param_groups[0]["betas"] == (0.5, 0.25) and target.param_groups[0]["lr"] == 1 / 3
    assert target.param_groups[1]["lr"].data_ptr() == place
    assert support.bits(target.param_groups[1]["lr"]) == support.bits(torch.tensor(0.1 + 0.2))
    assert everything(other, target) == everything(model, optimizer)


def disagree(rank, size, root, what):
    model = support.sharded()
    arguments = {"step": 1, "extra": 0, "scheduler": Schedule(a=1), "loader": Schedule(b=1), "keep_last": 3}
    if rank == 1:
        arguments |= {"step": {"step": 2}, "extra": {"extra": 1}, "scheduler": {"scheduler": Schedule(a=2)}, "loader": {"loader": None},
                      "model": {}, "broken": {"extra": lambda: 0}}[what]
        if what == "model":
            model.register_buffer("mine", torch.zeros(1))
    try:
        checkpoint.save(root, model=model, **arguments)
    except CheckpointError as error:
        return str(error), support.names(root)
    return "", []


@pytest.mark.parametrize(("what", "match"), (
    ("step", "rank 1 and rank 0 disagree about the step"), ("extra", "rank 1 and rank 0 disagree about extra"),
    ("scheduler", "disagree about the scheduler state"), ("loader", "disagree about the loader state"),
    ("model", "disagree about the names, shapes and types of the model"), ("broken", "rank 1 could not save step 1: extra is a function")))
def test_ranks_that_disagree(ranks, tmp_path, what, match):
    told = ranks(2, disagree, tmp_path, what)
    assert told[0] == told[1] and match in told[0][0] and told[0][1] == []


@pytest.mark.parametrize(("change", "match"), (
    (lambda m: m.register_buffer("odd", torch.zeros(2, dtype=torch.complex128)), "odd has the type torch.complex128"),
    (lambda m: m.register_buffer("odd", torch.eye(2).to_sparse()), "odd is sparse"),
    (lambda m: m.register_buffer("odd", torch.ones(2, dtype=torch.complex64).conj()), "odd is a conjugated"),
    (lambda m: m.register_buffer("__metadata__", torch.ones(2)), "cannot be called __metadata__")))
def test_what_cannot_be_saved(tmp_path, change, match):
    model = Toy()
    change(model)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.save(tmp_path, step=1, model=model)
    assert support.names(tmp_path) == []


def test_a_step_that_is_none(tmp_path):
    for step in (-1, 1.0, True, None, 10**18):
        with pytest.raises(CheckpointError, match="give a whole number from 0"):
            checkpoint.save(tmp_path, step=step, model=Toy())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12)


@settings(max_examples=200, deadline=None)
@given(values)
def test_values_come_back_as_they_were(value):
    import json
    text = jsontext.dump(jsontext.encode(value, "it"))
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    if "\\ud" in repr(value):
        return                                                   # half a surrogate pair has no UTF-8; a save says so
    back = jsontext.decode(jsontext.parse(text.encode(), "it"))
    assert repr(_sorted(back)) == repr(_sorted(value))           # repr tells -0.0 from 0.0, True from 1, a tuple from a list


def _sorted(value):
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=repr)}
    return type(value)(map(_sorted, value)) if isinstance(value, (list, tuple)) else value


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 5), st.data())
def test_cutting_covers_once(shape, parts, data):
    """Boxes cut as torch.chunk cuts cover the tensor; one left out or doubled is noticed."""
    shape = tuple(shape)
    boxes = [Box.whole(shape)]
    if shape:
        dimension = data.draw(st.integers(0, len(shape) - 1))
        boxes = [Box.whole(shape).cut(dimension, parts, index) for index in range(parts)]
        chunks = torch.empty(shape).chunk(parts, dimension)
        assert [box.sizes for box in boxes if box.sizes[dimension]] == [tuple(chunk.shape) for chunk in chunks if chunk.shape[dimension]]
    check_cover("it", shape, boxes)
    if math.prod(shape):
        full = [box for box in boxes if box.volume]
        victim = data.draw(st.sampled_from(full))
        with pytest.raises(CheckpointError, match="a piece is missing"):
            check_cover("it", shape, [box for box in full if box != victim])
        with pytest.raises(CheckpointError, match="overlap"):
            check_cover("it", shape, [*boxes, victim])
