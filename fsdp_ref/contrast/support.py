"""What both contrasts need and neither is about: who holds which parameter, and a few words with autograd and the books.

This module must never start a collective.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .. import ledger, world
from ..errors import ConfigError, WorldError
from ..ledger import Category

FLAT = "flat_param"                                                    # FSDP1's name for a unit's flat parameter
Places = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]          # parameter -> (module, attribute, full name); several if tied


def claims(module: nn.Module, units: set[nn.Module]) -> dict[tuple[str, nn.Module], Places]:
    """The parameters of every unit (name, module): those of its modules that no unit inside it has, with every place that holds them.

    Raises:
        ConfigError: a parameter has no memory of its own to cut (it is on the meta device or sharded already), or two units use it.
    """
    unit_of: dict[str, tuple[str, nn.Module]] = {}
    found: dict[tuple[str, nn.Module], Places] = {}
    owner: dict[nn.Parameter, tuple[str, str]] = {}
    for name, child in module.named_modules():                                      # parents come before their children
        unit_of[name] = (name or "(root)", child) if child in units else unit_of[name.rpartition(".")[0]]
        for attribute, param in child._parameters.items():
            if param is None:
                continue
            full_name = f"{name}.{attribute}" if name else attribute
            if param.is_meta or isinstance(param, DTensor) or attribute == FLAT:
                raise ConfigError(f"{full_name} is on the meta device or sharded already; build whole weights, and shard them once")
            unit, first_name = owner.setdefault(param, (unit_of[name][0], full_name))
            if unit != unit_of[name][0]:
                raise ConfigError(f"{full_name} of unit {unit_of[name][0]} is tied to {first_name} of unit {unit}; put both into one unit")
            found.setdefault(unit_of[name], {}).setdefault(param, []).append((child, attribute, full_name))
    return found


def ranks_of(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int, int]:
    """(group, world size, rank) of `group`, or of all ranks; a process without a process group joins one first, as in `fully_shard`.

    Raises:
        WorldError: this rank is not in the group.
    """
    if not dist.is_initialized():
        world.start()
    group = group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise WorldError(f"rank {dist.get_rank()} is not part of the group to shard over; give a group with every rank that runs the model")
    return group, dist.get_world_size(group), dist.get_rank(group)


def hold_shard(unit: str, name: str, param: torch.Tensor, shape: tuple[int, ...], part: tuple[int, int, int]) -> int:
    """Enter this rank's rows of one parameter (what `chunk_rows` returned) into the ledger; returns the token."""
    chunk, first, own = part
    return ledger.hold_shards([ledger.Shard(ledger.rank(), unit, name, shape, str(param.dtype).removeprefix("torch."), first, own, chunk)])


def book_while_alive(category: Category, unit: str, tensor: torch.Tensor) -> None:
    """Enter the memory of `tensor` into the ledger until nothing uses it: no view, no autograd node, no `.grad`."""
    storage = tensor.untyped_storage()
    weakref.finalize(storage, ledger.free, ledger.allocate(category, unit, storage.nbytes(), (tensor,)))


def in_backward() -> bool:
    """Whether autograd is running backward on this thread: a forward that runs now is a recomputation."""
    return torch._C._current_graph_task_id() != -1
