"""Which parameters a unit owns: those of its modules that no inner unit has taken, each once, with every place that holds it."""

from __future__ import annotations

import torch
from torch import nn

from .hooks import hooks_of


def owned_modules(modules: tuple[nn.Module, ...]) -> list[nn.Module]:
    """`modules` and what is below them, without inner units; each once, outermost first."""
    owned: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in owned or hooks_of(module) is not None:
            return
        owned[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(owned)


def owned_params(owned: list[nn.Module], ignored: set[nn.Parameter]) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Each parameter once, with every place that holds it: a tied one has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in owned:
        for name, param in module._parameters.items():
            if param is not None and param not in ignored:
                places.setdefault(param, []).append((module, name))
    return list(places.items())


def move(owned: list[nn.Module], device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Parameters and buffers go to the device that computes; what is on meta stays there until `to_empty`."""
    for module in owned:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor not in ignored and tensor.device.type not in ("meta", device.type):
                tensor.data = tensor.data.to(device)
