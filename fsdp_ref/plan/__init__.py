"""The planner: does it fit, what does each rank hold, how long is a step, which strategy, before anybody rents a cluster.

    memory(model, ...)        what one rank holds, term by term (footprint.py)
    simulate(model, ...)      one step of the engine itself on any number of ranks, with times from a cost model (simulator.py)
    step_time(model, ...)     how long a step takes, from formulas (speed.py, network.py, hardware.toml)
    schedule, partition       pipelines: orders of work as data, a model cut into stages (pipeline.py, stages.py)
    advise(model, cluster)    the strategies that fit, ranked, each with its reason (advice.py)

Every figure is a sum of named terms, and what is left out is named beside it. Figures about hardware and published runs are data with
their sources (hardware.toml, presets.toml, published/). Presets and formulas need no torch, so `fsdp-ref plan` answers at once; names
are loaded when they are first used. The engine is imported only where it is replayed.
"""

import importlib

_HOMES = {
    "advice": ["Advice", "advise"],
    "architecture": ["Architecture"],
    "candidates": ["Cluster"],
    "controls": ["sliders"],
    "footprint": ["Footprint", "memory"],
    "hardware": ["Machine", "machine"],
    "pipeline": ["schedule"],
    "presets": ["preset"],
    "simulator": ["simulate"],
    "speed": ["Timing", "step_time"],
    "stages": ["partition"],
    "strategy": ["Dtypes", "Strategy"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fsdp_ref.plan' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(importlib.import_module(f"fsdp_ref.plan.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
