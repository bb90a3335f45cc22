"""Advice for the questions people ask, and the checkpoint interval beside its formula and beside a simulated year of failures."""

import math
import random

import pytest
import torch
from torch import nn

from fsdp_ref.errors import ConfigError
from fsdp_ref.plan import Cluster, advise, machine, memory, modules
from fsdp_ref.plan.candidates import ladder
from fsdp_ref.plan.footprint import describe
from fsdp_ref.plan.interval import checkpoint_bytes, interval


def names(advice):
    return [option.name for option in advice.options]


def reasons(advice):
    return dict(advice.ruled_out)


def test_everything_offered_fits_and_the_rest_says_why_not():
    found = advise("llama3.1-8b", "h100", batch=64)
    capacity = machine("h100").memory
    assert 1 <= len(found.options) <= 4 and found.options[0].name == "ZeRO-3"
    for option in found.options:
        assert option.footprint.fits(capacity) != "no" and option.footprint.strategy.batch == 64 and option.reason
    assert "GiB" in reasons(found)["DDP"] and "needs" in reasons(found)["DDP"]
    text = str(found)
    assert all(word in text for word in ("ruled out", "GiB", "GB", "MFU", "what each measure saves"))


def test_one_gpu_to_many():
    """A model that fits one GPU: for cost one GPU is enough, for time all of them as plain data parallelism or its equal in bytes."""
    assert names(advise("gpt2", "a100", 256, "cost"))[0] == "one GPU"
    assert advise("gpt2", "a100", 256, "cost").options[0].footprint.strategy.gpus == 1
    fast = advise("gpt2", "a100", 256, "time").options[0]
    assert fast.footprint.strategy.gpus == 8 and fast.footprint.strategy.tensor == 1


def test_one_node_to_many_on_a_slow_network_stays_inside_nodes():
    """P4d's network is an eighth of P5's: hybrid sharding beats ZeRO-3 across nodes by more there."""
    def gain(name):
        found = advise("llama2-7b", Cluster(machine(name), 64), 64, dtypes="bf16")
        every = {option.name: option for option in found.options}
        return every["HSDP"].timing.parts["data"], found
    slow, found = gain("p4d")
    assert names(found).index("HSDP") < (names(found).index("ZeRO-3") if "ZeRO-3" in names(found) else 9)
    assert any("whole node's network" in note for note in found.notes)


def test_out_of_memory_climbs_the_ladder_in_order():
    steps = ladder(describe("llama3.1-8b"), Cluster(machine("h100"), 16), 64)
    order = [step.name for step in steps]
    assert order[:4] == ["fp32, micro-batch as it comes", "micro-batch 1", "mixed precision", "activation checkpointing"]
    assert [name.split()[0] for name in order[4:]] == ["zero1", "zero2", "zero3", "tensor", "pipeline"]
    sizes = [step.footprint.low for step in steps[:8]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 10 * sizes[-1]


def test_a_70b_fine_tune_on_8_gpus():
    """16 bytes x 70.6e9 / 8 = 141 GB a rank: nothing fits as asked; adapters, or the host's memory, do, and say what they change."""
    found = advise("llama3.1-70b", "h100", 8)
    assert names(found)[0] == "ZeRO-3, adapters of rank 16" and "ZeRO-3, state in host memory" in names(found)
    assert "another training" in found.options[0].reason and "ZeRO-3" in reasons(found)
    adapters = found.options[0].footprint
    assert adapters.of("optimizer state") < 0.01 * memory("llama3.1-70b", gpus=8).of("optimizer state")
    host = next(option for option in found.options if "host" in option.name).footprint
    assert host.host == pytest.approx(16 * 70_553_706_496 / 8) and "in host memory" in str(host)


def test_pre_training_on_hundreds():
    found = advise("llama3.1-70b", Cluster(machine("h100"), 512), 1024)
    assert found.options and all(option.footprint.strategy.gpus == 512 for option in found.options)
    assert {"DDP", "ZeRO-1", "ZeRO-2"} <= set(reasons(found)) and found.options[0].timing.mfu > 0.3


def test_a_405b_needs_more_than_zero():
    found = advise("llama3.1-405b", Cluster(machine("h100"), 1024), 256)
    assert found.options[0].footprint.strategy.tensor > 1 and {"DDP", "ZeRO-1", "ZeRO-2", "HSDP"} <= set(reasons(found))


def test_a_vit_on_older_cards():
    found = advise("vit-h", "a100-40", 1024)
    assert found.options[0].footprint.strategy.tensor == 1 and found.options[0].verdict == "yes"
    assert found.options[0].timing.tokens == 1024 * 257


def test_goals_rank_differently():
    by_memory = advise("llama3.1-8b", Cluster(machine("h100"), 64), 128, "memory")
    by_time = advise("llama3.1-8b", Cluster(machine("h100"), 64), 128, "time")
    assert by_memory.options[0].footprint.high < by_time.options[0].footprint.high
    assert by_memory.options[0].timing.seconds > by_time.options[0].timing.seconds
    cheap = advise("llama3.1-8b", Cluster(machine("h100"), 64, price=2.5), 128, "cost")
    assert cheap.options[0].gpu_hours <= min(option.gpu_hours for option in by_time.options) + 1e-9
    assert "(" in str(cheap).splitlines()[4]


def test_nothing_fits_at_all():
    found = advise("llama3.1-405b", "a100-40", 8)
    assert not found.options and any("nothing fits" in note for note in found.notes) and "nothing fits" in str(found)


def test_a_module_with_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    description = modules.describe(model, (torch.zeros(2, 3, 8, 8),))
    found = advise(description, "a100", 64)
    assert found.options and found.options[0].timing.seconds > 0
    assert any("BatchNorm" in note for note in found.notes)
    with pytest.raises(ConfigError, match="give example inputs"):
        advise(nn.Linear(4, 4), "a100", 64)


def test_preemptible_machines():
    found = advise("llama3.1-8b", Cluster(machine("p4d"), 64, price=4.0, mtbf_hours=24), 64)
    assert found.checkpoints is not None and 60 < found.checkpoints.every < 3 * 3600
    assert found.checkpoints.price_per_hour == 256 and "failure" in str(found)
    assert advise("llama3.1-8b", Cluster(machine("p4d"), 64), 64).checkpoints is None


def test_the_interval_is_the_best_of_a_simulated_run():
    """Exponential failures, a save of 60 s, one failure an hour: no other interval of the grid does clearly better."""
    save, mtbf = 60.0, 3600.0
    best = interval(save, mtbf)
    assert best.every == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.15)

    def share_of_work(every):
        clock = done = 0.0
        random.seed(1)
        failure = random.expovariate(1 / mtbf)
        while clock < 4e6:
            if clock + every + save <= failure:
                clock, done = clock + every + save, done + every
            else:
                clock = failure
                failure = clock + random.expovariate(1 / mtbf)
        return done / clock

    at_best = share_of_work(best.every)
    assert all(share_of_work(best.every * factor) < at_best + 0.004 for factor in (0.4, 0.7, 1.5, 2.5))
    assert 1 - at_best == pytest.approx(best.overhead, abs=0.03)


def test_megatrons_and_llamas_figures():
    """13.8 TB for 1.008e12 parameters; 419 failures in 54 days are one in 3.1 hours."""
    assert checkpoint_bytes(1.008e12, "mixed") == pytest.approx(13.8e12, rel=0.03)
    assert checkpoint_bytes(1.008e12, "mixed") / 273e9 == pytest.approx(51, rel=0.03)
    llama = interval(60, 54 * 24 * 3600 / 419)
    assert 0.05 < llama.overhead < 0.15


@pytest.mark.parametrize(("call", "words"), [
    (lambda: advise("gpt2", "h10", 8), "no GPU or machine 'h10'; did you mean h100"),
    (lambda: advise("gpt3", "h100", 8), "did you mean gpt2"),
    (lambda: advise("gpt2", "h100", 8, "speed"), "no goal 'speed'"),
    (lambda: advise("gpt2", "h100", -8), "batch is -8"),
    (lambda: advise("gpt2", "h100", 8, gpus=0), "gpus is 0"),
    (lambda: advise("gpt2", Cluster(machine("h100"), 8), 8, gpus=4), "gpus belong into the Cluster"),
    (lambda: Cluster(machine("h100"), 8, price=-1), "price is -1"),
    (lambda: interval(0, 10), "save is 0"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_clear_error(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
