"""Machines with their sources and traps; collectives by hand; a calibration on real ranks."""

import tomllib

import pytest

from fsdp_ref.errors import ConfigError
from fsdp_ref.plan import Strategy, hardware, network
from fsdp_ref.plan import calibrate as calibration
from fsdp_ref.plan.hardware import machine
from fsdp_ref.plan.speed import step_time

TOY = hardware.Machine("toy", 1e12, 1.0, 1e9, 1e12, link=100e9, nic=80e9, per_node=8, link_share=1.0, nic_share=1.0, hop_link=10e-6,
                       hop_nic=50e-6, base=0.0)


def test_a_ring_by_hand():
    assert network.collective(TOY, "all-gather", 800e6, 8) == pytest.approx(7 * 10e-6 + 700e6 / 100e9)
    assert network.collective(TOY, "reduce-scatter", 800e6, 8) == network.collective(TOY, "all-gather", 800e6, 8)
    assert network.collective(TOY, "all-reduce", 800e6, 8) == pytest.approx(2 * network.collective(TOY, "all-gather", 800e6, 8))
    assert network.collective(TOY, "all-gather", 800e6, 1) == 0 == network.collective(TOY, "all-gather", 0, 8)


def test_across_nodes_the_slower_link_decides_and_groups_share_the_cards():
    """16 ranks in 2 nodes: 14 hops inside, 1 across, 80 GB/s through all cards; every 8th rank has one card of 10 GB/s."""
    assert network.collective(TOY, "all-gather", 1600e6, 16) == pytest.approx(14 * 10e-6 + 1 * 50e-6 + 1500e6 / 80e9)
    assert network.bandwidth(TOY, 16, stride=8) == 10e9 and network.bandwidth(TOY, 4, stride=2) == 100e9
    assert network.bandwidth(TOY, 8, stride=2) == 40e9


def test_hybrid_sharding_keeps_the_large_message_inside_the_node():
    """Inside 1600 MB over 8, across an eighth of it over 2: two cards' worth of 10 GB/s for the replicas of each rank."""
    by_hand = (7 * 10e-6 + 1400e6 / 100e9) + 2 * 50e-6 + 200e6 / 10e9
    assert network.hierarchical(TOY, 1600e6, 8, 2) == pytest.approx(by_hand)
    wide, narrow = (network.hierarchical(machine("p4d"), 1e9, 8, 8), network.collective(machine("p4d"), "reduce-scatter", 1e9, 64))
    assert wide < 2 * narrow


def test_bus_factors_are_those_of_nccl_tests():
    assert network.bus_factor("all-reduce", 8) == 2 * 7 / 8 and network.bus_factor("all-gather", 8) == 7 / 8
    assert network.bus_factor("broadcast", 8) == 1
    with pytest.raises(ConfigError, match="no collective 'gather'"):
        network.bus_factor("gather", 8)


def test_every_figure_has_a_source_and_the_traps_are_spelled_out():
    for name, spec in hardware.machines().items():
        assert all(len(spec.sources[figure]) >= 8 for figure in (*hardware.FIGURES, *hardware.NETWORK)), name
        assert name in str(spec) and "source" in str(spec)
    assert {"sparse", "duplex", "per_node"} == set(hardware.traps())
    assert {"a100", "a100-40", "h100", "h200", "b200", "p4d", "p5", "laptop"} <= set(hardware.machines())
    assert machine("p4d").nic * 8 == machine("p5").nic and machine("H100") is not None


@pytest.mark.parametrize(("text", "words"), [
    ("[machine.x]\nflops = { value = 1.0, source = 'a' }\n", "has no"),
    ("[machine.laptop]\nfops = 3\n", "has unknown fops"),
    ("not toml at all [", "cannot read the hardware file"),
])
def test_a_bad_hardware_file_is_one_clear_error(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        machine("h100", path)


def test_unknown_and_absurd_machines():
    with pytest.raises(ConfigError, match="no GPU or machine 'h1000'; did you mean h100"):
        machine("h1000")
    with pytest.raises(ConfigError, match="flops is -1"):
        hardware.Machine(**{**vars(TOY), "flops": -1})


def test_a_step_is_the_sum_of_its_parts():
    strategy = Strategy(gpus=64, micro_batch=2, recompute="full")
    found = step_time("llama3.1-8b", strategy, "h100")
    assert found.seconds == sum(found.parts.values()) and 0 < found.mfu < found.hfu < 1 and 0 <= found.exposed < 1
    assert found.hfu / found.mfu == pytest.approx(4 / 3, rel=0.1)
    assert "MFU" in str(found) and "not included" in str(found)


def test_what_the_network_costs_shows():
    shape, many = "llama3.1-70b", {"gpus": 256, "micro_batch": 1}
    fast, slow = (step_time(shape, Strategy(**many), name) for name in ("h100", "p4d"))
    assert slow.exposed > fast.exposed
    twice = step_time(shape, Strategy(**many, micro_batches=2), "p4d")
    kept = step_time(shape, Strategy(**many, micro_batches=2, reshard=False), "p4d")
    assert kept.parts["data"] < twice.parts["data"]                          # one gather a step instead of two a micro-batch
    tensor = step_time(shape, Strategy(**many, tensor=8), "h100")
    assert tensor.parts["tensor"] > 0 == fast.parts["tensor"]
    across = step_time(shape, Strategy(gpus=256, pipeline=8, micro_batches=32), "h100")
    assert across.parts["bubble"] > 0 < across.parts["sends"] and fast.parts["bubble"] == 0


@pytest.mark.slow
def test_calibrate_writes_a_hardware_file(tmp_path):
    found = calibration.calibrate(2, device="cpu", name="mine")
    path = calibration.save(found, tmp_path / "mine.toml")
    again = machine("mine", path)
    assert again == found and again.flops > 1e8 and again.link > 1e6 and 0 < again.hop_link < 1 and again.hbm > 1e8
    assert "measured by fsdp-ref plan calibrate with 2 gloo ranks" in tomllib.loads(path.read_text())["machine"]["mine"]["link"]["source"]
    assert step_time("gpt2", Strategy(gpus=2), again).seconds > 0


def test_calibrate_refuses_what_it_cannot_measure(tmp_path):
    with pytest.raises(ConfigError, match="needs 2 ranks"):
        calibration.calibrate(1)
    with pytest.raises(ConfigError, match="cannot write"):
        calibration.save(TOY, tmp_path / "no" / "where.toml")
