"""Schedules beside the published formulas; partitions beside every possible cut."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_ref.errors import ConfigError
from fsdp_ref.models import GPT, GPTConfig
from fsdp_ref.plan.activations import in_flight
from fsdp_ref.plan.pipeline import Op, run, schedule
from fsdp_ref.plan.stages import Node, balance, partition
from fsdp_ref.plan.strategy import Strategy

SHAPES = [(1, 3), (2, 2), (4, 8), (8, 24), (3, 9)]


@pytest.mark.parametrize(("ranks", "m"), SHAPES)
def test_bubbles_are_the_published_ratios_in_both_definitions(ranks, m):
    for name in ("gpipe", "1f1b"):
        found = run(schedule(name, ranks, m))
        assert found.bubble_over_ideal == pytest.approx((ranks - 1) / m)
        assert found.bubble_over_total == pytest.approx((ranks - 1) / (m + ranks - 1))
    for chunks in (2, 3):
        if m % ranks == 0:
            assert run(schedule("interleaved", ranks, m, chunks)).bubble_over_ideal == pytest.approx((ranks - 1) / (chunks * m))


@pytest.mark.parametrize(("ranks", "m"), [(4, 8), (8, 24), (4, 4)])
def test_zero_bubble_h1_leaves_a_third_and_no_more_memory(ranks, m):
    """(p - 1)(T_F + T_B - T_W) instead of (p - 1)(T_F + T_B + T_W) (Zero Bubble, section 2.3)."""
    plain, fine = run(schedule("1f1b", ranks, m)), run(schedule("zero-bubble-h1", ranks, m))
    assert fine.total - fine.ideal == pytest.approx((plain.total - plain.ideal) / 3)
    assert max(fine.in_flight) <= ranks == plain.in_flight[0]
    uneven = run(schedule("zero-bubble-h1", ranks, m), 1.0, 2.1, weight=0.9)
    assert uneven.total - uneven.ideal == pytest.approx((ranks - 1) * (1.0 + 1.2 - 0.9))


def test_activations_in_flight_are_the_formulas():
    for rank in range(4):
        all_at_once = Strategy(4, pipeline=4, micro_batches=8, schedule="gpipe")
        assert run(schedule("gpipe", 4, 8)).in_flight[rank] == 8 == in_flight(all_at_once, rank)
        assert run(schedule("1f1b", 4, 8)).in_flight[rank] == 4 - rank == in_flight(Strategy(4, pipeline=4, micro_batches=8), rank)
        woven = Strategy(4, pipeline=4, micro_batches=8, schedule="interleaved", chunks=2)
        assert float(run(schedule("interleaved", 4, 8, 2)).in_flight[rank]) == in_flight(woven, rank)
    assert run(schedule("interleaved", 4, 8, 2)).in_flight[0] == 4 * (1 + Fraction(3, 8))            # Korthikanti et al., section 4.3


def test_each_op_runs_once_and_after_what_it_needs():
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero-bubble-h1", 1)):
        plan = schedule(name, 4, 8, chunks)
        found = run(plan, [1, 2, 1, 1.5], [2, 4, 2, 3], send=0.25)
        ends = {(slot.op.kind, slot.op.micro_batch, slot.op.chunk * 4 + slot.rank): slot for slot in found.slots}
        assert len(ends) == len(found.slots) == 8 * 4 * chunks * (3 if plan.splits_backward else 2)
        for (kind, m, stage), slot in ends.items():
            if kind == "F" and stage:
                assert slot.start >= ends["F", m, stage - 1].end + 0.25 - 1e-9
            if kind == "B" and stage < 4 * chunks - 1:
                assert slot.start >= ends["B", m, stage + 1].end + 0.25 - 1e-9
        for rank in range(4):
            mine = [slot for slot in found.slots if slot.rank == rank]
            assert all(before.end <= after.start + 1e-9 for before, after in itertools.pairwise(mine))


def test_uneven_stages_and_sends_cost_time():
    plan = schedule("1f1b", 4, 8)
    even = run(plan).total
    assert run(plan, send=0.1).total == pytest.approx(even + 2 * 3 * 0.1) or run(plan, send=0.1).total > even
    slow = run(plan, [1, 1, 1.5, 1], [2, 2, 3, 2])
    assert slow.ideal == 8 * 4.5 and slow.total > even
    assert "bubble / ideal" in str(slow) and "bubble / total" in str(slow) and str(Op("F", 3, 1)) == "F3'"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_split_is_the_best_of_all(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    ends = balance(costs, parts)
    worst = lambda cut: max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut]))  # noqa: E731
    every = [(*cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), parts - 1)]
    assert ends[-1] == len(costs) and len(set(ends)) == parts and worst(ends) == min(map(worst, every))


def test_memory_and_time_pull_the_cut_apart():
    """An embedding weighs and does nothing, a head works: by memory it fills a stage, by time it is free."""
    nodes = [Node("embedding", 6, 0), *(Node(f"block {i}", 1, 1) for i in range(6))]
    assert partition(None, 2, nodes=nodes, memory_weight=1.0).stages[0] == ("embedding",)
    assert len(partition(None, 2, nodes=nodes, memory_weight=0.0).stages[0]) == 4


def test_tied_modules_stay_together_and_overfull_stages_are_named():
    found = partition("gpt2", 3, capacity=0.7e9)
    assert [("embedding" in stage) for stage in found.stages] == [("head" in stage) for stage in found.stages]
    assert found.fits == tuple(each <= 0.7e9 for each in found.memory)
    tight = partition("llama3.1-70b", 4, capacity=80e9)
    assert not any(tight.fits) and "NO" in str(tight) and "not included" in str(tight)
    assert sum(tight.memory) == pytest.approx(16 * 70_553_706_496)
    three = [Node("a", 1, 1, ("x",)), Node("b", 1, 1), Node("c", 1, 1, ("y",)), Node("d", 1, 1, ("x", "y")), Node("e", 1, 1)]
    assert partition(None, 2, nodes=three).stages == (("a", "c", "d"), ("b", "e"))


def test_modules_are_cut_in_the_order_they_run():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)
            self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    example = (torch.zeros(2, 8),)
    assert partition(Backwards, 2, inputs=example).stages == (("first", "middle.0"), ("middle.2", "last"))
    config = GPTConfig(dim=64, layers=6, heads=4)
    found = partition(lambda: GPT(config), 3, inputs=(torch.zeros(2, 64, dtype=torch.long),))
    assert [name for stage in found.stages for name in stage if name.startswith("blocks")] == [f"blocks.{i}" for i in range(6)]
    assert any({"tokens", "head"} <= set(stage) for stage in found.stages) and found.imbalance < 0.5


def test_transformers_models_are_opened():
    import transformers
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=100)
    names = [name for stage in partition(config, 2).stages for name in stage]
    assert [f"model.layers.{i}" for i in range(4)] == [name for name in names if "layers" in name] and "lm_head" in names


@pytest.mark.parametrize(("call", "words"), [
    (lambda: schedule("1f1", 4, 8), "no schedule '1f1'; did you mean 1f1b"),
    (lambda: schedule("interleaved", 4, 6, 2), "multiples of the 4 ranks and there are 6; use 8"),
    (lambda: schedule("gpipe", 4, 8, 2), "gpipe has one chunk a rank"),
    (lambda: schedule("gpipe", 0, 8), "ranks is 0"),
    (lambda: run(schedule("gpipe", 4, 8), [1, 2]), "forward has 2 times for 4 ranks"),
    (lambda: run(schedule("gpipe", 4, 8), -1), "forward of rank 0 is -1"),
    (lambda: balance([1, 2], 3), "2 modules cannot make 3 stages"),
    (lambda: partition("gpt2", 20), "cannot make 20 stages"),
    (lambda: partition("gpt2", 2, memory_weight=2), "memory_weight is 2"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_clear_error(call, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        call()
