"""pyproject.toml, constraints.txt and environment.yml say the same about versions."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins() -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    parts = [line.split("==") for line in lines if line]
    assert all(len(part) == 2 for part in parts), "constraints.txt holds NAME==VERSION lines only"
    names = [canonicalize_name(name) for name, _ in parts]
    assert len(names) == len(set(names)), "a package is pinned twice"
    return {name: Version(version) for name, (_, version) in zip(names, parts, strict=True)}


def asked_for() -> list[Requirement]:
    texts = PROJECT["dependencies"] + EXTRAS["lab"] + EXTRAS["test"]
    return [need for text in texts if (need := Requirement(text)).name != "fsdp-ref"]


@pytest.mark.parametrize("need", asked_for(), ids=lambda need: need.name)
def test_every_range_has_a_pin_inside_it(need):
    pin = pins()[canonicalize_name(need.name)]
    assert need.specifier, f"{need.name} has no range in pyproject.toml"
    assert need.specifier.contains(pin), f"{need.name}=={pin} is outside {need.specifier}"


def test_what_the_requirements_need_in_turn_is_pinned_too():
    """Walk what is installed here from the requirements down. Names only: another version may be under test."""
    pinned, seen, pending = pins(), set(), [(need.name, frozenset(need.extras)) for need in asked_for()]
    while pending:
        name, extras = pending.pop()
        if (canonicalize_name(name), extras) in seen:
            continue
        seen.add((canonicalize_name(name), extras))
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                if not re.match(r"(nvidia|cuda|triton)", need.name):               # torch's own pins on Linux with CUDA
                    pending.append((need.name, frozenset(need.extras)))
    missing = {name for name, _ in seen} - set(pinned)
    assert not missing, f"constraints.txt lacks {sorted(missing)}"


def test_pins_work_on_every_system():
    text = (ROOT / "constraints.txt").read_text()
    assert "+" not in text, "a local version (torch's +cpu) exists in one place only"
    assert not re.search(r"^(nvidia|triton|cuda)", text, re.M), "torch pins these itself, where they exist"
    assert pins()["torch"] == Version("2.13.0")


def test_conda_installs_the_same_through_pip():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    through_pip = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert through_pip == [["-c constraints.txt", "-e .[lab,test]"]]
    assert {re.split(r"[<>=]", entry)[0] for entry in plain} == {"python", "pip"}, "conda brings Python and pip, pip brings the rest"
    python = next(SpecifierSet(entry.removeprefix("python")) for entry in plain if entry.startswith("python"))
    supported = SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 30):
        version = f"3.{minor}.0"
        assert version not in python or version in supported, f"environment.yml allows Python 3.{minor}, pyproject.toml does not"
    assert "3.11.0" in python
    assert any(str(part).startswith("<") for part in python), "conda must not pick a Python that torch has no build for"


def test_extras_and_command():
    assert "fsdp-ref[lab]" in EXTRAS["test"], "the tests run the notebooks, so they need the lab"
    assert PROJECT["scripts"] == {"fsdp-ref": "fsdp_ref.cli:main"}
    assert Requirement(PROJECT["dependencies"][0]).specifier == SpecifierSet(">=2.11,<2.15")
