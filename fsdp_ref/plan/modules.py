"""Any `nn.Module` as the planner's input: shapes of its units, its buffers, and what a run without data says about activations.

    describe(lambda: MyModel(...))                       built on meta, so that nothing is allocated
    describe(transformers.LlamaConfig(...))              the same through transformers
    describe(model, inputs=(tokens,))                    and one forward without data: bytes that autograd keeps, FLOP of each unit

The model is never changed and no weight is read: parameters take part as fake tensors (shapes that claim to be on the CPU, and so choose
flash attention as they would there; on meta itself attention stores its scores). What data decide (which expert, how many steps) cannot
be seen that way; such a model is refused with one sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import wrap
from ..errors import ConfigError
from ..nested import map_tensors, need_gradient
from .architecture import Description, Part


def build(source: object) -> nn.Module:
    """The module of a module, of a function that makes one, or of a transformers config; the latter two on meta.

    Raises:
        ConfigError: it is none of these, or cannot be built on meta.
    """
    if isinstance(source, nn.Module):
        return source
    if hasattr(source, "model_type") and hasattr(source, "to_dict"):
        source = _from_config(source)
    if not callable(source):
        raise ConfigError(f"a {type(source).__name__} cannot be planned; give a preset's name, an Architecture, an nn.Module, a function "
                          "that builds one, or a transformers config")
    try:
        with torch.device("meta"):
            model = source()
    except Exception as error:
        raise ConfigError(f"the model cannot be built on the meta device ({_first_line(error)}); its constructor must not read or compute "
                          "with data") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the function returned a {type(model).__name__}; it must return an nn.Module")
    return model


def describe(source: object, inputs: tuple | dict | None = None, *, units: list[nn.Module] | None = None,
             dtype: torch.dtype = torch.bfloat16, flash: bool = True) -> Description:
    """A module as a `Description`.

    Args:
        source: see `build`.
        inputs: example arguments of forward, batch first; any device. Activations and FLOP are counted with them, by sample.
        units: modules that shard one by one (default: the repeated blocks, as in `data_parallel`).
        dtype: what floating-point weights and inputs are taken to be while counting.
        flash: False counts attention that stores its scores.

    Raises:
        ConfigError: the model cannot be built on meta, or not run without data.
    """
    model = build(source)
    units = wrap.blocks(model) if units is None else list(units)
    owned = _owned(model, units)
    order = [module for module in model.modules() if module in owned and module is not model]
    names = {module: name for name, module in model.named_modules()}
    parts = [_part(names[module], owned[module]) for module in order]
    kinds = tuple(dict.fromkeys(type(module).__name__ for module in model.modules()))
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    facts = {} if inputs is None else _run(model, order, inputs, dtype, flash)
    return Description(type(model).__name__, _part("root", owned[model]), tuple(parts), buffers, kinds=kinds, **facts)


def _from_config(config: Any) -> Callable[[], nn.Module]:
    try:
        import transformers
    except ImportError:
        raise ConfigError("a transformers config needs transformers; pip install 'transformers>=5,<6'") from None
    kinds = [getattr(transformers, name) for name in (getattr(config, "architectures", None) or []) if hasattr(transformers, name)]
    if kinds:
        return lambda: kinds[0](config)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return lambda: auto.from_config(config)
    raise ConfigError(f"transformers has no model for a {type(config).__name__}; build the module yourself")


def _owned(model: nn.Module, units: list[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Each unit's own parameters, innermost first; the root takes what is left."""
    taken: set[nn.Parameter] = set()
    owned: dict[nn.Module, list[nn.Parameter]] = {}
    for unit in (*units, model):
        owned[unit] = [param for param in dict.fromkeys(unit.parameters()) if param not in taken]
        taken.update(owned[unit])
    return owned


def _part(name: str, params: list[nn.Parameter]) -> Part:
    shapes = lambda wanted: tuple(tuple(p.shape) for p in params if p.requires_grad is wanted)  # noqa: E731
    return Part(name, shapes(True), shapes(False))


def leaves(source: object, inputs: tuple | dict | None = None, dtype: torch.dtype = torch.bfloat16) -> list[tuple]:
    """(name, parameters, work, ties) of the modules that a pipeline does not cut, for `partition`.

    They are the model's children, with lists and sequences opened, and what wraps most of the model. With `inputs` they stand in the order
    they run and work is FLOP of forward; without, as registered, and work is parameters. Ties are the parameters' identities.
    """
    model = build(source)
    found = dict.fromkeys(_opened(model, sum(param.numel() for param in model.parameters())))
    names = {module: name for name, module in model.named_modules()}
    work = {module: float(sum(param.numel() for param in module.parameters())) for module in found}
    if inputs is not None:
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
        order: dict[nn.Module, None] = {}
        hooks = [module.register_forward_pre_hook(lambda module, _: order.setdefault(module)) for module in found]
        counted = _flops(model, list(found), args, kwargs, dtype)
        for hook in hooks:
            hook.remove()
        work = dict(zip(found, counted, strict=False))
        found = {**order, **found}
    seen: set[nn.Parameter] = set()
    rows = []
    for module in found:
        own = list(dict.fromkeys(module.parameters()))
        rows.append((names[module], sum(param.numel() for param in own if param not in seen), work[module], tuple(map(id, own))))
        seen.update(own)
    return rows


def _opened(module: nn.Module, everything: int) -> Iterator[nn.Module]:
    for child in module.children():
        listed = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        wraps = 2 * sum(param.numel() for param in child.parameters()) > everything and wrap.blocks(child)
        if listed or wraps:
            yield from _opened(child, everything)
        elif next(child.parameters(), None) is not None:
            yield child


def _run(model: nn.Module, units: list[nn.Module], inputs: tuple | dict, dtype: torch.dtype, flash: bool) -> dict[str, tuple[float, ...]]:
    """Bytes kept, bytes of inputs and FLOP, by unit with the root last, each for one sample."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    samples: list[int] = []
    map_tensors(lambda tensor: samples.append(tensor.shape[0] if tensor.ndim else 1) or tensor, (args, kwargs))
    if not samples:
        raise ConfigError("the example inputs hold no tensor; give what forward takes, batch first")
    saved, edges = defaultdict(float), defaultdict(float)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with _without_data(model, args, kwargs, dtype, kernels if flash else kernels[-1:]) as run:
        known = {tensor.untyped_storage()._cdata for tensor in run.args[1].values()}
        with _counting(model, units, saved, edges, known):
            run()
    work = _flops(model, units, args, kwargs, dtype)
    by_sample = lambda values: tuple(value / samples[0] for value in values)  # noqa: E731
    return {"saved": by_sample(saved[unit] for unit in (*units, model)), "edges": by_sample(edges[unit] for unit in units),
            "work": by_sample(work)}


def _flops(model: nn.Module, units: list[nn.Module], args: tuple, kwargs: dict, dtype: torch.dtype) -> list[float]:
    """FLOP of forward by unit, and of what is outside them: in a run of its own, since torch's counter knows attention on the CPU only
    where it stores its scores."""
    with _without_data(model, args, kwargs, dtype, [SDPBackend.MATH]) as run, FlopCounterMode(display=False) as flops:
        run()
    counts, names, top = flops.get_flop_counts(), {module: name for name, module in model.named_modules()}, type(model).__name__
    work = [float(sum(counts.get(f"{top}.{names[unit]}", {}).values())) for unit in units]
    return [*work, sum(counts.get("Global", {}).values()) - sum(work)]


@contextmanager
def _without_data(model: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype, kernels: list[SDPBackend]) -> Iterator[partial]:
    """Yields forward as a function without arguments, with fake tensors in the place of weights, buffers and inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(kernels):
        tensors = {name: _fake(tensor, dtype) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        args, kwargs = map_tensors(lambda tensor: _fake(tensor, dtype), (args, kwargs))
        try:
            yield partial(torch.func.functional_call, model, tensors, args, kwargs)
        except Exception as error:
            raise ConfigError(f"{type(model).__name__} cannot run without data ({_first_line(error)}); leave inputs out, and activations "
                              "will stand under 'not included'") from error


def _fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The shape of `tensor`, inside the fake mode that is on."""
    fresh = torch.empty(tensor.shape, device="cpu", dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return fresh.requires_grad_(tensor.requires_grad)


@contextmanager
def _counting(model: nn.Module, units: list[nn.Module], saved: dict, edges: dict, known: set[int]) -> Iterator[None]:
    """While inside, whatever autograd keeps is added to the unit whose forward runs (`saved`), each memory once."""
    running, held = [model], []

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        running.append(module)
        edges[module] += sum(tensor.numel() * tensor.element_size() for tensor in need_gradient((args, kwargs)))

    def leave(module: nn.Module, *_: Any) -> None:
        running.pop()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            held.append(storage)                                             # alive, so that no other memory gets its number
            saved[running[-1]] += storage.nbytes()
        return tensor

    hooks = [hook for unit in units for hook in (unit.register_forward_pre_hook(enter, with_kwargs=True),
                                                 unit.register_forward_hook(leave, always_call=True))]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


