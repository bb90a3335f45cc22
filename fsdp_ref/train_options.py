"""The training command's options: what may be given, what is assumed, what cannot work.

A run's options are kept in its folder, so `--resume` needs no other option: what is not given is what the run had. This module
is read before anything heavy, so that `--help` and a wrong argument answer at once: it must never import torch, start a process
or change a file.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import asdict, dataclass, fields

from .errors import ConfigError

STRATEGIES = ("zero3", "zero2", "zero1", "ddp", "hsdp")
FIXED = ("dim", "layers", "heads", "context", "seed")       # what a resumed run cannot change: its weights and its order depend on them
OF_ONE_START = ("resume", "progress", "max_restarts")        # not of the run: a resumed run does not inherit them
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DESCRIPTION = """\
Train a byte-level GPT on several ranks of this machine, its parameters, gradients and optimizer state sharded (zero3), replicated
(ddp), or something between. The text is the Python standard library's own source unless --data names another.
"""
EPILOG = """\
examples:
  fsdp-ref train                                        four ranks, about two minutes on two cores
  fsdp-ref train --out runs/mine --save-every 50        with a checkpoint every 50 steps
  fsdp-ref train --out runs/mine --resume auto          go on after a crash or a signal, from the newest checkpoint
  fsdp-ref train --max-restarts 3 --mtbf 12h --save-every auto      for machines that fail twice a day
  torchrun --nproc-per-node 4 -m fsdp_ref.train         the same ranks, started by torchrun (also on several machines)

SIGTERM or SIGUSR1 to the command, to torchrun or to any one rank ends the step, saves it on all ranks and exits with 75.

exit codes: 0 done, 2 a wrong argument or text, 3 a rank was lost, 4 a checkpoint cannot be used, 75 stopped by SIGTERM or SIGUSR1
(go on with --resume auto), 130 stopped by Ctrl-C
"""


@dataclass(frozen=True)
class Options:
    """Everything a run depends on. `out`, `data`: None until they are chosen (a new folder under runs/, the standard library)."""

    ranks: int = 4
    steps: int = 250
    out: str | None = None
    data: str | None = None
    strategy: str = "zero3"
    replicas: int = 2
    dim: int = 128
    layers: int = 3
    heads: int = 4
    context: int = 64
    batch: int = 32
    accumulate: int = 1
    lr: float = 3e-3
    warmup: int = 20
    dropout: float = 0.0
    seed: int = 0
    device: str = "auto"
    eval_every: int = 100
    eval_windows: int = 128
    prefetch: int = 0
    timeout: float = 60.0
    max_restarts: int = 0
    save_every: int | str = 100
    mtbf: float | None = None
    keep_last: int = 2
    log_every: int = 10
    resume: str | None = None
    ledger: bool = False
    progress: str = "auto"


def duration(text: str) -> float:
    """Seconds of a time such as 45, 45s, 90m, 3h, 2d."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds, or a number with s, m, h or d such as 3h")
    return seconds


def steps_or_auto(text: str) -> int | str:
    """A number of steps, or `auto`."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor auto") from None


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are ConfigErrors: one line, exit code 2."""

    def error(self, message: str) -> None:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """The parser of `fsdp-ref train`; options that are not given do not appear in its result."""
    own = Options()
    p = Parser(prog="fsdp-ref train", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)

    def add(to: argparse._ArgumentGroup, name: str, text: str, kind: type = int, **more) -> None:
        default = getattr(own, name.replace("-", "_"))
        shown = "" if default is None else f" (default {default})"
        to.add_argument(f"--{name}", type=kind, help=text + shown, **({"metavar": "N" if kind is int else "X"} | more))

    run = p.add_argument_group("the run")
    add(run, "ranks", "processes to train on")
    add(run, "steps", "optimizer steps in all")
    add(run, "out", "the run's folder (default a new one under runs/)", str, metavar="RUN")
    add(run, "data", "a text file, or a folder of them (default the Python standard library's source)", str, metavar="PATH")
    add(run, "strategy", "what is sharded: zero3 everything, zero2 gradients and optimizer, zero1 the optimizer, ddp nothing, hsdp "
        "everything inside a group of ranks", str, choices=STRATEGIES, metavar="|".join(STRATEGIES))
    add(run, "replicas", "hsdp: groups of ranks that each hold the whole model in shards; must divide the ranks")
    add(run, "device", "auto uses the GPUs when there is one for each rank", str, choices=("auto", "cpu", "cuda"), metavar="auto|cpu|cuda")
    add(run, "prefetch", "batches that a thread makes ahead")
    add(run, "timeout", "seconds that a rank waits for another before it gives the run up", float)
    add(run, "max-restarts", "times that the ranks are started again after one was lost; they go on from the newest checkpoint")
    add(run, "seed", "of weights, dropout and the order of the text")
    model = p.add_argument_group("the model")
    add(model, "dim", "width")
    add(model, "layers", "blocks")
    add(model, "heads", "attention heads; must divide the width")
    add(model, "context", "window length in bytes")
    add(model, "dropout", "share of activations set to zero in training", float)
    learning = p.add_argument_group("learning")
    add(learning, "batch", "windows in a step, all ranks together; a multiple of the ranks")
    add(learning, "accumulate", "micro-batches that a rank's part of the batch is cut into: less memory, the same step")
    add(learning, "lr", "highest learning rate", float)
    add(learning, "warmup", "steps until the learning rate is at its highest; it then falls to a tenth along a cosine")
    add(learning, "eval-every", "steps between two looks at the held-out text; 0: only at the end")
    add(learning, "eval-windows", "windows of held-out text to look at")
    keeping = p.add_argument_group("keeping and showing")
    add(keeping, "save-every", "steps between two checkpoints (there is one at the end too); auto: what --mtbf advises; 0: only when a "
        "signal stops the run", steps_or_auto, metavar="N|auto")
    add(keeping, "mtbf", "mean time between failures of all machines together, such as 90m, 3h, 2d: the run then says how often to save",
        duration, metavar="TIME")
    add(keeping, "keep-last", "checkpoints to keep, besides the one the run was resumed from; 0: all")
    add(keeping, "resume", "auto: go on from RUN's newest checkpoint; PATH: from that run or checkpoint; none: from the beginning", str,
        metavar="auto|PATH|none")
    keeping.add_argument("--ledger", action="store_true", help="record one step into RUN/ledger.json, for fsdp-ref show")
    add(keeping, "log-every", "steps between two printed lines (RUN/log.jsonl has every step)")
    add(keeping, "progress", "the progress bar; auto shows it on a terminal", str, choices=("auto", "always", "never"),
        metavar="auto|always|never")
    return p


def parse(argv: list[str]) -> dict:
    """The options given on the command line, by name. Raises ConfigError for one that is unknown or malformed."""
    if sys.platform == "win32":
        raise ConfigError("fsdp_ref does not run on Windows itself; use WSL2 (wsl --install) and start it there")
    given = vars(parser().parse_args(argv))
    if given.get("data") is not None:
        given["data"] = os.path.abspath(given["data"])
    return given


def complete(given: dict, saved: dict | None = None) -> Options:
    """The options of a run: what was given, else what the run had when it is resumed (`saved`), else the defaults; checked.

    Raises:
        ConfigError: an option that cannot work, alone or beside another, or one that a resumed run cannot change.
    """
    saved = saved or {}
    for name in FIXED:
        if name in given and name in saved and given[name] != saved[name]:
            raise ConfigError(f"--{name} is {given[name]} and the run to resume has {saved[name]}, which its weights or its order depend "
                              f"on; leave --{name} out, or start a new run with another --out")
    known = {field.name for field in fields(Options)} - {"out", "ledger", *OF_ONE_START}
    options = Options(**{**{name: value for name, value in saved.items() if name in known}, **given})
    _check(options)
    return options


def _check(options: Options) -> None:
    if options.out is not None and not options.out.strip():
        raise ConfigError("--out is empty (an unset variable?); give a folder, or leave --out out for a new one under runs/")
    least = {"ranks": 1, "steps": 1, "dim": 1, "layers": 1, "heads": 1, "context": 1, "batch": 1, "eval_windows": 1, "log_every": 1,
             "replicas": 1, "accumulate": 1, "prefetch": 0, "warmup": 0, "seed": 0, "eval_every": 0, "keep_last": 0, "max_restarts": 0}
    for name, bound in least.items():
        value = getattr(options, name)
        if value < bound:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {bound}")
    if options.batch % options.ranks:
        below = options.batch // options.ranks * options.ranks
        raise ConfigError(f"--batch {options.batch} cannot be shared equally by {options.ranks} ranks; use a multiple of {options.ranks} "
                          f"such as {below + options.ranks}")
    _check_saving(options)
    if options.batch // options.ranks % options.accumulate:
        raise ConfigError(f"--accumulate {options.accumulate} does not divide the {options.batch // options.ranks} windows that each rank "
                          f"has of a batch; use a divisor, or --batch {options.ranks * options.accumulate}")
    if options.strategy == "hsdp" and options.ranks % options.replicas:
        raise ConfigError(f"--replicas {options.replicas} does not divide the {options.ranks} ranks; use a divisor of {options.ranks}")
    if options.dim % options.heads:
        raise ConfigError(f"--dim {options.dim} cannot be cut into {options.heads} equal heads; make --heads a divisor of {options.dim}")
    if not 0.0 <= options.dropout < 1.0:
        raise ConfigError(f"--dropout is {options.dropout}; it must be at least 0 and below 1")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise ConfigError(f"--lr is {options.lr}; it must be a number above 0, such as {Options.lr}")
    if options.seed >= 2**31:
        raise ConfigError(f"--seed is {options.seed}; it must be below 2147483648")


def _check_saving(options: Options) -> None:
    if options.save_every == "auto":
        if options.mtbf is None:
            raise ConfigError("--save-every auto needs to know how often machines fail; give --mtbf, such as --mtbf 12h")
    elif options.save_every < 0:
        raise ConfigError(f"--save-every is {options.save_every}; it must be at least 0")
    if not (math.isfinite(options.timeout) and options.timeout > 0):
        raise ConfigError(f"--timeout is {options.timeout}; it must be a number of seconds above 0, such as {Options.timeout:g}")


def learning_rate(step: int, options: Options) -> float:
    """The learning rate of step number `step` (the first is 1): a line up to `lr`, then a cosine down to a tenth of it.

    A function of the step alone, so a resumed run needs nothing but its step to be on the same curve.
    """
    if step <= options.warmup:
        return options.lr * step / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def as_dict(options: Options) -> dict:
    """What the run's folder keeps: every option but those that are about one start."""
    kept = asdict(options)
    return {name: value for name, value in kept.items() if name not in OF_ONE_START}
