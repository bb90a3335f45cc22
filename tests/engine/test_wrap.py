"""Choosing units: every rule on models of many shapes, and the units that are chosen at work in the engine."""

import re

import pytest
import torch
from torch import nn

from fsdp_ref import forecast, wrap
from fsdp_ref.engine import MixedPrecisionPolicy, data_parallel
from fsdp_ref.errors import ConfigError
from fsdp_ref.placements import ZERO3
from tests.engine.trees import MODELS, Shared, batch, gpt, names, rows_of, sequential

# -- by_class, blocks, by_size ------------------------------------------------------------------------------------------------


def test_classes_and_blocks_come_innermost_first():
    model = gpt(layers=2)
    assert names(model, wrap.blocks(model)) == ["blocks.1", "blocks.0"]
    assert names(model, wrap.by_class(model, type(model.blocks[0]))) == ["blocks.1", "blocks.0"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert names(nested, wrap.by_class(nested, nn.Sequential, nn.Linear)) == ["0.0", "0"]
    assert wrap.blocks(nested) == []


def test_sizes_of_a_plain_sequential():
    model = sequential(4, 10, 2, 10)                                # 50, 22 and 30 elements
    assert names(model, wrap.by_size(model, 30)) == ["2", "0"]
    assert names(model, wrap.by_size(model, 31)) == ["0"]
    assert names(model, wrap.by_size(model, 1)) == ["2", "1", "0"]
    assert wrap.by_size(model, 51) == []
    assert wrap.by_size(model, 1, exclude=(nn.Linear,)) == []


def test_what_is_left_of_a_block_decides():
    """dim 16: attention has 1088 elements, the MLP 2128, both norms 64; the block 3280."""
    model = gpt(layers=1)
    assert names(model, wrap.by_size(model, 3280)) == ["blocks.0"]
    assert names(model, wrap.by_size(model, 2128)) == ["blocks.0.mlp"]          # 1152 are left of the block: not enough
    assert names(model, wrap.by_size(model, 1152)) == ["blocks.0.mlp", "blocks.0"]
    assert names(model, wrap.by_size(model, 2128, exclude=(type(model.blocks[0].mlp),))) == ["blocks.0"]


def _uses(model, inside):
    """(uses in `inside`, uses anywhere) of every parameter, by walking all paths from the model."""
    found: dict[nn.Parameter, list[int]] = {}

    def walk(module, within):
        within = within or module is inside
        for param in module._parameters.values():
            if param is not None:
                count = found.setdefault(param, [0, 0])
                count[0] += within
                count[1] += 1
        for child in module._modules.values():
            walk(child, within)

    walk(model, False)
    return found


@pytest.mark.parametrize("threshold", [1, 17, 72, 200, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_units_can_be_called_keep_ties_together_and_are_large_enough(name, threshold):
    model = MODELS[name]()
    units, taken = wrap.by_size(model, threshold), set()
    assert len(set(units)) == len(units) and model not in units
    for unit in units:
        assert type(unit).forward is not nn.Module.forward, "a container is never called"
        assert not any(unit in set(outer.modules()) and unit is not outer for outer in model.modules()
                       if isinstance(outer, wrap.READS_CHILDREN)), "its hooks would never run"
        for within, everywhere in _uses(model, unit).values():
            assert within in (0, everywhere), "a tied parameter is split over two units"
        own = set(unit.parameters()) - taken
        assert sum(param.numel() for param in own) >= threshold
        taken |= set(unit.parameters())
        assert all(inner in units[: units.index(unit)] for inner in unit.modules() if inner in units and inner is not unit), "inner first"


def test_a_tied_parameter_goes_to_the_smallest_module_that_holds_all_its_uses():
    model = Shared()
    found = names(model, wrap.by_size(model, 1))
    assert "pair" in found and "pair.2" in found and not {"pair.0", "pair.1"} & set(found)
    assert "right.1" in found and not {"left", "right"} & set(found)        # a layer that stands in two blocks may be a unit,
    assert wrap.by_size(model, 72).count(model.left[0]) == 1                # once, and neither of the blocks around it
    for tied in (True, False):
        model = gpt(tied=tied)
        assert ({"tokens", "head"} & set(names(model, wrap.by_size(model, 1))) == set()) is tied


@pytest.mark.parametrize("threshold", [0, -5])
def test_a_threshold_below_one_is_refused(threshold):
    with pytest.raises(ConfigError, match=f"min_params is {threshold}.*; give 1 or more"):
        wrap.by_size(gpt(), threshold)


# -- auto: what it chooses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_coarsest_choice_within_the_budget(name):
    with torch.device("meta"):
        model = MODELS[name]()
    tried = {name: (len(units), forecast.held(forecast.sizes(model, units, 2, MixedPrecisionPolicy())).total())
             for name, units in wrap._candidates(model)}
    rows = rows_of(wrap.auto(model, float("inf"), world_size=2))
    assert [(rule, units, f"{mib:.3f}") for rule, units, mib, _ in rows] == [(k, n, f"{p / 2**20:.3f}") for k, (n, p) in tried.items()]
    for _, budget in tried.values():
        choice = wrap.auto(model, budget, world_size=2)
        assert choice.held.total() <= budget
        assert len(choice.units) == min(units for units, peak in tried.values() if peak <= budget)
        assert list(choice) == choice.units and choice.name in str(choice) and f"{budget / 2**20:.3f} MiB" in str(choice)


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_nobody_can_meet_names_the_smallest_that_works(name):
    model = MODELS[name]()
    with pytest.raises(ConfigError, match="the smallest budget that works is .*sharded parameter .* \\+ .*optimizer state") as caught:
        wrap.auto(model, 10, world_size=2)
    smallest = int(re.search(r"works is (\d+) bytes", str(caught.value))[1])
    assert wrap.auto(model, smallest, world_size=2).held.total() == smallest
    with pytest.raises(ConfigError):
        wrap.auto(model, smallest - 1, world_size=2)


def test_a_huge_single_layer_sets_the_floor():
    """No choice of modules can cut one layer: its whole weights, gradients and gather stay."""
    model = sequential(4, 4, 500, 4)
    layer = 4 * (4 * 500 + 500)
    with pytest.raises(ConfigError) as caught:
        wrap.auto(model, layer, world_size=4)
    assert int(re.search(r"works is (\d+) bytes", str(caught.value))[1]) > 2 * layer


@pytest.mark.parametrize("given", [{}, {"exposed": 1.0}, {"budget": 1e9, "bandwidth": 1e9},
                                   {"exposed": 1.0, "bandwidth": 1e9, "flops": 1e9}])
def test_a_target_that_cannot_be_computed_is_refused(given):
    with pytest.raises(ConfigError, match="auto needs budget= in bytes or exposed= in seconds"):
        wrap.auto(gpt(), world_size=2, **given)


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"bandwidth": 0.0}, {"latency": -1.0}, {"flops": -1.0}, {"tokens": 0}])
def test_figures_that_cannot_be_are_refused(wrong):
    good = {"world_size": 2, "bandwidth": 1e9, "latency": 0.0, "flops": 1e9, "tokens": 8}
    with pytest.raises(ConfigError, match="give positive numbers"):
        wrap.auto(gpt(), 1e9, **{**good, **wrong})


# -- at work ------------------------------------------------------------------------------------------------------------------


def _computes_the_same(rank, world, name):
    plain, model = MODELS[name](), MODELS[name]()
    data_parallel(model, ZERO3, units=wrap.by_size(model, 1))
    inputs = batch(plain, 0, rank)
    for mode in (True, False):                                      # evaluation takes nn.TransformerEncoderLayer's fast path
        plain.train(mode)
        model.train(mode)
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(model(*inputs), plain(*inputs))
    model.train()(*inputs).square().mean().backward()
    torch.stack([plain.train()(*batch(plain, 0, each)).square().mean() for each in range(world)]).mean().backward()
    for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), reference.grad, msg=lambda text, name=name: f"{name}: {text}")
    return True


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_units_compute_what_the_plain_model_computes(ranks, name):
    assert all(ranks(2, _computes_the_same, name))


def _trained(rank, world, budget):
    """Losses of three steps with the units `auto` chooses (None: with the default ones), and how many units that were."""
    model = gpt()
    units = wrap.auto(model, budget, world_size=world) if budget else wrap.blocks(model)
    data_parallel(model, ZERO3, units=units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        tokens, = batch(model, step, rank)
        optimizer.zero_grad()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, len(list(units))


def test_the_choice_is_what_data_parallel_takes_and_units_change_no_bit(ranks):
    with pytest.raises(ConfigError) as caught:
        wrap.auto(gpt(), 1, world_size=2)
    smallest = int(re.search(r"works is (\d+) bytes", str(caught.value))[1])
    default, coarse, fine = (ranks(2, _trained, budget) for budget in (None, 1e9, smallest))
    assert coarse[0][1] == 0 and default[0][1] == 3 and fine[0][1] > 3
    assert [losses for losses, _ in coarse] == [losses for losses, _ in default] == [losses for losses, _ in fine]
