"""From a checkpoint to torch's own format, torch.distributed.checkpoint (DCP), so that a stock `dcp.load` continues the run.

    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=out_dir)                       # any number of ranks, torch's fully_shard or ours

The entries are those that `dcp.save` of such a state writes (torch/distributed/checkpoint/state_dict.py and _nested_dict.py):

    model.<name>                          every parameter and buffer, under each of its names (a tied one is stored once a name, as there)
    optim.state.<parameter>.<key>         moments and counters
    optim.param_groups.<i>.<option>       the groups; `params` lists names
    step                                  number of finished steps
    fsdp_ref                              JSON text: optimizer class, tied names, scheduler, loader, extra (as `jsontext.encode` has them)

`dcp.load` ignores what it is not asked for, so the last two are in nobody's way; `from_dcp` takes them up again.

DCP's `.metadata` is a pickle, and torch reads it as one: give such a directory only to people who trust you. This module writes it
through torch's own writer, one process, one block of at most 8 MiB at a time. It never reads a pickle.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from .jsontext import decode, dump
from .layout import Box
from .manifest import Manifest, OptimizerEntry, TensorEntry
from .publish import new_directory
from .safetensors_file import DTYPES
from .streaming import BLOCK, TensorReader
from .verify import examine

SECTIONS = ("scheduler", "loader", "extra")


def to_dcp(step_dir: str | os.PathLike, out_dir: str | os.PathLike) -> Path:
    """Write a checkpoint as a DCP directory (see the module's text for its entries); returns it. No process group is needed.

    Random states are not converted: DCP has no place for what differs by rank.

    Raises:
        CheckpointError: the checkpoint is damaged (every byte is verified first), or `out_dir` is taken.
    """
    step_dir = Path(step_dir)
    manifest = examine(step_dir)
    with new_directory(out_dir) as directory, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")       # one process is what is wanted here
        writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        dcp.save(_state(manifest), storage_writer=writer, planner=_Streaming(step_dir, manifest), no_dist=True)
    return Path(out_dir)


def _state(manifest: Manifest) -> dict:
    """The nested state; a tensor that is to be streamed stands there on the meta device."""
    names = {**{name: name for name in manifest.model}, **manifest.aliases}
    state: dict = {"model": {name: _placeholder(manifest.model[target]) for name, target in sorted(names.items())}, "step": manifest.step}
    if manifest.optimizer:
        state["optim"] = _optimizer(manifest.optimizer)
    companions = {section: getattr(manifest, section) for section in SECTIONS}
    kind = manifest.optimizer.kind if manifest.optimizer else None
    state["fsdp_ref"] = dump({"optimizer_class": kind, "aliases": manifest.aliases, **companions})
    return state


def _optimizer(saved: OptimizerEntry) -> dict:
    state: dict = {}
    for entry in saved.tensors.values():
        state.setdefault(entry.parameter, {})[entry.key] = _placeholder(entry)
    for parameter, values in saved.values.items():
        state.setdefault(parameter, {}).update(decode(values))
    return {"state": state, "param_groups": [{"params": list(group["parameters"]), **decode(group["options"])} for group in saved.groups]}


def _placeholder(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


class _Streaming(DefaultSavePlanner):
    """torch's planner, with a tensor on the meta device written in blocks that are read when their turn comes."""

    def __init__(self, step_dir: Path, manifest: Manifest) -> None:
        super().__init__()
        self.manifest = manifest
        self.readers = {kind: TensorReader(step_dir, tensors) for kind, tensors in manifest.sections().items()}
        owned = manifest.optimizer.tensors if manifest.optimizer else {}
        self.optimizer_names = {(entry.parameter, entry.key): name for name, entry in owned.items()}

    def create_local_plan(self) -> SavePlan:
        """One item a block for what is streamed; torch's own items for the rest."""
        streamed = {key: tensor for key, tensor in self.state_dict.items() if isinstance(tensor, torch.Tensor) and tensor.is_meta}
        whole = self.state_dict
        self.state_dict = {key: value for key, value in whole.items() if key not in streamed}
        plan = super().create_local_plan()
        self.state_dict = whole
        items = [item for key, tensor in streamed.items() for item in _items(key, tensor)]
        self.plan = dataclasses.replace(plan, items=plan.items + items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        """The value of an entry; a block of a streamed tensor is read from its files."""
        value = self.state_dict[index.fqn]
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        kind, name = self.place(self.mappings[index.fqn])
        block = next(box for box in Box.whole(tuple(value.shape)).blocks(BLOCK) if box.offsets == tuple(index.offset))
        return self.readers[kind].read(name, block)

    def place(self, path: tuple) -> tuple[str, str]:
        """The section and the name in it of the tensor at a path of the nested state."""
        if path[0] == "model":
            return "model", self.manifest.aliases.get(path[1], path[1])
        return "optimizer", self.optimizer_names[path[2], path[3]]


def _items(key: str, tensor: torch.Tensor) -> list[WriteItem]:
    """What to write for one streamed tensor."""
    properties = TensorProperties(dtype=tensor.dtype)
    items = []
    for position, box in enumerate(Box.whole(tuple(tensor.shape)).blocks(BLOCK)):
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        items.append(WriteItem(MetadataIndex(key, chunk.offsets, position), WriteItemType.SHARD,
                               tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size())))
    return items
