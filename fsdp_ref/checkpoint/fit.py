"""Does a checkpoint fit a model and its optimizer? Compares by name, before anything is changed, and plans the reading.

Names must match both ways, and so must global shapes, types, ties and parameter groups. State that a parameter does not have in the
checkpoint it will not have afterwards; state that it has and a fresh optimizer lacks is made, shaped and placed like the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from . import reading
from .jsontext import decode
from .manifest import Manifest, TensorEntry
from .safetensors_file import DTYPES
from .state import LocalTensor, ModelState, OptimizerState, model_state, optimizer_state


@dataclass
class Plan:
    """What goes where. `names`: a saved name -> the model's own name for the tensor (they differ only among tied names)."""

    manifest: Manifest
    model: ModelState
    names: dict[str, str]
    torch_optimizer: torch.optim.Optimizer | None = None
    optimizer: OptimizerState | None = None
    group_of: dict[int, dict] | None = None          # number of a group of the optimizer -> saved group

    @staticmethod
    def make(manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Plan:
        """Compare and plan. Raises CheckpointError naming what does not fit."""
        state = model_state(model)
        plan = Plan(manifest, state, _match_names(manifest, state))
        for saved, entry in manifest.model.items():
            _same_kind(saved, entry, state.tensors[plan.names[saved]])
        if optimizer is not None:
            if manifest.optimizer is None:
                raise CheckpointError("the checkpoint has no optimizer state; save it with optimizer=, or load without it")
            plan.torch_optimizer, plan.optimizer = optimizer, optimizer_state(optimizer, state)
            plan.group_of = plan.match_groups()
            plan.check_state()
        return plan

    def model_jobs(self) -> dict[str, list[reading.Job]]:
        """What to read for the parameters and buffers."""
        return reading.plan(self.manifest.model, {saved: self.model.tensors[name] for saved, name in self.names.items()})

    # -- the optimizer --------------------------------------------------------------------------------------------------------

    def match_groups(self) -> dict[int, dict]:
        """Find the saved group of each group, by its set of parameter names."""
        saved, mine = self.manifest.optimizer, self.optimizer
        if saved.kind != mine.kind:
            raise CheckpointError(f"the checkpoint holds the state of {saved.kind} and the optimizer is {mine.kind}; build the optimizer "
                                  "that was saved, or load without it")
        if len(saved.groups) != len(mine.groups):
            raise CheckpointError(f"the checkpoint has {len(saved.groups)} parameter groups and the optimizer has {len(mine.groups)}; "
                                  "build the optimizer as in the run that saved it")
        left, match = list(saved.groups), {}
        for index, group in enumerate(mine.groups):
            wanted = set(group["parameters"])
            found = next((other for other in left if {self.names[name] for name in other["parameters"]} == wanted), None)
            if found is None:
                raise CheckpointError(f"group {index} of the optimizer ({some(sorted(wanted))}) has no counterpart in the checkpoint; put "
                                      "the same parameters together as in the run that saved it")
            left.remove(found)
            match[index] = found
        return match

    def existing(self) -> dict[tuple[str, str], LocalTensor]:
        """The state tensors that the optimizer has already, by parameter and key."""
        return {(name, key): local for name, key, local in self.optimizer.tensors.values()}

    def check_state(self) -> None:
        """State that exists already must have the saved keys, shapes and types; what a fresh optimizer lacks will be made so."""
        have = self.existing()
        self.check_keys(have)
        for entry in self.manifest.optimizer.tensors.values():
            name = self.names[entry.parameter]
            if (name, entry.key) in have:
                _same_kind(f"optimizer state {entry.key} of {name}", entry, have[name, entry.key])

    def check_keys(self, have: dict[tuple[str, str], LocalTensor]) -> None:
        """A parameter that has state on both sides has the same keys on both."""
        saved: dict[str, set[str]] = {self.names[parameter]: set(values) for parameter, values in self.manifest.optimizer.values.items()}
        for entry in self.manifest.optimizer.tensors.values():
            saved.setdefault(self.names[entry.parameter], set()).add(entry.key)
        mine: dict[str, set[str]] = {name: set(values) for name, values in self.optimizer.values.items()}
        for name, key in have:
            mine.setdefault(name, set()).add(key)
        for name in sorted(saved.keys() & mine.keys()):
            for key in sorted(saved[name] ^ mine[name]):
                theirs, ours = ("lacks", "has") if key in mine[name] else ("has", "lacks")
                raise CheckpointError(f"the checkpoint {theirs} state {key} of {name}, which the optimizer {ours}; build the optimizer as "
                                      "in the run that saved it")

    def fill_optimizer(self, path: Path) -> int:
        """Make what is missing, read the tensors, set values and options; returns the bytes read."""
        have, options = self.existing(), self.options()
        optimizer, state, targets = self.torch_optimizer, {}, {}
        for label, entry in self.manifest.optimizer.tensors.items():
            name = self.names[entry.parameter]
            parameter = self.optimizer.parameters[name]
            if (name, entry.key) in have:
                tensor, targets[label] = optimizer.state[parameter][entry.key], have[name, entry.key]
            else:
                tensor = _new_state(entry, parameter, options[name])
                targets[label] = LocalTensor.of(label, tensor)
            state.setdefault(name, {})[entry.key] = tensor
        nbytes = reading.fill(path, reading.plan(self.manifest.optimizer.tensors, targets))
        for saved, values in self.manifest.optimizer.values.items():
            state.setdefault(self.names[saved], {}).update(decode(values))
        for name, parameter in self.optimizer.parameters.items():
            optimizer.state.pop(parameter, None)
            if name in state:
                optimizer.state[parameter] = state[name]
        self.set_options()
        return nbytes

    def options(self) -> dict[str, dict]:
        """Parameter -> its group, with the options that it has now."""
        groups = zip(self.torch_optimizer.param_groups, self.optimizer.groups, strict=True)
        return {name: group for group, mine in groups for name in mine["parameters"]}

    def set_options(self) -> None:
        """Learning rate and the rest. A learning rate that is a tensor keeps its storage, for a captured graph may read it."""
        for index, group in enumerate(self.torch_optimizer.param_groups):
            for key, value in decode(self.group_of[index]["options"]).items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _match_names(manifest: Manifest, model: ModelState) -> dict[str, str]:
    """Saved name -> the model's name. All names must exist on both sides and be tied in the same way."""
    saved = manifest.model.keys() | manifest.aliases.keys()
    mine = model.tensors.keys() | model.aliases.keys()
    if missing := sorted(mine - saved):
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors of the model: {some(missing)}; load it into the model that "
                              "was saved")
    if unexpected := sorted(saved - mine):
        raise CheckpointError(f"the checkpoint has {len(unexpected)} tensors that the model lacks: {some(unexpected)}; load it into the "
                              "model that was saved")
    names = {}
    for name in manifest.model:
        names[name] = model.aliases.get(name, name)
    for alias, name in manifest.aliases.items():
        if model.aliases.get(alias, alias) != names[name]:
            raise CheckpointError(f"{alias} and {name} are one tensor in the checkpoint and two in the model; tie them before loading")
    if len(set(names.values())) != len(names):
        tied = next(name for name in names if list(names.values()).count(names[name]) > 1)
        raise CheckpointError(f"{tied} shares a tensor in the model and stands alone in the checkpoint; untie it before loading")
    return names


def _same_kind(name: str, entry: TensorEntry, local: LocalTensor) -> None:
    if entry.shape != local.shape:
        raise CheckpointError(f"{name} has the shape {list(entry.shape)} in the checkpoint and {list(local.shape)} in memory; load it into "
                              "the model that was saved")
    if entry.dtype != local.dtype:
        raise CheckpointError(f"{name} has the type {entry.dtype} in the checkpoint and {local.dtype} in memory; convert the model to "
                              f"{DTYPES[entry.dtype]} before loading")


def _new_state(entry: TensorEntry, parameter: torch.Tensor, options: dict) -> torch.Tensor:
    """An empty state tensor for an optimizer that has not stepped: like the parameter when it has its shape, else plain.

    `step` lies on the CPU as torch's optimizers want it, except with `capturable` or `fused`.
    """
    dtype = DTYPES[entry.dtype]
    if entry.shape == tuple(parameter.shape) and entry.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    host = entry.key == "step" and not (options.get("capturable") or options.get("fused"))
    return torch.empty(entry.shape, dtype=dtype, device="cpu" if host else local.device)


def some(names: list[str]) -> str:
    """The first five of the names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
