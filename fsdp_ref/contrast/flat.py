"""One flat parameter a unit: the idea of FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel; arXiv 2304.11277, section 4.2).

Follow one unit, a = [[a0 a1 a2] [a3 a4 a5]] and b = [b0 b1 b2 b3], on 4 ranks. Its 10 elements are padded at the right to 12:

    at rest          rank 0: a0 a1 a2    rank 1: a3 a4 a5    rank 2: b0 b1 b2    rank 3: b3 0 0
    all-gather       every rank: a0 a1 a2 a3 a4 a5 b0 b1 b2 b3 0 0, and a and b are views of it: nothing is copied out
    compute, free
    flat gradient    autograd joins the gradients of the views into one tensor of 12, zeros where it is padded
    reduce-scatter   every rank: the mean of its 3 elements

What it gains over the engine: one contiguous message without copies around it, and less than one element a rank of padding. What it costs
(and FSDP2 was made for): a unit has one dtype and one requires_grad (checked); the optimizer sees slices, so it cannot treat two weights
of a unit differently; slices begin in the middle of a row, so a state dict in the original names needs communication
(`full_state_dict`); and for a moment backward holds the gradients of the views beside the flat one they are joined into.

Left out: prefetch and asynchronous reduction; every collective is waited for at once, so none is hidden under compute. Outputs are tensors
in lists, tuples and dicts; checkpointing is of the non-reentrant kind; weights are not used detached; and a part of a unit cannot run
alone, since outside the unit's forward its weights do not exist. This module must never keep a whole parameter at rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from .. import collectives, ledger
from ..collectives import Label
from ..errors import ConfigError
from ..ledger import Category, Lane
from ..nested import need_gradient
from ..placements import chunk_rows
from .support import FLAT, Places, book_while_alive, claims, hold_shard, in_backward, ranks_of


def flat_shard(module: nn.Module, units: Iterable[nn.Module] | None = None, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Put this rank's slice of one flat parameter (1-D, named `flat_param`) in the place of each unit's parameters; returns `module`.

    Args:
        units: submodules to gather one by one (default: the elements of the model's ModuleLists); `module` itself takes the rest.
        group: the ranks to shard over (default: all).

    Raises:
        ConfigError: a unit mixes dtypes, or frozen and trainable parameters, or shares a parameter with another unit; a parameter is on
            the meta device or sharded already; a unit is no part of `module` or has no forward. Nothing has been changed then.
    """
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    chosen = {module, *([block for holder in lists for block in holder] if units is None else units)}
    inside = set(module.modules())
    for unit in chosen:
        if unit not in inside or type(unit).forward is nn.Module.forward:
            raise ConfigError(f"a {type(unit).__name__} cannot be a unit (it is no part of the model, or has no forward); give others")
    claimed = claims(module, chosen)
    for (name, _), places in claimed.items():
        _refuse_mixture(name, places)
    group, _, _ = ranks_of(group)
    for (name, unit), places in claimed.items():
        if any(param.numel() for param in places):           # else there is nothing to cut
            unit.__dict__["_flat_unit"] = FlatUnit(unit, name, places, group)
    return module


def units_of(module: nn.Module) -> list[FlatUnit]:
    """The units below `module`, in the order of modules."""
    return [child.__dict__["_flat_unit"] for child in module.modules() if "_flat_unit" in child.__dict__]


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters under their original names, and the buffers. A collective: every rank must call it, and gets all of it."""
    full = {key: value for key, value in module.state_dict().items() if key.rpartition(".")[2] != FLAT}
    for unit in units_of(module):
        unit.gather("checkpoint")
        full |= {name: view.detach().clone() for *_, name, view in unit.views}
        unit.free()
    return full


class FlatUnit:
    """One unit: its slice at rest, its flat parameter while it computes, and the hooks that turn one into the other.

    Attributes:
        shard: this rank's slice, (chunk,): the parameter that the module registers and the optimizer updates.
        whole: the flat parameter, (world size * chunk,). Its memory comes and goes; the object stays: what autograd saved are views of it.
        views: while gathered, (module, attribute, full name, view of `whole`) for every place that held a parameter.
    """

    def __init__(self, module: nn.Module, name: str, places: Places, group: dist.ProcessGroup) -> None:
        self.name, self.group, self.began, self.views = name, group, 0.0, []
        self.layout = [(param.numel(), param.shape, places[param]) for param in places]
        _, size, rank = ranks_of(group)
        flat = torch.cat([param.detach().reshape(-1) for param in places])                      # (numel,)
        self.numel = flat.numel()
        chunk, _, _ = part = chunk_rows(self.numel, size, rank)
        flat = nn.functional.pad(flat, (0, size * chunk - self.numel))                          # (world size * chunk,)
        self.shard = nn.Parameter(flat[rank * chunk :][:chunk].clone(), requires_grad=next(iter(places)).requires_grad)
        self.whole = nn.Parameter(flat, requires_grad=flat.is_floating_point())
        if self.whole.requires_grad:                         # not so for integers
            me = weakref.ref(self)                           # a strong one would make a cycle that Python cannot see and never collects
            self.whole.register_post_accumulate_grad_hook(lambda whole: me().post_backward(whole))
        self.books = {"shards": hold_shard(name, f"{name}.{FLAT}".removeprefix("(root)."), flat, (self.numel,), part)}
        weakref.finalize(self, ledger.close_books, self.books)
        self._book("rest", Category.SHARDED_PARAM, chunk)
        for child, attribute, _ in sum(places.values(), []):
            delattr(child, attribute)
        module.register_parameter(FLAT, self.shard)
        module.register_forward_pre_hook(self.pre_forward, with_kwargs=True)
        module.register_forward_hook(self.post_forward)
        self.free()

    def gather(self, phase: str) -> None:
        """Give the flat parameter its memory, fill it with everyone's slice, hang views of it into the modules.

        [Note: the version counter] Autograd refuses to run backward over tensors written to since forward saved them. This writes the very
        numbers that were there, so it writes through `.data`, which has a counter of its own (as FSDP1 does).
        """
        if self.views:
            return
        if phase == "backward":
            Variable._execution_engine.queue_callback(self.end_backward)            # also for a unit whose weights get no gradient
        self.whole.requires_grad_(self.shard.requires_grad)
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        self._book("whole", Category.UNSHARDED_PARAM, self.whole.numel())
        collectives.all_gather(self.whole.data, self.shard.data, self.group, Label(self.name, phase)).wait()
        with torch.enable_grad():                            # backward runs without, and may recompute
            parts = self.whole[: self.numel].split([numel for numel, _, _ in self.layout])
        self.views = [(*place, part.view(shape)) for (_, shape, held), part in zip(self.layout, parts, strict=True) for place in held]
        for child, attribute, _, view in self.views:
            setattr(child, attribute, view)

    def free(self) -> None:
        """Take the views out of the modules, and the memory from the flat parameter."""
        for child, attribute, _, _ in self.views:
            delattr(child, attribute)
        self.views = []
        self.whole.untyped_storage().resize_(0)
        self._book("whole")

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Gather. (Recomputation by activation checkpointing comes here in backward, and leaves the weights to backward.)"""
        if not in_backward():
            self.end_backward()                              # what a step that an exception cut short left behind
        self.gather("backward" if in_backward() else "forward")
        if not self.shard.requires_grad and (inputs := need_gradient((args, kwargs))):
            register_multi_grad_hook(inputs, lambda _: self.end_backward())         # frozen: `whole` gets no gradient that could tell us
        self.began = ledger.now()

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Free. The gradient of an output will gather again."""
        if not in_backward():
            ledger.add_event(Lane.COMPUTE, "forward", self.name, "forward", self.began, ledger.now())
            self.free()
            for tensor in need_gradient(output):
                tensor.register_hook(self.pre_backward)

    def pre_backward(self, grad: torch.Tensor) -> None:
        """The gradient of an output is there: gather. From now on gradients of the views come into being."""
        self.gather("backward")
        if "grad" not in self.books:
            self._book("grad", Category.UNSHARDED_GRAD, self.numel if self.shard.requires_grad else 0)
            self.began = ledger.now()

    def post_backward(self, whole: torch.Tensor) -> None:
        """Autograd has joined the gradients of all views: free the weights, then reduce. The mean of this rank's slice is its `.grad`."""
        grad, whole.grad = whole.grad, None                                         # (world size * chunk,), ours to overwrite
        self._book("joined", Category.REDUCE_SCATTER, grad.numel(), grad)
        self.end_backward()
        own = torch.empty_like(self.shard, requires_grad=False)                     # (chunk,)
        collectives.reduce_scatter(own, grad, self.group, Label(self.name, "backward")).wait()
        self._book("joined")
        book_while_alive(Category.SHARDED_GRAD, self.name, own)
        self.shard.grad = own if self.shard.grad is None else self.shard.grad.add_(own)

    def end_backward(self) -> None:
        """Nothing of this unit is needed any more in this backward."""
        if "grad" in self.books:
            ledger.add_event(Lane.COMPUTE, "backward", self.name, "backward", self.began, ledger.now())
            self._book("grad")
        self.free()

    def _book(self, what: str, category: Category | None = None, elements: int = 0, *memory: torch.Tensor) -> None:
        """Strike `what` off the ledger's books; enter it anew if there is a category."""
        ledger.free(self.books.pop(what, 0))
        if category is not None:
            self.books[what] = ledger.allocate(category, self.name, elements * self.shard.element_size(), memory)


def _refuse_mixture(unit: str, places: Places) -> None:
    kinds: dict[str, list[str]] = {}
    for param, ((_, _, name), *_) in places.items():
        kinds.setdefault(f"{param.dtype}, {'trainable' if param.requires_grad else 'frozen'}", []).append(name)
    if len(kinds) > 1:
        found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
        raise ConfigError(f"unit {unit} mixes parameters ({found}) and a flat parameter has one dtype and one requires_grad; "
                          "give each kind a unit of its own, or use fsdp_ref.fully_shard")
