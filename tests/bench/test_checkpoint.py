"""The benchmark of checkpoints, tiny: what it writes, what it prints, what it refuses, what it leaves. No figure is judged."""

import json
import os
import statistics

import pytest

from fsdp_ref import cli
from fsdp_ref.bench import checkpoint, processes, storage
from fsdp_ref.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(JSON, folder) of one run."""
    home = tmp_path_factory.mktemp("bench")
    argv = ["bench", "checkpoint", "--gib", "0.004", "--rounds", "2", "--dir", str(home), "--json", str(home / "figures.json")]
    assert cli.main(argv) == 0
    return json.loads((home / "figures.json").read_text()), home


@pytest.mark.slow
def test_json_holds_every_contender(tiny):
    result, home = tiny
    assert os.listdir(home) == ["figures.json"]                                # the state on the disk is gone again
    for part, names in (("save", storage.SAVES), ("load", storage.LOADS), ("stall", storage.STALLS)):
        rows = result[part]["contenders"]
        assert set(rows) == set(names)
        for row in rows.values():
            assert len(row["rounds"]) == 2 and min(row["rounds"]) > 0 and row["median"] == statistics.median(row["rounds"])
        for ratio in result[part]["ratios"]:
            assert ratio["rounds"] == [a / b for a, b in zip(rows[ratio["of"]]["rounds"], rows[ratio["to"]]["rounds"], strict=True)]
    assert result["bytes"] == 3 * 24 * 1024 * 4 * 14                            # moments and weights, rows of 14 rounded to the ranks
    assert set(result["memory"]) == {"save save", "save dcp", "load load", "load dcp"}
    assert os.uname().nodename not in json.dumps(result) or len(os.uname().nodename) < 4


@pytest.mark.slow
def test_printed_numbers_are_those_of_the_json(tiny):
    result, _ = tiny
    out = checkpoint.text(result)
    for part in ("save", "load", "stall"):
        table = out.split(checkpoint.TITLES[part])[1].splitlines()
        for name, row in result[part]["contenders"].items():
            line = next(line for line in table if line.startswith(checkpoint.NAMES[part][name]))
            assert f"{row['median'] * 1e3:.1f}" in line
        for row in result[part]["ratios"]:
            line = next(line for line in out.splitlines() if line.startswith(f"{row['of']} / {row['to']} "))
            assert f"{row['median']:.3f}" in line
            assert row["limit"] is None or ("met" in line) == (row["median"] <= row["limit"])
    assert out.count("met") + out.count("missed") == 6


@pytest.mark.parametrize("argv, says", [
    (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
    (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
    (["--gib", "0"], "--gib is 0; it must be above 0"),
    (["--gib", "nan"], "--gib is nan; it must be above 0"),
    (["--gib", "1000"], "GiB free and 5000 are needed; choose another folder or a smaller --gib"),
    (["--dir", "/no/such/folder"], "--dir /no/such/folder is no folder; make it first"),
    (["--json", "."], "--json . cannot be written; give a file in a folder that exists"),
    (["--round", "1"], "unrecognized arguments: --round"),
])
def test_what_cannot_work_is_refused_before_a_rank_starts(argv, says, monkeypatch):
    monkeypatch.setattr(processes, "run", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError) as caught:
        checkpoint.main(argv)
    assert says in str(caught.value)


def test_the_ratio_is_taken_within_a_round():
    row = checkpoint.figures({"a": [2.0, 3.0], "b": [4.0, 2.0]}, (("a", "b", 1.1),))["ratios"][0]
    assert (row["rounds"], row["median"], row["limit"]) == ([0.5, 1.5], 1.0, 1.1)
