"""One parameter, cut into rows: the shard that rests, and the whole that is there while its unit computes.

Follow one parameter. A (5, 3) weight on 4 ranks is cut like `torch.chunk`: 2 rows each, so the ranks hold [2, 2, 1, 0] rows.

    rank 0: rows 0-1    rank 1: rows 2-3    rank 2: row 4 + 1 row of padding    rank 3: 2 rows of padding

* `sharded` is an `nn.Parameter` that is a `DTensor`: its local tensor is this rank's rows, its shape is (5, 3). The optimizer, the state
  dict and `clip_grad_norm_` see this one. It is what the module holds at rest.
* `full` is an ordinary `nn.Parameter` of shape (5, 3). The module holds it while the unit is unsharded; autograd knows only this one.

[Note: why the shard is padded] Every rank sends the same number of bytes, so the collective needs no table of sizes. With chunk's rule
all padding lies behind the last row: the gathered buffer is 0 1 2 3 4 p p p, and the parameter is its contiguous beginning. An even
spread, [2, 1, 1, 1], would put the padding between rows: 0 1 2 p 3 p 4 p, and no view of that buffer is the parameter.

[Note: columns] `shard_placement_fn` may choose another dim. "Rows" then are slices along that dim. They must divide evenly, because padding
would lie between the rows of the whole; and a gather has to copy them into place instead of side by side.

This file never starts a collective and never decides when something happens; see unit.py and hooks.py.
"""

from __future__ import annotations

import math
import types

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import agreement, arguments, optimizers
from ..mesh import UnitMesh
from ..placements import Placement, Placements, chunk_rows


class ShardedParam:
    """One parameter of a unit: its shard, its whole, and the modules that use it (several when it is tied).

    Attributes:
        slots: the (module, attribute name) pairs that hold the parameter.
        name: its fully qualified name below the root (known once the root has run).
        shape, dtype: of the whole parameter.
        dim: the dim that is cut; `chunk_shape` is the shape of one padded shard, `numel` its elements.
        sharded, full: see the module docstring. Under DDP "sharded" is the plain parameter, and `full` another one over its memory: so
            gradients that are not reduced yet never mix with those that are.
    """

    def __init__(self, param: nn.Parameter, slots: list[tuple[nn.Module, str]], mesh: UnitMesh, placements: Placements,
                 placement: Shard | None = None) -> None:
        name = slots[0][1]
        self.slots, self.name, self.mesh = slots, name, mesh
        self.start, self.start_version = agreement.digest(param), (0, 0)            # of the whole, and whether it is still that
        self.shape, self.dtype = param.shape, param.dtype
        self.replicated = placements.optimizer is Placement.REPLICATE
        self.identity = param.__dict__.setdefault("_fsdp_ref_identity", object())   # survives sharding: finds ties split over units
        self.sharded: nn.Parameter = param
        self.full: nn.Parameter | None = None
        self.kept: torch.Tensor | None = None               # gradients of backwards without sync, where they are kept in another dtype
        self.partial: torch.Tensor | None = None            # HSDP: this rank's rows, reduced over shards but not yet over replicas
        self.dim, self.chunk_shape, self.numel = 0, param.shape, param.numel()
        self.first, self.chunk = 0, param.shape[0] if param.ndim else 1
        self.rows = self.chunk
        if self.replicated:
            return
        arguments.refuse_odd(param, name)
        self.dim = arguments.dim_to_cut(placement, param, mesh.size)
        self.stride = param.stride()
        self.chunk, self.first, self.rows = chunk_rows(param.shape[self.dim], mesh.size, mesh.rank)
        self.chunk_shape = (*param.shape[: self.dim], self.chunk, *param.shape[self.dim + 1 :])
        self.numel = math.prod(self.chunk_shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the user wants a gradient (the flag of the parameter the user sees at rest)."""
        return self.sharded.requires_grad

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, without padding: shape `chunk_shape` with `rows` along `dim`."""
        return self.sharded._local_tensor if isinstance(self.sharded, DTensor) else self.sharded

    @property
    def plain(self) -> bool:
        """Whether the shard is an ordinary tensor, which may live inside a larger memory."""
        return type(self.local.detach()) is torch.Tensor

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever somebody writes to the shard, as a DTensor or as a local tensor (but not through `.data`)."""
        return self.sharded._version, self.local._version

    def by_rank(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of the whole parameter (contiguous, with its padding) as one chunk a rank: shape (shards, *chunk_shape)."""
        if self.dim == 0:
            return whole.view(self.mesh.size, *self.chunk_shape)
        return whole.view(self.shape).unflatten(self.dim, (-1, self.chunk)).movedim(self.dim, 0)            # [Note: columns]

    def place_shard(self, home: torch.Tensor | None) -> None:
        """Move this rank's rows into `home` (1-D, bytes of `numel` elements): the parameter lives there from now on.

        `self.sharded` may be the whole parameter (first time) or a DTensor that has been given other memory (`to`, `to_empty`,
        `load_state_dict(assign=True)`). Without a `home`, a tensor subclass gets padded memory of its own kind. Under DDP all stays.

        [Note: shards begin their storage] A DTensor whose local tensor starts inside a larger storage cannot be deep-copied (torch 2.13:
        "invalid python storage"), and people do deep-copy state dicts. DLPack gives the same memory a storage that begins with it.
        """
        first_time, old = not isinstance(self.sharded, DTensor), self.local.detach()
        if self.replicated:
            self.padded, self.full = old, nn.Parameter(old, requires_grad=self.sharded.requires_grad)
            return
        current = old.narrow(self.dim, self.first, self.rows) if first_time else old
        if home is None:
            padded = old.new_zeros(self.chunk_shape)
        else:
            if home.device.type != "meta" and not home.is_pinned():
                home = torch.from_dlpack(home)                              # [Note: shards begin their storage]
            padded = home.view(self.dtype).view(self.chunk_shape)                       # (numel,) -> (chunk, *rest)
        own = padded.narrow(self.dim, 0, self.rows)
        if own.device.type != "meta":
            own.copy_(current)
            if home is not None:
                padded.narrow(self.dim, self.rows, self.chunk - self.rows).zero_()
        self.padded = padded
        if not first_time:
            for name, hook in self.own.__dict__.items():                                # methods that were hung on the shard (gather.py)
                if getattr(hook, "__self__", None) is self.own:
                    setattr(own, name, types.MethodType(hook.__func__, own))
            self.sharded._local_tensor = self.own = own
            return
        shard = nn.Parameter(self.as_dtensor(own), requires_grad=self.sharded.requires_grad)
        shard.__dict__.update({k: v for k, v in self.sharded.__dict__.items() if k not in shard.__dict__})   # marks that users hang on it
        optimizers.replaced(self.sharded)
        self.sharded, self.own = shard, shard._local_tensor
        self.register(shard)

    def as_dtensor(self, own: torch.Tensor) -> DTensor:
        """`own` (this rank's rows, of a shard or of a gradient) as a DTensor of the whole shape, without communication.

        `DTensor.from_local` says the same, checks more, and takes ten times as long; a step makes one a gradient.
        """
        meta = TensorMeta(self.shape, self.stride, own.dtype)
        return DTensor(own, DTensorSpec(self.mesh.mesh, self.mesh.placements(self.dim), tensor_meta=meta), requires_grad=False)

    def make_full(self, whole: torch.Tensor) -> None:
        """Create the whole parameter, once, over the first rows of `whole` (contiguous, padded; or a tensor an extension made).

        [Note: the whole parameter is made once] Autograd saves the tensors that forward used. If every gather made a new Parameter,
        backward would hold on to the old memory, and gradients would land on an object nobody reads. So the object stays and its
        memory comes and goes (`Unit._resize`); whatever autograd saved still points at the right place after the second gather.
        """
        view = torch.as_strided(whole, self.shape, self.stride, storage_offset=0) if whole.ndim != 1 else \
            whole[: math.prod(self.shape)].view(self.shape)
        self.full = nn.Parameter(view, requires_grad=self.sharded.requires_grad)

    def register(self, param: nn.Parameter) -> None:
        """Let every module that uses this parameter hold `param`: past nn.Module.__setattr__, which is slow and checks names, unless
        the module has one of its own, which wants to know."""
        for module, name in self.slots:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:
                setattr(module, name, param)

    def adopt(self) -> bool:
        """Take over a parameter that was put in the module's place of ours (`to_empty`, `load_state_dict(assign=True)`).

        Returns True if there was one. Raises ValueError if it does not fit.
        """
        module, name = self.slots[0]
        found = module._parameters[name]
        if found is self.sharded or found is self.full:
            return False
        if found.shape != self.shape or not (self.replicated or isinstance(found, DTensor)):
            raise ValueError(f"parameter {self.name} was replaced by a {type(found).__name__} of shape {tuple(found.shape)} after "
                             f"fully_shard; assign a DTensor of shape {tuple(self.shape)} on the same mesh (load_state_dict does)")
        self.sharded, self.dtype = found, found.dtype
        return True

    # -- gradients ------------------------------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether backward left something to reduce."""
        return self.full is not None and (self.full.grad is not None or self.kept is not None)

    def take_gradient(self) -> torch.Tensor:
        """The gradient autograd left on the whole parameter, with what was kept before; removed from both. Zeros if there is none."""
        grad, self.full.grad, kept, self.kept = self.full.grad, None, self.kept, None
        if kept is None:
            return torch.zeros_like(self.full) if grad is None else grad
        return kept if grad is None else kept.add_(grad)

    def keep_gradient(self, dtype: torch.dtype) -> None:
        """Put the gradient aside in `dtype`, unreduced: bf16 gradients of many micro-batches would swallow each other's small parts."""
        if self.full.grad is not None and self.full.grad.dtype != dtype:
            self.kept = self.take_gradient().to(dtype)

    def add_gradient(self, own: torch.Tensor) -> None:
        """Add this rank's rows of the reduced gradient to the shard's `.grad` (create it where there is none)."""
        own = own.narrow(self.dim, 0, self.rows) if self.rows != self.chunk else own
        if self.sharded.grad is None:
            self.sharded.grad = own if self.replicated else self.as_dtensor(own)
        else:
            getattr(self.sharded.grad, "_local_tensor", self.sharded.grad).add_(own)
        for hook in (getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.sharded)                              # autograd runs these for leaves it fills itself; this one is ours

    def drop_gradients(self) -> None:
        """Forget what a step that was cut short left behind."""
        self.kept = self.partial = None
        if self.full is not None:
            self.full.grad = None
