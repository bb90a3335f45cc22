"""`fsdp-ref plan`: the itemised table, the time of a step and the advice; and the actions that stand behind them.

    fsdp-ref plan --model llama3.1-70b --gpus 64 --gpu h100 --batch 256
    fsdp-ref plan --model llama3.1-8b --gpus 8 --gpu h100 --stage zero3 --micro-batch 2 --recompute full       this strategy, no search
    fsdp-ref plan validate | calibrate | hardware | models | pipeline | partition | simulate | compare

No torch is loaded but by calibrate, simulate and compare.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..train_options import Parser
from .advice import GOALS, advise
from .candidates import Cluster
from .footprint import describe, memory
from .hardware import machine, machines, traps
from .presets import presets
from .quantities import both, table
from .speed import step_time
from .strategy import DTYPES, RECOMPUTE, SCHEDULES, STAGES, Strategy, by_batch

# any of them given: this strategy, no search
FIXED = ("stage", "tensor", "context", "pipeline", "replicas", "micro_batch", "recompute", "schedule", "chunks")


def main(argv: list[str]) -> int:
    """Run `fsdp-ref plan`; returns the exit code."""
    actions: dict[str, Callable[[list[str]], int]] = {"validate": validate, "calibrate": calibrate, "hardware": hardware, "models": models,
                                                      "pipeline": pipeline, "partition": cut, "simulate": replay, "compare": compare}
    if argv and argv[0] in actions:
        return actions[argv[0]](argv[1:])
    return plan(argv)


def plan(argv: list[str]) -> int:
    """Print what a rank holds, how long a step takes, and what to do."""
    args = _parser().parse_args(argv)
    spec = machine(args.gpu, args.hardware)
    description = describe(args.model)
    given = {name: getattr(args, name) for name in FIXED if getattr(args, name) is not None}
    gpus = args.gpus if args.gpus is not None else spec.per_node
    common = {"sequence": args.sequence, "dtypes": args.dtypes}
    if given:
        one = Strategy(gpus=gpus, **given, **common)
        strategy = one if args.batch is None else by_batch(args.batch, gpus=gpus, **given, **common)
        _print_one(description, strategy, spec)
        return 0
    cluster = Cluster(spec, gpus, args.price, args.mtbf_hours, args.save_rate)
    found = advise(description, cluster, args.batch if args.batch is not None else gpus, args.goal, **common)
    if found.options:
        print(found.options[0].footprint, found.options[0].timing, sep="\n\n", end="\n\n")
    print(found)
    return 0


def _print_one(description, strategy: Strategy, spec) -> None:
    footprint = memory(description, strategy)
    verdict = {"yes": "it fits", "no": "it does not fit", "perhaps": "it may fit: the capacity lies inside the range"}
    print(footprint, f"\n{verdict[footprint.fits(spec.memory)]}: one {spec.name} has {both(spec.memory)}\n", sep="\n")
    print(step_time(description, strategy, spec))


def _parser() -> Parser:
    p = Parser(prog="fsdp-ref plan", description=__doc__.splitlines()[0].partition(": ")[2].capitalize(), allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG)
    what = p.add_argument_group("what to train on what")
    what.add_argument("--model", required=True, metavar="NAME", help="a preset; fsdp-ref plan models lists them")
    what.add_argument("--gpus", type=int, metavar="N", help="how many at most (default one node)")
    what.add_argument("--gpu", default="h100", metavar="NAME", help="a machine of fsdp-ref plan hardware (default h100)")
    what.add_argument("--batch", type=int, metavar="N", help="sequences in a step, all ranks together (default one a GPU)")
    what.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (default the model's context)")
    what.add_argument("--dtypes", default="fsdp", choices=DTYPES, metavar="|".join(DTYPES), help="bytes of each kind of state")
    what.add_argument("--hardware", metavar="FILE", help="a hardware file of your own, besides the built-in ones")
    want = p.add_argument_group("what to look for")
    want.add_argument("--goal", default="time", choices=GOALS, metavar="|".join(GOALS), help="what to rank by (default time)")
    want.add_argument("--price", type=float, metavar="X", help="of one GPU for an hour")
    want.add_argument("--mtbf-hours", type=float, metavar="X", help="hours between failures or preemptions of one node")
    want.add_argument("--save-rate", type=float, default=2e9, metavar="X", help="bytes a second a checkpoint is written with (default 2e9)")
    one = p.add_argument_group("one strategy instead of a search (any of these)")
    for name, known in (("stage", tuple(STAGES)), ("recompute", RECOMPUTE), ("schedule", SCHEDULES)):
        one.add_argument(f"--{name}", choices=known, metavar="|".join(known), help=f"see {name} of Strategy")
    for name in ("tensor", "context", "pipeline", "chunks", "replicas", "micro-batch"):
        one.add_argument(f"--{name}", type=int, metavar="N", help="degree, or number")
    return p


_EPILOG = """\
other actions, each with --help:
  fsdp-ref plan validate      published figures beside the planner's own
  fsdp-ref plan calibrate     measure this machine: latency, bandwidth, matrix multiplication
  fsdp-ref plan hardware      the machines that are known, and three traps of datasheets
  fsdp-ref plan models        the models that are known
  fsdp-ref plan pipeline      time and bubble of a pipeline schedule
  fsdp-ref plan partition     cut a model into pipeline stages
  fsdp-ref plan simulate      one step of the engine itself on any number of ranks, with predicted times
  fsdp-ref plan compare       the simulator's prediction beside a step of real ranks
"""


def validate(argv: list[str]) -> int:
    """Print predicted beside published; exit code 1 when a figure that must agree does not."""
    p = Parser(prog="fsdp-ref plan validate", description="Published figures beside the planner's own, table by table. Exit code 1 when "
               "one that must agree does not.")
    p.add_argument("--table", metavar="NAME", help="only this table")
    args = p.parse_args(argv)
    from . import validate as validation
    from .quantities import pick
    from .tables import names
    print(validation.report(None if args.table is None else pick("published table", args.table, names())))
    return 1 if validation.failures() else 0


def calibrate(argv: list[str]) -> int:
    """Measure this machine and print, or write, a hardware file."""
    p = Parser(prog="fsdp-ref plan calibrate", description="Measure this machine with a few ranks: alpha and beta of its collectives, "
               "matrix multiplication, memory. Takes some seconds.")
    p.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks to measure with (default 2)")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), metavar="auto|cpu|cuda", help="where (default auto)")
    p.add_argument("--name", default="mine", metavar="NAME", help="what to call the machine (default mine)")
    p.add_argument("--out", metavar="FILE", help="write a hardware file for --hardware")
    args = p.parse_args(argv)
    from . import calibrate as calibration
    found = calibration.calibrate(args.ranks, device=args.device, name=args.name)
    print(found)
    if args.out:
        print(f"\nwritten to {calibration.save(found, args.out)}; use it with: fsdp-ref plan --hardware {args.out} --gpu {args.name} ...")
    return 0


def hardware(argv: list[str]) -> int:
    """Print every machine with the sources of its figures."""
    p = Parser(prog="fsdp-ref plan hardware", description="Machines that are known, each figure with its source, and three traps.")
    p.add_argument("name", nargs="?", metavar="NAME", help="only this machine")
    p.add_argument("--hardware", metavar="FILE", help="a hardware file of your own, besides the built-in ones")
    args = p.parse_args(argv)
    known = machines(args.hardware)
    shown = [machine(args.name, args.hardware)] if args.name else list(known.values())
    print("\n\n".join(str(each) for each in shown))
    print("\nthree traps:", *(f"  {name}: {text}" for name, text in traps().items()), sep="\n")
    return 0


def models(argv: list[str]) -> int:
    """Print every preset."""
    Parser(prog="fsdp-ref plan models", description="Models that are known by name.").parse_args(argv)
    rows = [("model", "parameters", "layers", "width", "context", "source")]
    rows += [(name, f"{shape.parameters:,}", str(shape.layers), str(shape.dim), str(shape.context), shape.source)
             for name, shape in presets().items()]
    print(table(rows, right=(1, 2, 3, 4)))
    return 0


def pipeline(argv: list[str]) -> int:
    """Print the time, both bubbles and the activations in flight of a schedule."""
    p = Parser(prog="fsdp-ref plan pipeline", description="Time and bubble of a pipeline schedule, in both definitions of the bubble.")
    p.add_argument("schedule", metavar="|".join(SCHEDULES))
    p.add_argument("--ranks", type=int, default=4, metavar="N", help="stages, one a rank (default 4)")
    p.add_argument("--micro-batches", type=int, default=8, metavar="N", help="(default 8)")
    p.add_argument("--chunks", type=int, default=1, metavar="N", help="interleaved only: parts of the model a rank (default 1)")
    p.add_argument("--forward", type=float, default=1.0, metavar="S", help="seconds of a stage's forward (default 1)")
    p.add_argument("--backward", type=float, default=2.0, metavar="S", help="and of its backward (default 2)")
    p.add_argument("--send", type=float, default=0.0, metavar="S", help="and of a hand-over (default 0)")
    args = p.parse_args(argv)
    from .pipeline import run, schedule
    print(run(schedule(args.schedule, args.ranks, args.micro_batches, args.chunks), args.forward, args.backward, send=args.send))
    return 0


def cut(argv: list[str]) -> int:
    """Print a model's stages."""
    p = Parser(prog="fsdp-ref plan partition", description="Cut a model into pipeline stages that are as equal as can be.")
    p.add_argument("--model", required=True, metavar="NAME", help="a preset")
    p.add_argument("--stages", type=int, required=True, metavar="N")
    p.add_argument("--memory-weight", type=float, default=0.2, metavar="X", help="0 balances time, 1 memory (default 0.2)")
    p.add_argument("--gpu", metavar="NAME", help="whose memory each stage must fit")
    args = p.parse_args(argv)
    from .stages import partition
    capacity = machine(args.gpu).memory if args.gpu else None
    print(partition(args.model, args.stages, memory_weight=args.memory_weight, capacity=capacity))
    return 0




def replay(argv: list[str]) -> int:
    """Replay the engine on meta for a world of any size; the ledger may be kept for `fsdp-ref show`."""
    p = Parser(prog="fsdp-ref plan simulate", description="One ZeRO-3 step of the engine itself, replayed without data for any number of "
               "ranks, with predicted times.")
    p.add_argument("--model", required=True, metavar="NAME", help="a preset")
    p.add_argument("--gpus", type=int, default=8, metavar="N", help="ranks (default 8)")
    p.add_argument("--gpu", default="h100", metavar="NAME", help="kind of GPU (default h100)")
    p.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences a rank (default 1)")
    p.add_argument("--sequence", type=int, metavar="N", help="tokens in a sequence (default the model's context)")
    p.add_argument("--recompute", choices=RECOMPUTE, default="none", metavar="|".join(RECOMPUTE), help="(default none)")
    p.add_argument("--ledger", metavar="FILE", help="write the predicted ledger, for fsdp-ref show")
    args = p.parse_args(argv)
    from .simulator import simulate
    found = simulate(args.model, args.gpus, machine=args.gpu, micro_batch=args.micro_batch, sequence=args.sequence,
                     recompute=args.recompute)
    print(found)
    if args.ledger:
        print(f"written to {found.ledger.save(args.ledger)}; draw it with: fsdp-ref show {args.ledger} --out DIR")
    return 0


def compare(argv: list[str]) -> int:
    """Print predictions beside measurements on this machine."""
    p = Parser(prog="fsdp-ref plan compare", description="The simulator's prediction beside a step of real gloo ranks on emulated links. "
               "Compute is measured on the first link and predicted for the others. Takes a minute or two.")
    p.add_argument("--ranks", type=int, default=2, metavar="N", help="(default 2)")
    p.add_argument("--dim", type=int, default=32, metavar="N", help="width of the GPT (default 32)")
    p.add_argument("--layers", type=int, default=6, metavar="N", help="(default 6)")
    p.add_argument("--batch", type=int, default=1, metavar="N", help="windows of 64 bytes a rank (default 1)")
    p.add_argument("--rounds", type=int, default=5, metavar="N", help="recorded steps of each link (default 5)")
    p.add_argument("--nap", type=float, default=0.02, metavar="S", help="seconds every block's forward sleeps besides computing, as work "
                   "does that needs no CPU; 0 computes alone, for a machine that is quiet (default 0.02)")
    args = p.parse_args(argv)
    from . import compare as comparing
    print(comparing.compare(args.ranks, dim=args.dim, layers=args.layers, batch=args.batch, rounds=args.rounds, nap=args.nap))
    return 0
