"""The engine. Read in this order: param.py (one parameter), gather.py (how it becomes whole), unit.py (what is gathered together),
gradients.py and reduction.py (what happens to its gradient), hooks.py and schedule.py (when), api.py and module.py (what you call).
mesh.py, memory.py, policies.py and wrap.py hold choices and small tools, ownership.py says which parameters a unit takes, agreement.py
asks whether the ranks agree on them, optimizers.py what the engine asks of optimizers."""

from . import wrap
from .api import data_parallel, fully_shard
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "data_parallel", "fully_shard",
           "register_fsdp_forward_method", "wrap"]
