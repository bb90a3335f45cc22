"""Which tensors a model and its optimizer have, and which part of each lies on this rank.

A parameter is a `DTensor` (each rank has a box of it) or a plain tensor (every rank has all of it). Both come out as a
`LocalTensor`: this rank's part, the box that it is, and the smaller box that this rank writes. Optimizer state is matched to
parameters by name, never by number. This module reads; it never changes a tensor and never makes a collective.

[Note: who writes a replicated tensor] Rows of a tensor that R ranks hold alike are cut into R parts as torch.chunk does, and each
rank writes one. So a DDP checkpoint is written by all ranks at once and has the very files of a sharded one: 5 rows on 2 ranks ->
rank 0 writes rows 0-2, rank 1 rows 3-4, whether rank 1 holds rows 0-2 as well or not. A scalar is written by the first of them.
Ranks may hold different values where they should not (running statistics of a BatchNorm that sees its own rank's data); such a
tensor is found by its digest and written whole by the first, with a warning, so that no mixture of two ranks is ever saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..errors import CheckpointError
from . import votes
from .jsontext import encode
from .layout import Box
from .manifest import state_name
from .safetensors_file import dtype_name


@dataclass(frozen=True)
class LocalTensor:
    """This rank's part of a tensor.

    Attributes:
        name: what files call it.
        dtype: safetensors' name of the type.
        shape: the global shape.
        part: the elements on this rank, shape `box.sizes`; writing to it changes the model.
        box: which elements these are.
        replicas: number of ranks that hold the same box (0: this rank is outside the tensor's mesh and holds nothing).
        replica: which of them this rank is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: torch.Tensor
    box: Box
    replicas: int
    replica: int

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> LocalTensor:
        """Look at one tensor. Raises CheckpointError naming it when it is of a kind that cannot be saved."""
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{name} is a {type(tensor).__name__} and no tensor; a checkpoint holds a model's tensors only, "
                                  "make it a buffer or give it as extra=")
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name} is on the meta device and has no elements; call model.to_empty(device=...) first")
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{name} is sparse, which safetensors cannot hold; convert it with to_dense()")
        if tensor.is_conj() or tensor.is_neg():
            raise CheckpointError(f"{name} is a conjugated or negated view, whose bytes are another tensor's; replace it by what "
                                  "resolve_conj() and resolve_neg() give")
        shape = tuple(tensor.shape)
        with torch.no_grad():
            part = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
        box, replicas, replica = _place(name, tensor)
        if replicas and tuple(part.shape) != box.sizes:
            raise CheckpointError(f"{name} has {list(part.shape)} elements on rank {votes.rank()} and torch.chunk gives it "
                                  f"{list(box.sizes)}; shard it evenly rounded up, as fully_shard does")
        return LocalTensor(name, dtype_name(tensor.dtype, name), shape, part, box, replicas, replica)

    def slice(self, box: Box) -> torch.Tensor:
        """The elements of `box`, which must lie in this rank's part; a view."""
        view = self.part
        for dimension, (offset, mine, size) in enumerate(zip(box.offsets, self.box.offsets, box.sizes, strict=True)):
            view = view.narrow(dimension, offset - mine, size)
        return view

    def written(self, differs: bool = False) -> Box | None:
        """What this rank writes; None when others write it all. `differs`: the ranks hold different values.

        See [Note: who writes a replicated tensor].
        """
        if not self.replicas or (differs and self.replica):
            return None
        if not self.shape or Box.whole(self.shape).volume == 0:
            return self.box if self.replica == 0 and not any(self.box.offsets) else None
        share = self.box if differs else self.box.cut(0, self.replicas, self.replica)
        return share if share.volume else None


def _place(name: str, tensor: torch.Tensor) -> tuple[Box, int, int]:
    """This rank's box, how many ranks hold the same box, and which of them this is; 0 ranks when it is outside the mesh."""
    box = Box.whole(tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return box, votes.world_size(), votes.rank()
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if where is None:
        return Box((0,) * tensor.dim(), (0,) * tensor.dim()), 0, 0
    replicas, replica = 1, 0
    for dimension, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            box = box.cut(placement.dim % max(len(tensor.shape), 1), mesh.size(dimension), where[dimension])
        elif type(placement) is Replicate:
            replicas, replica = replicas * mesh.size(dimension), replica * mesh.size(dimension) + where[dimension]
        else:
            raise CheckpointError(f"{name} is placed as {placement}, which a checkpoint cannot hold; finish the reduction or redistribute "
                                  "it to Shard or Replicate first")
    return box, replicas, replica


# -- the model ----------------------------------------------------------------------------------------------------------------


@dataclass
class ModelState:
    """Parameters and persistent buffers by name; a tensor with several names stands under the first, the others in `aliases`."""

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)                  # id of the tensor object -> name


def model_state(model: torch.nn.Module) -> ModelState:
    """Look at a model. Its state_dict hooks run, so a sharded model shows its shards.

    Raises:
        CheckpointError: it holds something that cannot be saved.
    """
    state, seen = ModelState(), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        local = LocalTensor.of(name, tensor)
        key = _identity(tensor)
        if key in seen:
            state.aliases[name] = seen[key]
        else:
            seen[key] = name
            state.tensors[name] = local
        state.name_of[id(tensor)] = seen[key]
    return state


def _identity(tensor: torch.Tensor) -> tuple:
    """Equal for two names of one tensor. Equal values in two tensors are two tensors."""
    if isinstance(tensor, DTensor) or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)


# -- the optimizer ------------------------------------------------------------------------------------------------------------


@dataclass
class OptimizerState:
    """What an optimizer holds, by parameter name.

    Attributes:
        kind: its class name.
        groups: `{"parameters": [names], "options": {...}}` a group, in its order; options in the form of `jsontext.encode`.
        parameters: name -> the optimizer's own parameter.
        tensors: name in the file -> (parameter, state key, tensor).
        values: parameter -> {state key: value that is no tensor, encoded}.
    """

    kind: str
    groups: list[dict]
    parameters: dict[str, torch.Tensor]
    tensors: dict[str, tuple[str, str, LocalTensor]]
    values: dict[str, dict]


def optimizer_state(optimizer: torch.optim.Optimizer, model: ModelState) -> OptimizerState:
    """Look at an optimizer.

    Raises:
        CheckpointError: it updates a parameter that the model does not have, or holds state that cannot be saved.
    """
    groups, parameters = [], {}
    for index, group in enumerate(optimizer.param_groups):
        names = _group_names(index, group, model)
        parameters.update(zip(names, group["params"], strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"parameters": names, "options": encode(options, f"group {index} of the optimizer")})
    tensors: dict[str, tuple[str, str, LocalTensor]] = {}
    values: dict[str, dict] = {}
    for name in sorted(parameters):
        for key, value in sorted(optimizer.state.get(parameters[name], {}).items()):
            if isinstance(value, torch.Tensor):
                label = state_name(name, key)
                tensors[label] = (name, key, _state_tensor(label, value, parameters[name]))
            else:
                values.setdefault(name, {})[key] = encode(value, f"state {key} of {name}")
    return OptimizerState(type(optimizer).__name__, groups, parameters, tensors, values)


def _group_names(index: int, group: dict, model: ModelState) -> list[str]:
    """The names of a group's parameters: the model's where it has the same tensor, else those the optimizer was given."""
    given = group.get("param_names", [None] * len(group["params"]))
    names = [model.name_of.get(id(parameter), name) for parameter, name in zip(group["params"], given, strict=True)]
    for position, name in enumerate(names):
        if name not in model.tensors:
            raise CheckpointError(f"parameter number {position} in group {index} of the optimizer is not one of the model's; build the "
                                  "optimizer after the model is sharded, from model.parameters() or model.named_parameters()")
    return names


def _state_tensor(label: str, value: torch.Tensor, parameter: torch.Tensor) -> LocalTensor:
    """A state tensor. A plain one with the shape of this rank's shard is the shard's (an optimizer that works on local tensors)."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim() and value.shape == parameter.to_local().shape:
        whole = LocalTensor.of(label, parameter)
        return replace(whole, dtype=dtype_name(value.dtype, label), part=value.detach())
    return LocalTensor.of(label, value)
