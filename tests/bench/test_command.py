"""The whole benchmark, tiny: what it writes, what it prints, what it refuses, and that its ranks end with it. No figure is judged."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fsdp_ref.bench import contenders, engine, memory, processes
from fsdp_ref.errors import ConfigError, RankError

ROOT = Path(__file__).parents[2]
LIMIT = 120                  # seconds until a command that hangs fails its test
CONTENDERS = ["zero3", "zero3-recording", "zero2", "torch-fsdp", "torch-ddp"]
TINY = ("--dim", "16", "--layers", "1", "--batch", "2", "--context", "8", "--ranks", "2", "--device", "cpu")


def start(*argv):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "fsdp_ref.cli", "bench", "engine", *argv], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(JSON, printed text) of one run of all three measurements."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    # A block this small computes faster than a real message travels; 20 times its forward is still over in a moment.
    process = start(*TINY, "--rounds", "1", "--link-ratio", "20", "--contenders", ",".join(reversed(CONTENDERS)), "--json", str(path))
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert err == "" and f"figures written to {path}" in out
    return json.loads(path.read_text()), out


@pytest.mark.slow
def test_json_holds_every_contender_and_the_machine(tiny):
    result, _ = tiny
    assert set(result) == {"format", "machine", "options", "parameters", "time", "memory", "link"}
    assert set(result["machine"]) == {"device", "gpu", "cores", "threads", "processor", "system", "python", "torch"}
    assert result["machine"]["threads"] == 1 and result["options"]["dim"] == 16
    assert result["parameters"] == (12 * 16**2 + 13 * 16) + (256 + 8) * 16 + 2 * 16
    assert list(result["time"]["contenders"]) == result["options"]["contenders"] == CONTENDERS
    for row in result["time"]["contenders"].values():
        assert len(row["rounds"]) == 1 and row["rounds"][0] > 0 and row["median"] == row["rounds"][0]
    assert list(result["memory"]["contenders"]) == [key for key in CONTENDERS if key != "zero3-recording"]
    for row in result["memory"]["contenders"].values():
        assert [len(ranks) for ranks in row["runs"]] == [2, 2]
        assert row["peak"] == statistics.mean(max(ranks) for ranks in row["runs"]) > 0
    assert result["memory"]["method"] == memory.method("cpu") and result["memory"]["steps"] == 3


@pytest.mark.slow
def test_ratios_follow_from_the_raw_seconds(tiny):
    figures = tiny[0]["time"]
    assert len(figures["ratios"]) == 4
    for row in figures["ratios"]:
        of, to = (figures["contenders"][row[end]]["rounds"] for end in ("of", "to"))
        assert row["rounds"] == [a / b for a, b in zip(of, to, strict=True)]
        assert row["median"] == statistics.median(row["rounds"])


@pytest.mark.slow
def test_the_link_is_as_slow_as_asked(tiny):
    """The gather of a block can be no faster than the model says: the emulation waits that long."""
    link = tiny[0]["link"]
    block = link["block"]
    assert block["gather_seconds"] == pytest.approx(20 * block["forward_seconds"])
    assert block["gather_seconds"] == pytest.approx(link["latency"] + block["wire_bytes"] / link["bandwidth"])
    assert block["gathered_bytes"] == 4 * (12 * 16**2 + 13 * 16) and block["wire_bytes"] == block["gathered_bytes"] / 2
    assert list(link["prefetch"]) == ["0", "1", "2"]
    for row in link["prefetch"].values():
        assert row["block_gather_measured"] >= block["gather_seconds"] * 0.999
        assert row["step"] > row["communication"] > 0 and row["communication"] > block["gather_seconds"]
        assert 0 <= row["exposed"] <= row["step"]


@pytest.mark.slow
def test_printed_numbers_are_those_of_the_json(tiny):
    result, out = tiny
    rows = {line[:58].strip(): line[58:].split() for line in out.splitlines() if len(line) > 58}
    for row in result["time"]["ratios"]:
        name = f"{contenders.NAMES[row['of']]} / {contenders.NAMES[row['to']]}"
        assert rows[name][:3] == [f"{row[figure]:.3f}" for figure in ("median", "min", "max")]
    tables = out.split("PEAK PROCESS MEMORY")
    for text, part, figure, scale in ((tables[0], "time", "median", 1e3), (tables[1], "memory", "peak", 1 / 2**20)):
        rows = {line[:58].strip(): line[58:].split() for line in text.splitlines() if len(line) > 58}
        for key, row in result[part]["contenders"].items():
            assert rows[contenders.NAMES[key]][0] == f"{row[figure] * scale:.1f}"
    for ahead, row in result["link"]["prefetch"].items():
        line = next(line for line in out.splitlines() if line.startswith(f"prefetch {ahead}")).removeprefix("prefetch 0 (off)")
        values = [f"{row[name] * 1e3:.1f}" for name in ("step", "communication", "exposed")] + [f"{row['hidden_percent']:.1f}"]
        assert " ".join(values) in " ".join(line.split())


@pytest.mark.slow
def test_nothing_names_the_machine(tiny):
    result, out = tiny
    host = os.uname().nodename
    if len(host) > 3:                                    # "vm" may be part of any word
        assert host not in json.dumps(result) and host not in out
    assert str(Path.home()) not in json.dumps(result)


@pytest.mark.parametrize("argv, says", [
    (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
    (["--rounds", "-1"], "--rounds is -1; it must be at least 1"),
    (["--dim", "wide"], "invalid int value: 'wide'"),
    (["--link-ratio", "0"], "--link-ratio is 0; it must be above 0"),
    (["--link-ratio", "nan"], "--link-ratio is nan; it must be above 0"),
    (["--contenders", "zero3,zero9"], "--contenders has 'zero9', which is not known; choose from zero3, zero3-recording, zero1"),
    (["--only", "time,speed"], "--only has 'speed', which is not known; choose from time, memory, link"),
    (["--only", ""], "--only has '', which is not known"),
    (["--only", "link", "--ranks", "1"], "--only link needs at least 2 ranks"),
    (["--json", "/no/such/folder/x.json"], "the folder of --json /no/such/folder/x.json does not exist; make it first"),
    (["--json", "."], "--json . is a folder"),
    (["--device", "tpu"], "invalid choice"),
    (["--layer", "2"], "unrecognized arguments: --layer"),
])
def test_what_cannot_work_is_refused_before_a_rank_starts(argv, says, monkeypatch):
    monkeypatch.setattr(processes, "run", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(ConfigError) as caught:
        engine.main(argv)
    assert says in str(caught.value)


def test_one_rank_leaves_the_link_out(monkeypatch):
    monkeypatch.setattr(engine, "measure", lambda args: pytest.fail(",".join(args.only)))
    with pytest.raises(pytest.fail.Exception, match="^time,memory$"):
        engine.main(["--ranks", "1", "--device", "cpu"])
    with pytest.raises(pytest.fail.Exception, match="^time,link$"):
        engine.main(["--only", " link,time,link"])


# -- processes ----------------------------------------------------------------------------------------------------------------


def add_up(here, *numbers):
    from fsdp_ref import collectives
    return [sum(numbers), collectives.gather_json(here.rank)]


def refuse_on_one(here):
    from fsdp_ref import collectives
    if here.rank == 1:
        raise ConfigError("this cannot work; do that")
    collectives.barrier()


def fall_over(here):
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def stumble(here):
    raise KeyError("a mistake of ours")


def stay(here, folder):
    """A rank that no signal but SIGKILL ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(folder, f"{os.getpid()}.here").touch()
    time.sleep(LIMIT)


def process_id(here):
    return os.getpid()


def test_run_returns_what_rank_0_returned():
    assert processes.run(add_up, 2, "cpu", 3, 4) == [7, [0, 1]]


def test_every_run_has_fresh_processes():
    assert len({os.getpid(), *(processes.run(process_id, 1, "cpu") for _ in range(2))}) == 3


def test_an_error_of_a_rank_arrives_as_itself():
    with pytest.raises(ConfigError, match="^rank 1: this cannot work; do that$"):
        processes.run(refuse_on_one, 2, "cpu")


def test_a_killed_rank_is_named_and_the_others_are_ended():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RankError, match="^rank 1 of the benchmark was killed by SIGKILL; the system may have run out of memory"):
        processes.run(fall_over, 2, "cpu")
    left = [process for process in set(psutil.Process().children(recursive=True)) - before if "spawn_main" in str(process.cmdline())]
    assert not left


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(Exception, match="a mistake of ours") as caught:
        processes.run(stumble, 1, "cpu")
    assert "in stumble" in str(caught.value)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_benchmark(tmp_path):
    script = f"from tests.bench import test_command as t; t.processes.run(t.stay, 2, 'cpu', {str(tmp_path)!r})"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + LIMIT

    def until(condition, what):
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    try:
        until(lambda: len(list(tmp_path.glob("*.here"))) == 2, "two ranks")
        ranks = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*.here")]
        process.kill()
        until(lambda: not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE], "the ranks to end")
    finally:
        process.kill()
        process.wait()
