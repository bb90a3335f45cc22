"""The exercise `bytes_per_parameter` (notebook 03): what training keeps of one parameter on one rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from .exercise import Case, Exercise
from .observe import Evidence
from .report import Verdict, fails, passes

PRECISIONS, OPTIMIZERS, STAGES = ("fp32", "mixed", "bf16"), ("sgd", "momentum", "adam"), ("ddp", "zero1", "zero2", "zero3")
NAMES = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer's state"}
PARTS = tuple(NAMES)
SHARDED = {"ddp": (), "zero1": ("optimizer",), "zero2": ("optimizer", "gradients"), "zero3": PARTS}
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}


def whole(precision: str, optimizer: str) -> dict[str, float]:
    """Bytes of one parameter when nothing is sharded."""
    size = 4 if precision == "fp32" else 2
    state = MOMENTS[optimizer] * (2 if precision == "bf16" else 4) + (4 if precision == "mixed" else 0)
    return {"weights": size, "gradients": size, "optimizer": state}


def expected(precision: str, optimizer: str, stage: str, world: int) -> dict[str, float]:
    """The same on one of `world` ranks."""
    return {part: size / (world if part in SHARDED[stage] else 1) for part, size in whole(precision, optimizer).items()}


def cases(seed: int) -> Iterator[Case]:
    """DDP first, so that the bytes themselves are judged before what sharding does to them; then everything."""
    draw = random.Random(seed)
    plain = [[precision, optimizer, "ddp", 4] for precision in PRECISIONS for optimizer in OPTIMIZERS]
    yield _case(2, "nothing sharded", plain)
    yield _case(2, "4 ranks, every stage", [[*each, 4] for each in itertools.product(("fp32", "mixed"), ("adam",), STAGES)])
    yield _case(3, "drawn numbers of ranks", [[*each, draw.choice((1, 3, 7, 8, 24, 96, 1000))] for each in
                                               itertools.product(PRECISIONS, OPTIMIZERS, STAGES)])


def _case(world: int, title: str, questions: list) -> Case:
    return Case(world, title, shared={"questions": questions}, known={"questions": questions})


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """The bytes of whole tensors are "values"; what the stages do to them is "sharding"."""
    questions, answers = case.known["questions"], evidence.values("answers")[0]
    sharded = case.title != "nothing sharded"
    for question, answer in zip(questions, answers, strict=True):
        if wrong := _shape(answer):
            return [fails("values", f"for {_told(question)}: {wrong}")]
        for part in PARTS:
            want = expected(*question)[part]
            if abs(answer[part] - want) > 1e-9 * max(1, want):
                words = f"for {_told(question)} the bytes of the {NAMES[part]} {_mistake(question, part, answer[part])}"
                seen = {"expected": [[*SHARDED[question[2]]]], "actual": [_smaller(question, answer)], "pictured": "what is sharded"}
                return ([passes("values", "the bytes of whole tensors are right"), fails("sharding", words, parameter=part, **seen)]
                        if sharded else [fails("values", words, parameter=part)])
    verdicts = [passes("values", "the bytes of whole tensors are right")]
    return [*verdicts, passes("sharding", "each stage divides what it shards, by the number of ranks")] if sharded else verdicts


def _smaller(question: list, answer: dict) -> list[str]:
    """What the answer divides."""
    return [part for part in PARTS if answer[part] < whole(*question[:2])[part]]


def _told(question: list) -> str:
    precision, optimizer, stage, world = question
    return f"{precision}, {optimizer}, {stage} on {world} ranks"


def _shape(answer: object) -> str:
    if answer is None:
        return "it returned nothing; return the dict"
    if not isinstance(answer, dict) or set(answer) != set(PARTS):
        return "return a dict with the keys weights, gradients and optimizer"
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in answer.values()):
        return "the values of the dict must be numbers"
    return ""


def _mistake(question: list, part: str, given: float) -> str:
    """Which mistake gives this number."""
    precision, optimizer, stage, world = question
    size, right = whole(precision, optimizer)[part], expected(*question)[part]
    if stage != "ddp" and world > 1 and part in SHARDED[stage] and given == size:
        return f"are not divided; {stage} shards them"
    if stage != "ddp" and world > 1 and part not in SHARDED[stage] and abs(given - size / world) < 1e-9:
        return f"are divided by the number of ranks; {stage} keeps them whole on every rank"
    if stage != "ddp" and given == int(right):
        return "are rounded down; a rank's share of one parameter may be a fraction of a byte"
    if stage != "ddp":
        return "are divided by something else than the number of ranks"
    if part == "optimizer" and precision == "mixed" and given == size - 4:
        return "lack the fp32 master copy of the weight, which the optimizer keeps and updates"
    if part == "optimizer" and optimizer == "adam" and given == size - (2 if precision == "bf16" else 4):
        return "hold one moment only; Adam keeps two"
    if part == "optimizer" and precision == "bf16" and given == 2 * size:
        return "are too large: where the weights themselves are bf16, torch's optimizers keep their moments in bf16 as well"
    if part == "gradients" and given == 2 * size:
        return "are twice what they should be: a gradient has the dtype of the weight it belongs to"
    return "are more than they should be" if given > right else "are less than they should be"


EXERCISE = Exercise(
    id="bytes_per_parameter", notebook="03", title="What one parameter costs on one rank",
    task="Return a dict of weights, gradients and optimizer: bytes a parameter on one rank between backward and step. precision is fp32, "
         "mixed (bf16 weights and gradients; the optimizer keeps an fp32 master copy and fp32 moments) or bf16 (everything in bf16); "
         "optimizer is sgd (no state), momentum (one moment) or adam (two); stage is ddp, zero1, zero2 or zero3.",
    signature="def bytes_per_parameter(precision, optimizer, stage, world):",
    points={"values": 3, "sharding": 2},
    hints=("Do DDP first: three numbers for each precision. What does each of the three hold, and how many bytes has one of it?",
           "A gradient has the dtype of its weight. Moments follow the weights that the optimizer updates: in mixed precision those are "
           "the fp32 master copy, which itself counts as the optimizer's.",
           "Then divide: zero1 the optimizer's part, zero2 the gradients too, zero3 all three, by world, as a fraction."),
    cases=cases, judge=judge)
