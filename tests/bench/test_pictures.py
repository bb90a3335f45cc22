"""The benchmark of drawing and watching, tiny: what it writes, what it prints, what it refuses. No figure is judged."""

import json
import statistics

import pytest

from fsdp_ref.bench import pictures, processes
from fsdp_ref.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What one run wrote, and what is printed of it."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert pictures.main(["--events", "500", "--rounds", "2", "--stretch", "0.2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    return result, pictures.text(result)


@pytest.mark.slow
def test_the_recording_is_as_long_as_asked_and_no_longer_than_a_step(tiny):
    result, _ = tiny
    assert 500 <= result["events"] < 700 and result["allocations"] > 0          # a step of both ranks is 100 to 200 events


@pytest.mark.slow
def test_figures_follow_from_the_raw_seconds(tiny):
    result, _ = tiny
    assert list(result["draw"]) == list(pictures.WHAT)
    for row in result["draw"].values():
        assert len(row["rounds"]) == 2 and row["median"] == statistics.median(row["rounds"]) and row["min"] > 0
    live = result["live"]
    assert live["rounds"] == [a / b for a, b in zip(live["watched"], live["alone"], strict=True)] and len(live["rounds"]) == 2
    assert live["median"] == statistics.median(live["rounds"]) and live["steps"] >= 1


@pytest.mark.slow
def test_printed_numbers_are_those_of_the_json(tiny):
    result, out = tiny
    for name, row in result["draw"].items():
        line = next(line for line in out.splitlines() if line.startswith(pictures.WHAT[name][0]))
        assert line.removeprefix(pictures.WHAT[name][0]).split()[0] == f"{row['median']:.2f}"
        assert ("met" in line or "missed" in line) == (row["limit"] is not None)
    assert f"{result['live']['median']:.3f}" in out.splitlines()[-1] and "<= 1.02" in out.splitlines()[-1]
    assert f"{result['events']:,} events" in out


@pytest.mark.parametrize(("given", "says"), [
    (["--ranks", "0"], "--ranks is 0; it must be at least 1"), (["--events", "0"], "--events is 0; it must be at least 1"),
    (["--rounds", "-1"], "--rounds is -1; it must be at least 1"), (["--stretch", "nan"], "--stretch is nan; it must be above 0"),
    (["--stretch", "0"], "--stretch is 0; it must be above 0"), (["--json", "/nowhere/at/all.json"], "cannot be written; give a file in"),
])
def test_what_cannot_work_is_refused_before_a_rank_starts(given, says, monkeypatch):
    monkeypatch.setattr(processes, "run", lambda *args: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError) as caught:
        pictures.main(given)
    assert says in str(caught.value)
