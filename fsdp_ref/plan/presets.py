"""Named models, read from presets.toml. This file must never need torch."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

from .architecture import Architecture
from .quantities import pick


@functools.cache
def presets() -> dict[str, Architecture]:
    """Every named model, by name."""
    text = resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")
    return {name: Architecture(name=name, **numbers) for name, numbers in tomllib.loads(text).items()}


def preset(name: str) -> Architecture:
    """The named model.

    Raises:
        ConfigError: unknown; the nearest names are offered.
    """
    return presets()[pick("model", name, presets())]
