"""What the engine has to know about optimizers: that they exist, how much they hold, and whether they hold the right parameters.

The optimizers are torch's own; they see DTensor shards and need nothing from us. Two hooks that torch offers on every optimizer's step
let the ledger see the step and the bytes of the moments, and refuse an optimizer that was built before sharding: it would update
tensors that nobody uses, without an error (pytorch/pytorch#149205).
"""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import ledger
from ..errors import ConfigError
from ..ledger import Category, Lane

_watching = False
_replaced: dict[int, weakref.ref] = {}                       # parameters that sharding took out of their modules
_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()         # optimizer -> [token, entries counted, began]


def watch() -> None:
    """Install the two hooks, once a process."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _watching = True


def replaced(param: torch.nn.Parameter) -> None:
    """`param` is no longer part of a model: a shard stands in its place."""
    key = id(param)
    _replaced[key] = weakref.ref(param, lambda _: _replaced.pop(key, None))


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    entry = _steps.setdefault(optimizer, [0, 0, 0.0])
    entry[2] = ledger.now()
    if _replaced:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in _replaced and _replaced[id(param)]() is param:
                    raise ConfigError("the optimizer was built before the model was sharded, so it would update a parameter of shape "
                                      f"{tuple(param.shape)} that the model no longer uses; build the optimizer after fully_shard")


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    entry = _steps[optimizer]
    ledger.add_event(Lane.OPTIMIZER, type(optimizer).__name__, "optimizer", "optimizer", entry[2], ledger.now())
    if len(optimizer.state) != entry[1]:
        ledger.free(entry[0])
        values = (value for state in optimizer.state.values() for value in state.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        nbytes = sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)
        entry[0], entry[1] = ledger.allocate(Category.OPTIMIZER, "optimizer", nbytes), len(optimizer.state)
        weakref.finalize(optimizer, ledger.free, entry[0])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)
