"""The exercise `capstone` (notebook 12): wrap a GPT inside a budget of memory, bytes and messages, and say why.

What a choice costs comes from fsdp_ref/forecast.py, which is held to the engine's own ledger by its tests: no rank needs to train. A unit
that is kept whole after forward counts its whole weights on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ... import forecast
from ...policies import MixedPrecisionPolicy
from ...rows import Category, wire_bytes
from .exercise import Case, Exercise
from .finding import Finding, Picture, careful, verdicts
from .inside.capstone import build
from .observe import Evidence
from .report import Verdict

RANKS = 8                                                # that the budgets are for
MEMORY, TRAFFIC, MESSAGES = 1_480_000, 2_400_000, 45     # bytes, bytes, number: of one rank in one step
DTYPES = {"": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RIGHT = {"worst moment": 2, "twice the ranks": 3, "float32 sums": 1}
NOT_SO = {"worst moment": "look at the ledger of one step: what is whole when the last block's backward begins, beside the root?",
          "twice the ranks": "a ring sends (n - 1) / n of every message; put 8 and 16 into it",
          "float32 sums": "which of the two messages is a sum over all ranks, and which is only a copy?"}
GOOD = {"values": "every call can be made, and gradients are summed in float32",
        "sharding": "every parameter belongs to a unit",
        "memory": "a rank stays within its memory",
        "bytes": "a rank sends no more than it may",
        "messages": "the messages are large enough to be few",
        "answers": "all three choices are right"}


@dataclass(frozen=True)
class Plan:
    """The calls as units of a model: modules from inside out, what each comes to, which stay whole after forward."""

    model: nn.Module
    units: list[nn.Module]
    sizes: dict[nn.Module, dict]
    kept: list[nn.Module]

    @property
    def memory(self) -> int:
        """Bytes at the worst moment, activations left out."""
        return forecast.held(self.sizes).total() + sum(self.sizes[unit][Category.UNSHARDED_PARAM] for unit in self.kept)

    @property
    def traffic(self) -> float:
        """Bytes a rank sends in a step."""
        return sum(wire_bytes("all-gather", size[Category.ALL_GATHER], RANKS) * (1 if unit in self.kept else 2)
                   + wire_bytes("reduce-scatter", size[Category.REDUCE_SCATTER], RANKS) for unit, size in self.sizes.items())

    @property
    def messages(self) -> int:
        """Collectives in a step."""
        return 3 * len(self.sizes) - len(self.kept)


def cases(seed: int) -> Iterator[Case]:
    """One model, one cluster; two ranks make the calls, as every rank of a script does."""
    yield Case(2, f"a GPT of 6 blocks on {RANKS} ranks", known={"model": build()})


def plan_of(model: nn.Module, calls: list[dict]) -> Plan:
    """What the calls come to."""
    units = [model.get_submodule(call["unit"]) for call in calls if call["unit"]]
    sizes: dict[nn.Module, dict] = {}
    for call in calls:
        policy = MixedPrecisionPolicy(DTYPES[call["param"]], DTYPES[call["reduce"]])
        unit = model.get_submodule(call["unit"])
        sizes[unit] = forecast.sizes(model, units, RANKS, policy)[unit]
    in_order = forecast.sizes(model, units, RANKS, MixedPrecisionPolicy())
    return Plan(model, units, {unit: sizes[unit] for unit in in_order if unit in sizes},
                [model.get_submodule(call["unit"]) for call in calls if not call["reshard"]])


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """The calls, then what they cost, then the choices."""
    seen, other = evidence.values()
    calls, model = seen["calls"], case.known["model"]
    found = [] if seen == other else [Finding("values", "the two ranks make different calls; all ranks must wrap the same units", 1)]
    found += [*_calls(model, calls), *_sharding(model, calls), *_answers(seen["answers"])]
    if any(finding.property in ("values", "sharding") for finding in found):
        return verdicts(found, {name: words for name, words in GOOD.items() if name in ("values", "sharding", "answers")})
    plan = plan_of(model, calls)
    found += _costs(plan, calls)
    budget = [f"at most {MEMORY // 1000} kB held", f"at most {TRAFFIC // 1000} kB sent", f"at most {MESSAGES} messages"]
    yours = [f"{plan.memory // 1000} kB held", f"{plan.traffic // 1000:.0f} kB sent", f"{plan.messages} messages"]
    shown = [want if cost <= most else have for want, have, cost, most in zip(
        budget, yours, (plan.memory, plan.traffic, plan.messages), (MEMORY, TRAFFIC, MESSAGES), strict=True)]
    return verdicts(found, GOOD, Picture("costs of a rank and step against the budgets", [budget], [shown]))


def _calls(model: nn.Module, calls: list[dict]) -> Iterator[Finding]:
    """What the engine itself would refuse, and the dtype of sums."""
    names = [call["unit"] for call in calls]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield Finding("values", f"fully_shard is applied to {twice or 'the model'} twice", parameter=twice)
    for place, name in enumerate(names):
        inner = next((later for later in names[place + 1:] if later != name and later.startswith(f"{name}." if name else "")), None)
        if inner is not None:
            yield Finding("values", f"{name or 'the model'} is wrapped before {inner}, which is inside it, and takes its parameters: wrap "
                                    "from inside out", parameter=inner)
            break
    tied = next((name for name in names if name in ("tokens", "head")), None)
    if tied:
        yield Finding("values", f"tokens and head share one matrix, and {tied} alone became a unit: a tied parameter belongs to one unit "
                                "that holds all its uses, here the model itself", parameter=tied)
    low = next((call for call in calls if (call["reduce"] or call["param"] or "float32") != "float32"), None)
    if low:
        yield Finding("values", f"the gradients of {low['unit'] or 'the model'} are reduced in {low['reduce'] or low['param']}: say "
                      "reduce_dtype=torch.float32, or it follows param_dtype", parameter=low["unit"])


def _sharding(model: nn.Module, calls: list[dict]) -> Iterator[Finding]:
    names = [call["unit"] for call in calls]
    total = sum(param.numel() for param in model.parameters())
    inside = {param for name in names for param in model.get_submodule(name).parameters()}
    left = total - sum(param.numel() for param in inside)
    if not names:
        yield Finding("sharding", "fully_shard is never called: every rank holds the whole model, its gradients and its optimizer state")
    elif left:
        yield Finding("sharding", f"{left} of {total} parameters belong to no unit and stay whole on every rank: wrap the "
                                  "model itself last")


def _costs(plan: Plan, calls: list[dict]) -> Iterator[Finding]:
    over = plan.memory > MEMORY
    wide = [call for call in calls if (call["param"] or "float32") == "float32"]
    biggest = max(plan.sizes, key=lambda unit: plan.sizes[unit][Category.UNSHARDED_PARAM])
    share = plan.sizes[biggest][Category.UNSHARDED_PARAM] / sum(size[Category.UNSHARDED_PARAM] for size in plan.sizes.values())
    if wide:
        why = f"{len(wide)} of {len(calls)} units are gathered and computed in float32, twice the bytes of bfloat16"
    elif len(plan.kept) > 1:
        why = f"{len(plan.kept)} units stay whole from forward to backward (reshard_after_forward=False)"
    else:
        why = f"the largest unit holds {100 * share:.0f} % of the weights, and is whole, with its gradient, at once"
    if over:
        yield Finding("memory", f"a rank holds {plan.memory} bytes at the worst moment and may hold {MEMORY}: {why}")
    if plan.traffic > TRAFFIC:
        yield Finding("bytes", f"a rank sends {plan.traffic:.0f} bytes in a step and may send {TRAFFIC}: {why}")
    if plan.messages > MESSAGES:
        yield Finding("messages", f"{plan.messages} messages a step where {MESSAGES} are allowed: {len(plan.sizes)} units are too many and "
                                  "too small, and each message costs its latency")


def _answers(answers: dict | None) -> Iterator[Finding]:
    for name, right in RIGHT.items():
        given = answers.get(name) if isinstance(answers, dict) else None
        if given is None:
            yield Finding("answers", f"the choice {name!r} is not answered; return a dict with the number you chose", parameter=name)
        elif given != right:
            yield Finding("answers", f"the choice {name!r}: it is not number {given}; {NOT_SO[name]}", parameter=name)


EXERCISE = Exercise(
    id="capstone", notebook="12", title="Wrap a GPT inside a budget",
    task=f"Shard `model` (tokens, positions, blocks 0 to 5 with attn and mlp, norm, head tied to tokens) for {RANKS} ranks and Adam in "
         "float32, by calling fully_shard(module, reshard_after_forward=..., mp_policy=...) as in a training script. A rank may hold at "
         f"most {MEMORY} bytes at the worst moment (activations left out), send at most {TRAFFIC} bytes and take part in at most "
         f"{MESSAGES} collectives in a step. Gradients must be summed in float32. Return your answers to the three choices of the "
         "statement as a dict.",
    signature="def capstone(model, fully_shard, MixedPrecisionPolicy):",
    points={"values": 2, "sharding": 2, "memory": 2, "bytes": 1, "messages": 1, "answers": 3, "no hang": 1},
    hints=("Add up the bytes of a parameter at rest on 8 ranks: weight, gradient, two moments. How much of the budget is left for what is "
           "whole?",
           "What travels: the weights twice and the gradient once. The first two may be in bfloat16. A unit costs three messages.",
           "Blocks are good units: wrap each, then the model, with one policy: bfloat16 weights, float32 sums. Leave reshard_after_forward "
           "as it is, except perhaps for the last block."),
    cases=cases, judge=judge)
