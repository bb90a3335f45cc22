"""`fsdp-ref doctor`: what this machine will use (versions, backend, GPUs, interface, disk, cores) and what is wrong, each with its fix.

It changes nothing and downloads nothing. Every check ends by itself within its limit; a check that cannot be made is a finding too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from . import world
from .selftest import CHECKED, LIMIT, run_self_test

GIB = 2**30
RANK_MEMORY = 0.7 * GIB          # one rank with torch imported and a lesson's model, measured on Linux, rounded up
DISK_FAIL, DISK_WARN = 0.5 * GIB, 5 * GIB
SLOW = 0.25                      # seconds for a collective of 4 MiB between two processes of one machine


class Level(StrEnum):
    """How bad a finding is. Only FAIL blocks."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do about it (empty when nothing)."""

    level: Level
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.subject:<14} {self.text}"
        return line + (f"\n      {'':<14} fix: {self.fix}" if self.fix else "")


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


# -- the checks: each returns its findings ------------------------------------------------------------------------------------


def requirements() -> list[Requirement]:
    """What the package asks for, lab included: from pyproject.toml in a checkout, else from the installed package."""
    project = Path(__file__).parent.parent / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text()).get("project", {})
        if table.get("name") == "fsdp-ref":
            return [Requirement(text) for text in table["dependencies"] + table["optional-dependencies"]["lab"]]
    wanted = map(Requirement, importlib.metadata.requires("fsdp-ref") or [])
    return [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": "lab"})]


def check_system() -> list[Finding]:
    """Operating system and Python."""
    found = []
    if sys.platform not in ("linux", "darwin"):
        found.append(Finding(Level.FAIL, "system", f"{sys.platform} is not supported", "on Windows use WSL2 and work inside its Linux"))
    version = ".".join(map(str, sys.version_info[:3]))
    found.append(ok("python", f"{version} ({sys.executable})"))
    return found


def check_versions() -> list[Finding]:
    """Each required package: there, and in range."""
    try:
        wanted = requirements()
    except importlib.metadata.PackageNotFoundError:
        return [Finding(Level.WARN, "fsdp-ref", "is not installed, so the ranges it asks for are unknown", "pip install fsdp-ref")]
    core = {"torch", "numpy", "safetensors", "xxhash", "psutil", "tqdm", "matplotlib"}
    found = []
    for need in wanted:
        level = Level.FAIL if need.name in core else Level.WARN
        repair = f"pip install '{need.name}{need.specifier}'"
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(level, need.name, "is not installed" + ("" if need.name in core else " (notebooks need it)"), repair))
            continue
        if need.specifier.contains(version, prereleases=True):
            found.append(ok(need.name, f"{version} (asked for: {need.specifier})"))
        else:
            found.append(Finding(level, need.name, f"{version} is outside {need.specifier}", repair))
    return found


def check_backends(sizes: tuple[int, ...] = (1, 2, 4)) -> list[Finding]:
    """What carries the collectives of 1, 2 and 4 ranks on this machine, and why."""
    gpus = torch.cuda.device_count()
    found = []
    for index in range(gpus):
        properties = torch.cuda.get_device_properties(index)
        found.append(ok(f"gpu {index}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"))
    if not gpus:
        found.append(ok("gpus", "none; every lesson runs on the CPU too"))
    for size in sizes:
        backend = world.choose_backend(size)
        if backend == "nccl":
            reason = "a GPU for each rank"
        else:
            reason = "no GPU" if not gpus else f"{gpus} GPU{'s' if gpus > 1 else ''} for {size} ranks, and NCCL takes one rank a GPU"
        found.append(ok(f"{size} rank{'s' if size > 1 else ''}", f"{backend} on {'cuda' if backend == 'nccl' else 'cpu'} ({reason})"))
    return found


def check_network() -> list[Finding]:
    """The loopback interface, which ranks of one machine use, and whether this machine's own name resolves."""
    interface = world.loopback_interface()
    if interface is None:
        found = [Finding(Level.FAIL, "loopback", "this machine has no loopback interface, through which its ranks talk",
                         "bring it up: ip link set lo up")]
    else:
        found = [ok("loopback", interface)]
    name = socket.gethostname()
    address = _limited(lambda: socket.getaddrinfo(name, None)[0][4][0], 3.0)
    if address is None:
        found.append(Finding(Level.WARN, "host name", f"{name!r} does not resolve; ranks on one machine do not mind, several machines do",
                             f"add it to /etc/hosts: 127.0.1.1 {name}"))
    else:
        found.append(ok("host name", f"{name} resolves to {address}"))
    return found


def check_disk() -> list[Finding]:
    """Free space where runs are written and in the temporary folder, and that both can be written to."""
    found = []
    for subject, folder in (("this folder", Path.cwd()), ("temporary", Path(tempfile.gettempdir()))):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            fix = "set TMPDIR to a folder you may write to" if subject == "temporary" else "work in a folder you may write to"
            level = Level.FAIL if subject == "temporary" else Level.WARN
            found.append(Finding(level, subject, f"{folder} cannot be written to ({error.strerror})", fix))
            continue
        free = shutil.disk_usage(folder).free
        text = f"{free / GIB:.1f} GiB free in {folder}"
        if free < DISK_FAIL:
            found.append(Finding(Level.FAIL, subject, text, "free at least 1 GiB, or work elsewhere"))
        elif free < DISK_WARN:
            text += "; enough for the lessons, not for many checkpoints"
            found.append(Finding(Level.WARN, subject, text, "free some space before long runs"))
        else:
            found.append(ok(subject, text))
    return found


def check_capacity() -> list[Finding]:
    """Cores and memory, and how many ranks they carry."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    available = psutil.virtual_memory().available
    by_memory = int(available / RANK_MEMORY)
    sensible = max(min(max(2 * cores, 2), by_memory), 0)
    text = f"{cores} core{'s' if cores > 1 else ''}, {available / GIB:.1f} GiB of memory available: up to {sensible} ranks are sensible"
    if sensible < 2:
        return [Finding(Level.FAIL, "capacity", text, "close other programs: two ranks need about 1.5 GiB")]
    if sensible < 4:
        return [Finding(Level.WARN, "capacity", text, f"start {sensible} ranks where a lesson starts 4, or close other programs")]
    return [ok("capacity", text)]


def check_self_test() -> list[Finding]:
    """Two real ranks: do the collectives give the right numbers here, and how long do they take?"""
    results, problem = run_self_test()
    if problem:
        return [Finding(Level.FAIL, "self-test", problem,
                        "look at the findings above first; a very busy machine, or a firewall on the loopback interface, may be why")]
    return [_judged(*result) for result in results] + _cost_of_checking(results)


def _judged(name: str, right: bool, seconds: float) -> Finding:
    """One collective of the self-test: wrong, slow, or fine."""
    if not right:
        wrong = "AVG is no average here, gradients would be wrong by a factor" if "mean" in name else "wrong numbers"
        return Finding(Level.FAIL, "self-test", f"{name}: {wrong}",
                       "reinstall torch in the pinned version: pip install -c constraints.txt --force-reinstall torch")
    text = f"{name}: right, {seconds * 1e3:.1f} ms"
    if seconds > SLOW:
        return Finding(Level.WARN, "self-test", f"{text}, slow for 4 MiB (a few ms on a quiet machine)",
                       "close other programs, or give the ranks more cores; the lessons work, but wait longer")
    return ok("self-test", text)


def _cost_of_checking(results: list[tuple[str, bool, float]]) -> list[Finding]:
    """What it costs that the ranks compare their calls before they make them."""
    times = {name: seconds * 1e3 for name, _, seconds in results}
    if CHECKED not in times:
        return []
    plain, checked = times["small all-reduce"], times[CHECKED]
    return [ok("check_calls", f"comparing calls adds {max(checked - plain, 0):.2f} ms to a collective ({plain:.2f} -> {checked:.2f} ms); "
               "it is on in the lab, and in scripts with FSDP_REF_CHECK_CALLS=1")]


def _limited(call: Callable[[], object], seconds: float) -> object | None:
    """The result of `call`, or None when it raises or takes longer than `seconds` (it is then left behind on its thread)."""
    box: list[object] = []

    def work() -> None:
        try:
            box.append(call())
        except (OSError, UnicodeError):
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else None


# -- the command --------------------------------------------------------------------------------------------------------------

CHECKS: tuple[Callable[[], list[Finding]], ...] = (check_system, check_versions, check_backends, check_network, check_disk, check_capacity)


def examine(selftest: bool = True) -> list[Finding]:
    """Every check's findings. A check that itself fails is reported, and the others still run."""
    found: list[Finding] = []
    for check in (*CHECKS, *((check_self_test,) if selftest else ())):
        try:
            found += check()
        except Exception as error:                       # a broken driver or a strange system must not hide the other findings
            subject = check.__name__.removeprefix("check_").replace("_", " ")
            found.append(Finding(Level.WARN, subject, f"could not be looked at ({type(error).__name__}: {error})", "please report this"))
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 0 when nothing blocks, else 2."""
    parser = argparse.ArgumentParser(prog="fsdp-ref doctor",
                                     description="Show what this machine will use, and what is wrong, each with its fix.")
    parser.add_argument("--no-selftest", action="store_true", help=f"leave out the test with two real ranks (at most {LIMIT:.0f} s)")
    given = parser.parse_args(argv)
    found = examine(selftest=not given.no_selftest)
    for finding in found:
        print(finding)
    bad = [finding for finding in found if finding.level is Level.FAIL]
    doubtful = sum(finding.level is Level.WARN for finding in found)
    print(f"\n{len(bad)} blocking, {doubtful} to look at, {len(found) - len(bad) - doubtful} fine. "
          + ("Do what stands behind each 'fix:' of a FAIL first." if bad else "Nothing blocks: the lab can run."))
    return 2 if bad else 0
