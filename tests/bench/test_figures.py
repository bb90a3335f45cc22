"""The arithmetic between a measurement and the printed table, on figures small enough to check by hand."""

import json

import pytest

from fsdp_ref.bench import figures, link, speed, table
from fsdp_ref.errors import ConfigError

MACHINE = {"device": "cpu", "gpu": None, "cores": 2, "threads": 1, "processor": "x86_64", "system": "Linux", "python": "3.11.7",
           "torch": "2.13.0"}
OPTIONS = {"ranks": 2, "dim": 512, "layers": 6, "batch": 4, "context": 128, "rounds": 2, "link_ratio": 0.8}


def report(**parts):
    return table.text({"machine": MACHINE, "options": OPTIONS, "parameters": 19_000_000, **parts})


def line_of(text, start):
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert len(found) == 1, text
    return found[0].removeprefix(start).split()


def test_ratios_are_taken_within_a_round():
    """The machine was twice as slow in the second round: paired ratios do not notice."""
    result = figures.speed({"zero3": [1.0, 2.0, 1.5], "torch-fsdp": [2.0, 4.0, 2.0]}, ranks=2)
    assert result["ratios"] == [{"of": "zero3", "to": "torch-fsdp", "rounds": [0.5, 0.5, 0.75], "median": 0.5, "min": 0.5, "max": 0.75,
                                 "target": 0.85}]
    assert result["contenders"]["zero3"] == {"rounds": [1.0, 2.0, 1.5], "median": 1.5, "min": 1.0}


def test_a_pair_needs_both():
    seconds = {"zero3": [1.0], "zero3-recording": [1.01], "torch-ddp": [0.8]}
    assert [(row["of"], row["to"]) for row in figures.speed(seconds, 2)["ratios"]] == [("zero3", "torch-ddp"), ("zero3-recording", "zero3")]
    assert figures.speed({"ddp": [1.0]}, 2)["ratios"] == []


@pytest.mark.parametrize("ranks, of_torch, of_ddp", [(1, None, None), (2, 0.85, 1.2), (3, None, None), (4, 0.9, None)])
def test_targets_depend_on_the_number_of_ranks(ranks, of_torch, of_ddp):
    rows = figures.speed({"zero3": [1.0], "torch-fsdp": [1.0], "torch-ddp": [1.0], "zero3-recording": [1.0]}, ranks)["ratios"]
    assert {(row["of"], row["to"]): row["target"] for row in rows} == {
        ("zero3", "torch-fsdp"): of_torch, ("zero3", "torch-ddp"): of_ddp, ("zero3-recording", "zero3"): 1.02}


def test_the_rank_that_needs_most_memory_counts_in_each_run():
    result = figures.memory({"zero3": [[90, 80], [90, 40]], "zero1": [[100, 150]] * 2, "torch-fsdp": [[80, 70], [90, 120]]}, "by hand", 3)
    assert {key: (row["peak"], row["ratio"], row["target"]) for key, row in result["contenders"].items()} == {
        "zero3": (90, 0.9, 1.0), "zero1": (150, 1.5, None), "torch-fsdp": (100, 1.0, None)}


def test_without_torchs_there_is_no_memory_ratio():
    assert figures.memory({"zero3": [[90]]}, "by hand", 3)["contenders"]["zero3"]["ratio"] is None


def raw_link():
    """Two rounds of two ranks. Link busy 6 s (a gap of 1 s); rank 0 waits 1 s and rank 1 2 s in round 0, both nothing in round 1."""
    busy = [[0.0, 4.0], [3.0, 5.0], [6.0, 7.0]]

    def rank(seconds, *waiting):
        return {"seconds": seconds, "busy": busy, "waiting": list(waiting), "gathers": [4.0, 2.0]}

    rounds = [[rank(8.0, [6.0, 7.0, "last"]), rank(9.0, [3.0, 4.0, "first"], [6.0, 7.0, "last"])], [rank(7.0), rank(7.5)]]
    return {"block": {"forward_seconds": 2.5, "gathered_bytes": 8e6, "wire_bytes": 4e6}, "link": {"bandwidth": 4e6, "latency": 1.0},
            "bare": [[5.0, 6.0], [5.5, 5.5]], "slow": {"0": rounds, "1": rounds[:1], "2": rounds[1:]}}


def test_hidden_share_of_communication():
    result = figures.link(raw_link(), 0.8)
    assert result["block"]["gather_seconds"] == 1.0 + 4e6 / 4e6
    assert result["bare_step"] == {"rounds": [5.5, 6.0], "median": 5.75}
    off = result["prefetch"]["0"]
    assert off["step_rounds"] == [9.0, 7.5] and off["step"] == 8.25
    assert off["communication_rounds"] == [6.0, 6.0], "two collectives together count once, gaps not at all"
    assert off["exposed_rounds"] == [1.5, 0.0] and off["exposed"] == 0.75
    assert off["hidden_percent_rounds"] == [75.0, 100.0] and off["hidden_percent"] == 87.5
    assert list(off["waits"].items()) == [("last", 2.0 / 4), ("first", 1.0 / 4)], "a mean over ranks and rounds, the longest first"
    assert off["block_gather_measured"] == 3.0
    assert [result["prefetch"][ahead]["target_percent"] for ahead in "012"] == [None, 85.0, 85.0]


def test_a_rank_that_waits_longer_than_the_link_works_hides_nothing():
    raw = raw_link()
    raw["slow"]["1"][0][1]["waiting"] = [[0.0, 20.0, "late"]]
    row = figures.link(raw, 0.8)["prefetch"]["1"]
    assert row["exposed"] == (1.0 + 20.0) / 2 > row["communication"] and row["hidden_percent"] == 0.0


def test_bandwidth_leaves_room_for_latency():
    assert link.bandwidth(12e6, 0.031, 0.001) == pytest.approx(400e6)
    with pytest.raises(ConfigError, match="latency alone is 1 ms; choose a larger"):
        link.bandwidth(12e6, 0.001, 0.001)


def test_nobody_always_goes_first_or_follows_the_same_one():
    keys = ("a", "b", "c")
    turns = [speed.order(keys, turn) for turn in range(6)]
    assert turns == [tuple(word) for word in ("abc", "cba", "bca", "acb", "cab", "bac")]
    assert speed.order(keys, 6) == turns[0] and speed.order(("a",), 3) == ("a",)
    everyone = tuple("abcdefg")
    both = [speed.order(everyone, turn) for turn in range(14)]
    assert sorted(order[0] for order in both) == sorted(everyone * 2)
    a_before_b = sum(order.index("a") < order.index("b") for order in both)
    assert a_before_b == len(both) / 2


def test_the_slowest_rank_counts_in_every_round():
    assert speed.slowest([{"a": [1.0, 4.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 4.0]}


def test_table_says_what_the_json_holds():
    seconds = {"zero3": [0.5001, 0.6], "torch-fsdp": [0.62, 0.7], "torch-ddp": [0.4, 0.4]}
    parts = {"time": figures.speed(seconds, 2), "memory": figures.memory({"zero3": [[3 << 20]], "torch-fsdp": [[2 << 20]]}, "by hand", 3),
             "link": figures.link(raw_link(), 0.8)}
    text = report(**json.loads(json.dumps(parts)))
    assert line_of(text, "fsdp_ref ZeRO-3 / torch fully_shard") == ["0.832", "0.807", "0.857", "<=", "0.85", "met"]
    assert line_of(text, "fsdp_ref ZeRO-3 / torch DDP") == ["1.375", "1.250", "1.500", "<=", "1.20", "missed"]
    step, peak = (line.split()[-len(row):] for line, row in zip(
        [line for line in text.splitlines() if line.startswith("fsdp_ref ZeRO-3  ")], (["", ""], [""] * 5), strict=False))
    assert step == ["550.0", "500.1"] and peak == ["3.0", "1.500", "<=", "1.00", "missed"]
    assert line_of(text, "prefetch 0 (off)") == ["8250.0", "6000.0", "750.0", "87.5"]
    assert line_of(text, "prefetch 1") == ["9000.0", "6000.0", "1500.0", "75.0", ">=", "85", "%", "missed"]
    assert line_of(text, "prefetch 2") == ["7500.0", "6000.0", "0.0", "100.0", ">=", "85", "%", "met"]
    assert line_of(text, "  with prefetch 1:") == ["last", "1000.0,", "first", "500.0"]
    assert line_of(text, "  with prefetch 2:") == ["none"]
    assert "targets are for" not in text and "(by hand)" in text and max(map(len, text.splitlines())) <= 140


def test_table_warns_when_the_targets_are_for_another_run():
    parts = {"time": figures.speed({"zero3": [1.0], "torch-fsdp": [1.0]}, 2)}
    assert "targets are for" not in report(**parts)
    for other in ({"dim": 64}, {"layers": 2}, {"batch": 1}, {"context": 64}):
        assert "targets are for dim 512, 6 layers" in table.text(
            {"machine": MACHINE, "options": {**OPTIONS, **other}, "parameters": 1, **parts}), other
    assert "targets are for" in table.text({"machine": {**MACHINE, "cores": 8}, "options": OPTIONS, "parameters": 1, **parts})
