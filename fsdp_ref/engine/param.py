"""One parameter, cut into rows: the shard that rests, and the whole that is there while its unit computes.

Follow one parameter. A (5, 3) weight on 4 ranks is cut like `torch.chunk`: 2 rows each, so the ranks hold [2, 2, 1, 0] rows.

    rank 0: rows 0-1    rank 1: rows 2-3    rank 2: row 4 + 1 row of padding    rank 3: 2 rows of padding

* `sharded` is an `nn.Parameter` that is a `DTensor`: its local tensor is this rank's rows, its shape is (5, 3). The optimizer, the state
  dict and `clip_grad_norm_` see this one. It is what the module holds at rest.
* `full` is an ordinary `nn.Parameter` of shape (5, 3). The module holds it while the unit is unsharded; autograd knows only this one.

[Note: why the shard is padded] Every rank sends the same number of bytes, so the collective needs no table of sizes. With chunk's rule
all padding lies behind the last row: the gathered buffer is 0 1 2 3 4 p p p, and the parameter is its contiguous beginning. An even
spread, [2, 1, 1, 1], would put the padding between rows: 0 1 2 p 3 p 4 p, and no view of that buffer is the parameter.

This file never starts a collective and never decides when something happens; see unit.py and hooks.py.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..placements import Placement, Placements
from . import optimizers


def chunk_rows(rows: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """(rows in a padded chunk, first row of `rank`, rows of `rank`) by torch.chunk's rule: chunk = ceil(rows / world size).

    >>> [chunk_rows(5, 4, rank) for rank in range(4)]
    [(2, 0, 2), (2, 2, 2), (2, 4, 1), (2, 5, 0)]
    """
    chunk = math.ceil(rows / world_size)
    first = min(rank * chunk, rows)
    return chunk, first, min(chunk, rows - first)


class ShardedParam:
    """One parameter of a unit: its shard, its whole, and the modules that use it (several when it is tied).

    Attributes:
        slots: the (module, attribute name) pairs that hold the parameter.
        name: its fully qualified name below the root (known once the root has run).
        shape, dtype: of the whole parameter.
        chunk_shape: of one padded shard; `numel` elements.
        sharded, full: see the module docstring. Under DDP both are the same plain parameter.
    """

    def __init__(self, param: nn.Parameter, slots: list[tuple[nn.Module, str]], mesh: DeviceMesh, placements: Placements) -> None:
        name = slots[0][1]
        self.slots, self.name, self.mesh = slots, name, mesh
        self.shape, self.dtype, self.device = param.shape, param.dtype, param.device
        self.replicated = placements.parameter is Placement.REPLICATE
        self.identity = param.__dict__.setdefault("_fsdp_ref_identity", object())   # survives sharding: finds ties split over units
        self.sharded: nn.Parameter = param
        self.full: nn.Parameter | None = param if self.replicated else None
        self.reduced: torch.Tensor | None = None            # DDP: the gradient of earlier backwards, while a new one is made
        self.unreduced = False                              # DDP: `.grad` holds gradients of a backward without sync
        self.kept: torch.Tensor | None = None               # gradients of backwards without sync, where they are kept in another dtype
        if self.replicated:
            self.first, self.rows = 0, param.shape[0] if param.ndim else 1
            self.chunk = self.rows
            return
        if param.ndim == 0:
            raise ValueError(f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1.")
        if not param.is_contiguous():
            raise NotImplementedError(f"FSDP does not support non-contiguous parameters yet: {name} has shape {tuple(param.shape)} and "
                                      f"stride {param.stride()}; call .contiguous() on it before fully_shard")
        self.stride = param.stride()
        world, rank = mesh.size(), mesh.get_local_rank()
        self.chunk, self.first, self.rows = chunk_rows(param.shape[0], world, rank)
        self.chunk_shape = (self.chunk, *param.shape[1:])
        self.numel = math.prod(self.chunk_shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the user wants a gradient (the flag of the parameter the user sees at rest)."""
        return self.sharded.requires_grad

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, without padding: shape (rows, *shape[1:])."""
        return self.sharded._local_tensor if isinstance(self.sharded, DTensor) else self.sharded

    def place_shard(self, home: torch.Tensor) -> None:
        """Move this rank's rows into `home` (1-D, bytes of `numel` elements, part of the unit's flat shard): the parameter lives there now.

        `self.sharded` may be the whole parameter (first time) or a DTensor that has been given other memory (`to`, `to_empty`,
        `load_state_dict(assign=True)`).

        [Note: shards begin their storage] A DTensor whose local tensor starts inside a larger storage cannot be deep-copied (torch 2.13:
        "invalid python storage"), and people do deep-copy state dicts. DLPack gives the same memory a storage that begins with it.
        """
        if home.device.type != "meta":
            home = torch.from_dlpack(home)                              # [Note: shards begin their storage]
        home = home.view(self.dtype)                                    # (numel,)
        current = self.local.detach()
        if not isinstance(self.sharded, DTensor):
            current = current.narrow(0, self.first, self.rows)                      # (rows, *rest)
        padded = home.view(self.chunk_shape)                                        # (chunk, *rest)
        own = padded.narrow(0, 0, self.rows)
        if own.device.type != "meta":
            own.copy_(current)
            padded.narrow(0, self.rows, self.chunk - self.rows).zero_()
        if isinstance(self.sharded, DTensor):
            self.sharded._local_tensor = own
            return
        shard = nn.Parameter(self.as_dtensor(own), requires_grad=self.sharded.requires_grad)
        shard.__dict__.update({k: v for k, v in self.sharded.__dict__.items() if k not in shard.__dict__})   # marks that users hang on it
        optimizers.replaced(self.sharded)
        self.sharded = shard
        self.register(shard)

    def as_dtensor(self, own: torch.Tensor) -> DTensor:
        """`own` (this rank's rows, of a shard or of a gradient) as a DTensor of the whole shape, without communication."""
        return DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=self.stride)

    def make_full(self, whole: torch.Tensor) -> None:
        """Create the whole parameter, once, over the first rows of `whole` (1-D, padded).

        [Note: the whole parameter is made once] Autograd saves the tensors that forward used. If every gather made a new Parameter,
        backward would hold on to the old memory, and gradients would land on an object nobody reads. So the object stays and its
        memory comes and goes (`Unit._resize`); whatever autograd saved still points at the right place after the second gather.
        """
        view = whole[: math.prod(self.shape)].view(self.shape)
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
        if self.replicated:
            self.full = self.sharded = found
            return True
        if not isinstance(found, DTensor) or found.shape != self.shape:
            raise ValueError(f"parameter {self.name} was replaced by a {type(found).__name__} of shape {tuple(found.shape)} after "
                             f"fully_shard; assign a DTensor of shape {tuple(self.shape)} on the same mesh (load_state_dict does)")
        self.sharded, self.dtype = found, found.dtype
        return True

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient autograd left on the whole parameter, with what was kept before; removed from both. None if there is none."""
        grad, self.full.grad, self.unreduced = self.full.grad, None, False
        if self.kept is None:
            return grad
        kept, self.kept = self.kept, None
        return kept if grad is None else kept.add_(grad)

    def keep_gradient(self, dtype: torch.dtype) -> None:
        """Put the gradient aside in `dtype`, unreduced: bf16 gradients of many micro-batches would swallow each other's small parts."""
        if self.full.grad is not None and self.full.grad.dtype != dtype:
            self.kept = self.take_gradient().to(dtype)

    def add_gradient(self, own: torch.Tensor) -> None:
        """Add this rank's rows of the reduced gradient to the shard's `.grad` (create it where there is none)."""
        if self.sharded.grad is None:
            self.sharded.grad = self.as_dtensor(own)
        else:
            self.sharded.grad._local_tensor.add_(own)
        for hook in (getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.sharded)                              # autograd runs these for leaves it fills itself; this one is ours

    def set_aside(self) -> None:
        """DDP, before a backward that will be reduced: what was reduced before must not go through the reduction again."""
        if self.full.grad is not None and not self.unreduced:
            self.reduced, self.full.grad = self.full.grad, None

    def add_whole_gradient(self, mean: torch.Tensor) -> None:
        """DDP: add a reduced gradient to what was reduced before. `.grad` belongs to autograd until backward ends; see `restore`."""
        self.reduced = mean if self.reduced is None else self.reduced.add_(mean)

    def restore(self) -> None:
        """DDP, at the end of backward: what was reduced becomes `.grad`."""
        if self.reduced is not None and self.full.grad is None:
            self.full.grad, self.reduced = self.reduced, None
