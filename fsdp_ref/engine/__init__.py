"""The engine. Read in this order: param.py (one parameter), unit.py (what is gathered together), reduction.py (its gradients),
hooks.py and schedule.py (when), api.py (what you call). policies.py and wrap.py hold choices, ownership.py says which parameters a
unit takes, optimizers.py what the engine asks of optimizers."""

from . import wrap
from .api import FSDPModule, UnshardHandle, data_parallel, fully_shard, register_fsdp_forward_method
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "data_parallel", "fully_shard",
           "register_fsdp_forward_method", "wrap"]
