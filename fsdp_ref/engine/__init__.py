"""The engine. Read in this order: param.py (one parameter), gather.py (how it becomes whole), unit.py (what is gathered together),
gradients.py and reduction.py (what happens to its gradient), hooks.py and schedule.py (when), api.py and module.py (what you call).
memory.py is a small tool, ownership.py says which parameters a unit takes. One level up stand what it builds on: mesh.py (who shares
what), policies.py and wrap.py (choices), arguments.py (what may be asked for), agreement.py (do the ranks agree), optimizers.py (the
optimizer's step), nested.py (inputs)."""

from .. import wrap
from ..policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .api import data_parallel, fully_shard
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "data_parallel", "fully_shard",
           "register_fsdp_forward_method", "share_comm_ctx", "wrap"]
