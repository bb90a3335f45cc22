"""What runs inside a rank of the pool when it joins the others. The notebook's kernel never calls it: it has no process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from IPython import get_ipython

import fsdp_ref
from fsdp_ref import collectives, guard, world


def join(rank: int, size: int, store: str, timeout: float, device: str = "auto") -> dict[str, str]:
    """Join the process group and lay out the names that every cell under `%%px` finds; return what was brought up.

    The names: rank, world_size, device, torch, dist, fsdp_ref, and everything that `from fsdp_ref import *` brings.

    Raises:
        WorldError: a rank did not arrive within `timeout` seconds.
    """
    here = world.start(rank, size, store=store, timeout=timeout, device=device)
    collectives.reset_sequence()
    collectives.check_calls()
    guard.install()
    names = {name: getattr(fsdp_ref, name) for name in fsdp_ref.__all__ if name not in ("lab", "viz")}     # those stay in the notebook
    names |= {"rank": rank, "world_size": size, "device": here.device, "torch": torch, "dist": dist, "fsdp_ref": fsdp_ref}
    get_ipython().user_ns.update(names)
    return {"backend": here.backend, "device": str(here.device)}
