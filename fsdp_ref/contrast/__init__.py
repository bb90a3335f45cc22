"""Two other ways to do what the engine does, each about a page, to be read next to it.

| | engine (FSDP2's idea) | `flat` (FSDP1's idea) | `differentiable` (SimpleFSDP's idea) |
|---|---|---|---|
| what is sharded | the rows of every parameter | the elements of one flat parameter a unit | the rows of every parameter |
| who gathers | hooks on modules | hooks on modules | whoever reads `module.weight` |
| collectives a step | 2 gathers and 1 reduction a unit | the same | 1 gather and 1 reduction a *parameter* (2 gathers with `checkpoint`) |
| whole weights live | while their unit computes | while their unit computes | until autograd lets go of them |
| communication hidden | prefetch, asynchronous reduction | none here | none here (SimpleFSDP's compiler does it) |
| state dict | the original names | needs a gather | the original names |

Both write the same ledger as the engine, except that optimizer state is only booked once the engine's own functions have been called in
the process. Both expect what `fully_shard` expects: every rank built the same weights, on the device that computes, and builds its
optimizer afterwards. `Transcript` writes down what another library sends, to be put beside what
the engine sends. Nothing in the package may import this part: lessons and tests do.
"""

from . import differentiable, flat
from .transcript import Transcript

__all__ = ["Transcript", "differentiable", "flat"]
