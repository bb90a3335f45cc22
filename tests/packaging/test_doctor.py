"""`fsdp-ref doctor`: each thing that can be wrong is named with its fix, and only what blocks makes it fail."""

import importlib.metadata
import shutil
import socket
from collections import namedtuple

import psutil
import pytest
import torch

from fsdp_ref import doctor, selftest
from fsdp_ref.doctor import Level

Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "available")


def of(findings, level):
    return [finding for finding in findings if finding.level is level]


def test_this_machine_passes(capsys):
    assert doctor.main(["--no-selftest"]) == 0
    text = capsys.readouterr().out
    for subject in ("python", "torch", "ipyparallel", "jupyterlab", "1 rank", "2 ranks", "4 ranks", "loopback", "host name", "temporary",
                    "capacity"):
        assert any(line[6:].startswith(subject) for line in text.splitlines()), f"nothing about {subject}"
    assert "Nothing blocks" in text


def test_torch_out_of_range_blocks(monkeypatch, capsys):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1" if name == "torch" else real(name))
    assert doctor.main(["--no-selftest"]) == 2
    text = capsys.readouterr().out
    assert "FAIL  torch" in text and "2.9.1 is outside <2.15,>=2.11" in text and "fix: pip install 'torch" in text


def test_missing_lab_package_is_no_block(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in ("jupyterlab", "numpy"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = doctor.check_versions()
    assert [finding.subject for finding in of(found, Level.WARN)] == ["jupyterlab"]
    assert [finding.subject for finding in of(found, Level.FAIL)] == ["numpy"]


@pytest.mark.parametrize(("free", "level"), [(0.1, Level.FAIL), (2, Level.WARN), (50, Level.OK)])
def test_free_disk(monkeypatch, free, level):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, int(free * 2**30)))
    found = doctor.check_disk()
    assert {finding.level for finding in found} == {level} and len(found) == 2
    assert all(bool(finding.fix) == (level is not Level.OK) for finding in found)


def test_temporary_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "gone"))
    blocked = of(doctor.check_disk(), Level.FAIL)
    assert [finding.subject for finding in blocked] == ["temporary"] and "TMPDIR" in blocked[0].fix


def test_no_loopback_blocks(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0"), (2, "tun0")])
    blocked = of(doctor.check_network(), Level.FAIL)
    assert [finding.subject for finding in blocked] == ["loopback"] and blocked[0].fix


def test_host_name_that_does_not_resolve_only_warns(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")

    def fail(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    found = doctor.check_network()
    assert not of(found, Level.FAIL)
    assert "no-such-host.invalid" in of(found, Level.WARN)[0].text and "/etc/hosts" in of(found, Level.WARN)[0].fix


@pytest.mark.parametrize(("gpus", "expected"), [(0, ["gloo", "gloo", "gloo"]), (1, ["nccl", "gloo", "gloo"]), (2, ["nccl", "nccl", "gloo"]),
                                                (4, ["nccl", "nccl", "nccl"])])
def test_backend_for_each_world_size(monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: namedtuple("P", "name total_memory")("A card", 80 * 2**30))
    found = doctor.check_backends()
    assert [finding.text.split()[0] for finding in found if "rank" in finding.subject] == expected
    assert sum("A card, 80 GiB" in finding.text for finding in found) == gpus
    if gpus == 1:
        assert "one rank a GPU" in found[-1].text


@pytest.mark.parametrize(("gib", "level"), [(0.5, Level.FAIL), (2.0, Level.WARN), (64, Level.OK)])
def test_memory_limits_the_ranks(monkeypatch, gib, level):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(int(gib * 2**30)))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert [finding.level for finding in doctor.check_capacity()] == [level]


def test_check_that_breaks_hides_no_other(monkeypatch):
    def broken():
        raise RuntimeError("driver says no")

    broken.__name__ = "check_backends"
    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.check_disk))
    found = doctor.examine(selftest=False)
    assert found[0].level is Level.WARN and "driver says no" in found[0].text and len(found) == 3


def test_self_test_reads_wrong_numbers_as_a_block(monkeypatch):
    monkeypatch.setattr(doctor, "run_self_test", lambda: ([("all-reduce (mean)", False, 0.001), ("all-gather", True, 0.001)], ""))
    found = doctor.check_self_test()
    assert [finding.level for finding in found] == [Level.FAIL, Level.OK] and "all-reduce (mean): AVG is no average" in found[0].text


def test_self_test_says_what_is_slow_and_what_checking_costs(monkeypatch):
    times = [("all-gather", True, 0.9), ("small all-reduce", True, 0.001), (selftest.CHECKED, True, 0.0015)]
    monkeypatch.setattr(doctor, "run_self_test", lambda: (times, ""))
    found = doctor.check_self_test()
    assert found[0].level is Level.WARN and "slow" in found[0].text and found[0].fix
    assert found[-1].subject == "check_calls" and "adds 0.50 ms to a collective (1.00 -> 1.50 ms)" in found[-1].text


def _self_test(rank, world):
    from fsdp_ref import world as worlds
    return selftest.collectives_under_test(worlds.current())


NAMES = ["all-gather", *(f"{operation} ({name})" for name in ("sum", "mean") for operation in ("reduce-scatter", "all-reduce")),
         *(f"{operation} ({name}, the library's own)" for name in ("sum", "mean", "largest", "smallest", "product")
           for operation in ("reduce-scatter", "all-reduce")),
         "broadcast", "exchange of facts", "small all-reduce", "small all-reduce, calls compared"]


def test_collectives_give_the_right_numbers(ranks):
    for results in ranks(2, _self_test):
        assert [name for name, _, _ in results] == NAMES
        assert all(right for _, right, _ in results)


def _mean_is_a_sum(rank, world):
    """What a backend whose AVG only adds would give."""
    from fsdp_ref import world as worlds
    scatter = "reduce_scatter_single" if hasattr(torch.distributed, "reduce_scatter_single") else "reduce_scatter_tensor"
    real = {name: getattr(torch.distributed, name) for name in ("all_reduce", scatter)}
    for name, call in real.items():
        def only_adds(*tensors, op=None, call=call, **rest):
            return call(*tensors, op=torch.distributed.ReduceOp.SUM if op == torch.distributed.ReduceOp.AVG else op, **rest)

        setattr(torch.distributed, name, only_adds)
    try:
        return selftest.collectives_under_test(worlds.current())
    finally:
        for name, call in real.items():
            setattr(torch.distributed, name, call)


def test_mean_that_is_a_sum_is_noticed(ranks):
    for results in ranks(2, _mean_is_a_sum):
        assert [name for name, right, _ in results if not right] == [name for name in NAMES if "mean" in name]


@pytest.mark.slow
def test_self_test_in_processes_of_its_own():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    results, problem = selftest.run_self_test(limit=120)
    assert problem == "" and len(results) == len(NAMES) and all(right for _, right, _ in results)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_self_test_that_takes_too_long_ends_and_says_so():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    results, problem = selftest.run_self_test(limit=0.2)
    assert results == [] and "did not finish within 0.2 s" in problem
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
