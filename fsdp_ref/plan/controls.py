"""The planner under a hand: `sliders()` in a notebook, and the pure function that answers each move.

`answer` takes plain values and returns text: footprint, time and verdict of one choice, in a few milliseconds, and a sentence instead of an
error when the choice cannot be. The widgets only pass values to it. Without ipywidgets, or on paper, the text of the first choice stands.
"""

from __future__ import annotations

from ..errors import ConfigError
from .footprint import describe, memory
from .hardware import machine, machines
from .presets import presets
from .quantities import both
from .speed import step_time
from .strategy import DTYPES, RECOMPUTE, STAGES, Strategy

POWERS = tuple(2**power for power in range(15))


def answer(model: str = "llama3.1-8b", gpu: str = "h100", gpus: int = 8, stage: str = "zero3", tensor: int = 1, pipeline: int = 1,
           micro_batch: int = 1, micro_batches: int = 1, recompute: str = "none", dtypes: str = "fsdp") -> str:
    """What one choice holds and how long its step takes, as text; a choice that cannot be is told in a sentence."""
    try:
        spec, description = machine(gpu), describe(model)
        nodes = -(-gpus // spec.per_node)
        replicas = nodes if stage == "hsdp" else 1
        strategy = Strategy(gpus, stage, replicas, tensor, pipeline=pipeline, micro_batch=micro_batch, micro_batches=micro_batches,
                            recompute=recompute, dtypes=dtypes)
        footprint, timing = memory(description, strategy), step_time(description, strategy, spec)
    except ConfigError as error:
        return f"not possible: {error}"
    verdict = {"yes": "fits", "no": "DOES NOT FIT", "perhaps": "MAY FIT"}[footprint.fits(spec.memory)]
    return f"{verdict} in {both(spec.memory)} of one {spec.name}\n\n{footprint}\n\n{timing}"


def sliders(model: str = "llama3.1-8b", gpu: str = "h100", gpus: int = 8) -> object:
    """Sliders and menus with the answer below them, for the last line of a notebook's cell.

    Returns an ipywidgets box; the text of the first choice where ipywidgets is not installed.
    """
    first = answer(model, gpu, gpus)
    try:
        import ipywidgets as widgets
    except ImportError:
        print(first)
        return None
    wide = {"style": {"description_width": "9em"}}
    power = lambda name, value: widgets.SelectionSlider(options=POWERS, value=value, description=name, **wide)  # noqa: E731
    menu = lambda name, options, value: widgets.Dropdown(options=list(options), value=value, description=name, **wide)  # noqa: E731
    controls = {"model": menu("model", presets(), model), "gpu": menu("GPU", machines(), gpu), "gpus": power("GPUs", gpus),
                "stage": menu("stage", STAGES, "zero3"), "tensor": power("tensor", 1), "pipeline": power("pipeline", 1),
                "micro_batch": power("micro-batch", 1), "micro_batches": power("micro-batches", 1),
                "recompute": menu("recompute", RECOMPUTE, "none"), "dtypes": menu("dtypes", DTYPES, "fsdp")}
    shown = widgets.HTML()

    def update(_: object = None) -> None:
        text = answer(**{name: control.value for name, control in controls.items()})
        shown.value = f"<pre role='status'>{text.replace('&', '&amp;').replace('<', '&lt;')}</pre>"

    for control in controls.values():
        control.observe(update, names="value")
    update()
    return widgets.VBox([*controls.values(), shown])
