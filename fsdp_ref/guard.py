"""Collectives that a program calls on torch.distributed itself are compared between the ranks, like those of collectives.py.

    import torch.distributed as dist
    dist.all_reduce(grad_a if rank else grad_b)       # gloo adds the two up; here every rank is told, and nothing is sent

`install` puts a check in front of torch.distributed's functions, in this process, once; `collectives.check_calls` turns it on and off.
The ranks of the lab call it, and `import fsdp_ref` where the environment says FSDP_REF_CHECK_CALLS=1. A send or a recv has one peer, so
it is not compared; when it fails, the ranks tell each other what they waited for. It must never run in the notebook's kernel.

[Note: the name of a tensor] A call on torch.distributed has no label, so two calls of one size look alike. The label is the variable that
holds the tensor where the call is made (the longest such name: behind a loop's `t` stands `grad_a`), or else the text of the calling
line. Broadcasts and the like are often called from two branches, one for the root: there only operation, size and root count.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from . import collectives, diagnosis, fingerprint, world

_OWN = str(Path(__file__).resolve().parent)


@dataclass(frozen=True)
class Rule:
    """What must agree: the elements of argument `message` (if `sized`), the tensor's name (if `named`), the value of argument `root`."""

    message: str
    sized: bool = True
    named: bool = True
    root: str = ""


RULES = {
    "all_reduce": Rule("tensor"), "all_gather": Rule("tensor"), "reduce_scatter": Rule("output"),
    "all_gather_into_tensor": Rule("input_tensor"), "all_gather_single": Rule("input_tensor"),
    "reduce_scatter_tensor": Rule("output"), "reduce_scatter_single": Rule("output"),
    "all_to_all": Rule("input_tensor_list", sized=False), "all_to_all_single": Rule("input", sized=False),
    "broadcast": Rule("tensor", named=False, root="src"), "reduce": Rule("tensor", named=False, root="dst"),
    "gather": Rule("tensor", named=False, root="dst"), "scatter": Rule("tensor", named=False, root="src"),
    "barrier": Rule("", named=False), "monitored_barrier": Rule("", named=False), "all_gather_object": Rule("", named=False),
    "broadcast_object_list": Rule("", named=False, root="src"), "scatter_object_list": Rule("", named=False, root="src"),
    "gather_object": Rule("", named=False, root="dst"),
}


def install() -> None:
    """Guard torch.distributed's collectives in this process. A second call does nothing."""
    for name, rule in {**RULES, "send": None, "recv": None}.items():
        function = getattr(dist, name, None)
        if function is not None and not hasattr(function, "fsdp_ref_guards"):
            setattr(dist, name, _guarded(name, function, rule))


def _guarded(name: str, function: Callable, rule: Rule | None) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        frame = sys._getframe(1)
        ours = frame.f_code.co_filename.startswith(_OWN)              # what collectives.py calls, it has compared
        if ours or not (fingerprint.checking() and dist.is_initialized()):
            return function(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        what = _compare(name, rule, arguments, frame) if rule else _message(name, arguments)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not diagnosis.is_group_error(type(error).__name__, str(error)):
                raise                                                 # a tensor that torch refuses, say
            raise world.explain_failure(error, what, -1) from error

    call.fsdp_ref_guards = True
    return call


def _message(name: str, arguments: dict) -> str:
    """`recv from rank 1`: what is not compared, but told when it fails."""
    other = arguments.get("src" if name == "recv" else "dst")
    return f"{name} {'from' if name == 'recv' else 'to'} rank {other if other is not None else 'any'}"


def _compare(name: str, rule: Rule, arguments: dict, frame: FrameType) -> str:
    """Have the ranks compare this call; returns what it is called."""
    group, operation = arguments.get("group") or dist.group.WORLD, name.replace("_", "-")
    message = arguments.get(rule.message)
    message = message[0] if isinstance(message, (list, tuple)) and message else message
    tensor = message if isinstance(message, torch.Tensor) else torch.empty(0)
    label = name_of(tensor, frame) if rule.named else ""
    details = [str(arguments["op"]).rpartition(".")[2].lower()] if "op" in arguments else []
    if rule.root and (root := arguments.get(rule.root, arguments.get(f"group_{rule.root}"))) is not None:
        details.append(f"{rule.root} {root}")
    if isinstance(group, dist.ProcessGroup) and group.size() > 1:
        collectives.check_direct(operation, label, tensor if rule.sized else tensor[:0], ", ".join(details), group)
    return f"{operation} of {label}" if label else operation


def name_of(tensor: torch.Tensor, frame: FrameType) -> str:
    """The longest variable of `frame` that is this very tensor; else the text of its line. [Note: the name of a tensor]"""
    names = [name for name, value in frame.f_locals.items() if value is tensor and not name.startswith("_")]
    if names:
        return max(sorted(names), key=len)
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()[:80]
