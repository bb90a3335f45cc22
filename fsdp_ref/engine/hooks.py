"""When a unit gathers, frees and reduces: the hooks on modules and on autograd, and the order that prefetch follows.

One training step of `root(layer 0, layer 1)` with reshard_after_forward=True (U unshard, R reshard, PB post-backward):

    forward    U(root) U(0) R(0) U(1) R(1) R(root)
    backward   U(root) U(1) U(0) R(1) PB(1) R(0) PB(0) R(root) PB(root)         U(0) is the prefetch: it runs while 1 computes

Four places call into this file, in the order of a step:

1. a module's forward pre-hook  -> `pre_forward`: unshard, and put a marker on the inputs that need a gradient;
2. its forward hook             -> `post_forward`: free, remember the order, and put a hook on the outputs that need a gradient;
3. the gradient of an output    -> `pre_backward`: unshard, prefetch the unit that ran before this one;
4. the marker on the inputs     -> `post_backward`: their gradients exist, so those of the unit's own parameters do; free, reduce.

[Note: when the inputs need no gradient] The first layer's inputs are token numbers: nothing there needs a gradient, so its marker
never fires (the root's neither). A callback at the end of backward does what is left. So `post_backward` may come from either side.

[Note: order with multiplicity] A unit that runs twice stands twice in the order. Backward meets the uses last first; each takes its own
place from the unit's list and prefetches the unit that stood before *that* use.

[Note: recompute] Activation checkpointing runs forward again inside backward. A unit in its backward phase then only makes sure that
its weights are there. One *inside* the checkpointed part has no gradient yet and runs as in forward, but keeps its weights, since its
backward is next, and its place in the order. Freeing is in both cases the business of `post_backward`.

[Note: part of a unit alone] With `fully_shard([norm, head])` somebody may call `head` alone, once a chunk of the loss, and run backward
for each. The unit's forward is never complete, so no output was hooked and no end of backward will come: the marker does all of it.

[Note: a step that was cut short] After an exception inside forward or backward the phases are stale. A new forward of the root that meets
"forward" (outside a registered method), or "backward" while autograd is not running, knows that and forgets the broken step first.
"""

from __future__ import annotations

import enum
import warnings
from typing import Any

import torch
from torch import nn

from .. import ledger
from ..ledger import Lane
from ..nested import cast_floats, map_tensors, need_gradient
from .schedule import Schedule
from .unit import Unit


class Phase(enum.Enum):
    """What a unit is doing for the current step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"                  # this backward's post-backward has run


class UnitHooks:
    """The hooks of one unit, and what they remember during a step. One per `fully_shard` call."""

    def __init__(self, unit: Unit, auto_reshard: bool) -> None:
        self.unit, self.modules, self.auto_reshard = unit, unit.modules, auto_reshard
        self.schedule: Schedule | None = None
        self.is_root = False
        self.is_last_backward = True                    # what the user said before there was a schedule
        self.phase = Phase.IDLE
        self.prefetch_ahead = 0                         # root: units to gather ahead in forward, in the order of the last forward
        self.keep_last = False                          # root: do not free the unit that ran last, since backward begins with it
        self.max_in_flight: int | None = None           # root: gathers on their way at once
        self.max_reductions = 1                         # root: reductions on their way while another starts
        self.streams: list[torch.cuda.Stream] = []      # root: CUDA, where gathers and reductions travel; other roots may share it
        self.post_optim_event: torch.Event | None = None    # root: what the next gathers wait for, instead of the current stream
        self.forward_prefetch: list[Unit] = []          # what the user wants gathered ahead, instead of the default
        self.backward_prefetch: list[Unit] = []
        self.waiting_for: set[nn.Module] = set()        # modules of this unit that have not run in this pass
        self.inside_method = 0                          # calls of registered methods that are running (they may call forward)
        self._began = 0.0
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)
        for module in {*self.modules, *(module for param in unit.params for module, _ in param.slots)}:
            module.register_state_dict_pre_hook(lambda *_, **__: self.unit.reshard())      # a state dict holds shards, always
            module.register_load_state_dict_pre_hook(lambda *_, **__: self.unit.reshard())
            module.register_load_state_dict_post_hook(lambda *_: self.unit.repack_if_moved())

    # -- forward --------------------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Make the weights whole, cast the inputs, mark those that need a gradient."""
        unit = self.unit
        if self.is_root and self._was_cut_short():
            self.schedule.reset()
        if self.phase in (Phase.BACKWARD, Phase.REDUCED):                           # [Note: recompute]
            unit.unshard("backward")
            unit.wait_unshard()
            return self._cast_inputs(args, kwargs)
        first_of_unit = self.phase is not Phase.FORWARD
        if first_of_unit:
            self._lazy_init()
            self.phase = Phase.FORWARD
            if self.schedule.forward_root is None:
                self.schedule.begin_forward(self)
                args, kwargs = map_tensors(lambda t: t.to(unit.device), (args, kwargs))
            self.schedule.forwards.append(unit)
            self.waiting_for = set(self.modules)
        args, kwargs = self._cast_inputs(args, kwargs)
        unit.unshard("forward")
        unit.wait_unshard()
        if first_of_unit:
            args, kwargs = self._mark_inputs(args, kwargs)
            self.schedule.prefetch(self.forward_prefetch or self.schedule.following(), "forward")
            self._began = ledger.now()
        return args, kwargs

    def post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Free the weights, remember the order, hook the outputs that need a gradient, cast the output."""
        if self.phase in (Phase.BACKWARD, Phase.REDUCED):
            return self._cast_output(output)
        self.waiting_for.discard(module)
        if not self.waiting_for:
            output = self._complete_forward(output)
        if self.schedule.forward_root is self:
            for hooks in reversed(self.schedule.all):                               # groups of which a module never ran
                if hooks is not self and hooks.waiting_for:
                    hooks.waiting_for.clear()
                    output = hooks._complete_forward(output)
            self.schedule.end_forward()
        return self._cast_output(output)

    def _was_cut_short(self) -> bool:
        """Whether an exception (or a notebook's stop button) ended the last step midway. [Note: a step that was cut short]"""
        if self.phase is Phase.FORWARD:
            return not self.inside_method
        return self.phase is not Phase.IDLE and torch._C._current_graph_task_id() == -1

    def _complete_forward(self, output: Any) -> Any:
        unit = self.unit
        ledger.add_event(Lane.COMPUTE, "forward", unit.name, "forward", self._began, ledger.now())
        if self.is_root and self.auto_reshard and not torch.is_grad_enabled():
            unit.reshard()                                                          # without backward, nobody else would free the root
        again = torch._C._current_graph_task_id() != -1                             # [Note: recompute]
        is_last = self.schedule.root.keep_last and self.schedule.last_forwards[-1:] == [unit]
        if not again and not (is_last and torch.is_grad_enabled()):
            unit.end_forward()
        if torch.is_grad_enabled():
            if not again:
                self.schedule.remember(unit)
            self._hook_outputs(output)
        self.phase = Phase.IDLE
        return output

    def _lazy_init(self) -> None:
        """The first forward decides who is the root: the first unit to run. All units below it share its schedule."""
        if self.schedule is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {list(self.modules)}")
        for name, module in self.modules[0].named_modules():
            hooks = hooks_of(module)
            if hooks is not None and hooks is not self and hooks.schedule is not None:
                raise RuntimeError(f"FSDP state has already been lazily initialized for {name}\n"
                                   "FSDP requires running forward through the root module first")
        schedule = Schedule(self, units_below(self))
        self.is_root = True
        if self.auto_reshard:
            self.unit.reshard_after_forward = False             # backward would gather the root again at once
        for hooks in schedule.all:
            hooks.schedule = schedule

    def _cast_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        policy = self.unit.policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return cast_floats(policy.param_dtype, (args, kwargs))

    def _cast_output(self, output: Any) -> Any:
        dtype = self.unit.policy.output_dtype
        return output if dtype is None else cast_floats(dtype, output)

    def _mark_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Pass every input that needs a gradient through one autograd node, whose backward is `post_backward`."""
        inputs = need_gradient((args, kwargs)) if torch.is_grad_enabled() else []
        if not inputs:
            return args, kwargs                                                     # [Note: when the inputs need no gradient]
        marked = iter(_PostBackward.apply(self, *inputs))
        return map_tensors(lambda t: next(marked) if t.requires_grad else t, (args, kwargs))

    def _hook_outputs(self, output: Any) -> None:
        for tensor in need_gradient(output):
            if tensor._base is not None:
                warnings.warn(f"module {self.unit.name} returned a view tensor; an in-place operation on it would drop the hook that "
                              "gathers its weights for backward. Use out-of-place operations, or return a .clone()", stacklevel=2)
            tensor.register_hook(self.pre_backward)

    # -- backward -------------------------------------------------------------------------------------------------------------

    def pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of an output has arrived: gather for this unit, then for the one that backward will meet next."""
        self.schedule.queue_callback()
        begins = self.phase is not Phase.BACKWARD
        self.phase = Phase.BACKWARD
        if self.unit.unshard_in_backward:
            self.unit.unshard("backward")
            self.unit.wait_unshard()
        previous = self.schedule.previous(self.unit)
        self.schedule.prefetch(self.backward_prefetch or ([previous] if previous and previous.unshard_in_backward else []), "backward")
        if begins:
            self._began = ledger.now()
            self.unit.gradients.expect()
        return grad

    def post_backward(self) -> None:
        """The unit's gradients exist: free the weights first, reduce second, so that both are never in memory with the buffer."""
        unit = self.unit
        if self.phase is Phase.BACKWARD:
            ledger.add_event(Lane.COMPUTE, "backward", unit.name, "backward", self._began, ledger.now())
        partly = self.phase is Phase.FORWARD                                        # [Note: part of a unit alone]
        self.phase = Phase.IDLE if partly else Phase.REDUCED
        if unit.reshard_after_backward:
            unit.reshard()
        if not unit.gradients.sync:
            unit.gradients.keep()
        elif partly or not unit.gradients.at_the_step:
            self.schedule.reduce(unit)
            if partly:
                unit.gradients.finish()

    def end_backward(self) -> None:
        """Nothing is left of this backward: do what no marker did, and be ready for the next forward."""
        if self.phase is not Phase.REDUCED:
            self.post_backward()
        self.forget()

    def forget(self) -> None:
        """Be ready for the next forward."""
        self.waiting_for.clear()
        self.phase = Phase.IDLE


class _PostBackward(torch.autograd.Function):
    """The identity; its backward runs when the gradients of all inputs exist, and then calls `post_backward`.

    `setup_context`, `jvp` and `generate_vmap_rule` are what torch.func asks of a function that `torch.func.grad` or `jvp` meets.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: UnitHooks, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def jvp(ctx, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple:
        ctx.hooks.post_backward()
        return None, *grads


def units_below(root: UnitHooks) -> list[UnitHooks]:
    """The hooks of `root` and of every unit inside its modules, once each, in the order of modules."""
    return list(dict.fromkeys(hooks for top in root.modules for module in top.modules() if (hooks := hooks_of(module)) is not None))


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks that `fully_shard` put on `module`, or None."""
    return module.__dict__.get("_fsdp_ref_hooks")
