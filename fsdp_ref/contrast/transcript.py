"""What goes over the wire, written down as it is asked for: the same instrument for any library that calls torch.distributed.

    with Transcript() as lines:
        step()
    lines.rows          # [("all-gather", 12288), ...]: name and bytes of the whole message, in order

It listens where torch dispatches operations, so it sees what a library really sent and not what it says about itself. While it listens,
this package's own collectives take the library's route (collectives.py, [Note: two routes]). It hears the thread that entered it alone, and
must never change what it hears. Messages from one rank to another (the lab's comparison of calls, say) are no collectives and left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {"_allgather_base_": "all-gather", "allgather_into_tensor_coalesced_": "all-gather", "allgather_": "all-gather",
         "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor_coalesced_": "reduce-scatter",
         "reduce_scatter_": "reduce-scatter", "allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce", "broadcast_": "broadcast"}


class Transcript(TorchDispatchMode):
    """See the module docstring. `rows`: (name, bytes of the largest tensor of the call: what is gathered, or before it is scattered)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d" and name in NAMES:
            sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.rows.append((NAMES[name], max(sizes, default=0)))
        return func(*args, **(kwargs or {}))
