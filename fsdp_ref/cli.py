"""The `fsdp-ref` command: a table of subcommands, each in its own module.

A subcommand's module is imported when it runs, so that `fsdp-ref --help` answers at once. This module must never import torch.
An error that a user can act on is one line on standard error and its exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from .errors import ConfigError, FsdpRefError
from .train_options import Parser


def train(argv: list[str]) -> int:
    """Train a small GPT on several ranks."""
    from . import train as command
    return command.main(argv)


def show(argv: list[str]) -> int:
    """Draw a run: who holds what, one step's timeline, memory."""
    p = Parser(prog="fsdp-ref show", description="Draw the recorded step of one run (or of several, side by side): who holds which rows of "
               "which parameter, what every rank did when, which memory was alive, what went over the wire. Each picture is a PNG and "
               "an SVG with a Markdown file of its words and numbers; report.html and report.md hold all of them, and trace.json opens in "
               "ui.perfetto.dev.", epilog="Record a step with: fsdp-ref train --out RUN --ledger")
    p.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run's folder, or a ledger.json")
    p.add_argument("--out", required=True, metavar="DIR", type=Path, help="the folder for pictures and report (made if need be)")
    p.add_argument("--load-on", type=int, metavar="M", help="draw the run's checkpoint as M ranks would load it (default: as it was saved)")
    args = p.parse_args(argv)
    if args.load_on is not None and args.load_on < 1:
        raise ConfigError(f"--load-on {args.load_on} is no number of ranks; give 1 or more")
    from . import report
    print(report.write(args.runs, args.out, load_on=args.load_on))
    return 0


def checkpoint(argv: list[str]) -> int:
    """Look into a checkpoint, check every byte of it, convert it, compare two."""
    from . import checkpoint_command as command
    return command.main(argv)


def bench(argv: list[str]) -> int:
    """Measure side by side with torch's own, or with and without."""
    p = Parser(prog="fsdp-ref bench", description="Side-by-side benchmarks.", add_help=not argv or argv[0] in ("-h", "--help"))
    p.add_argument("what", choices=("engine", "checkpoint", "pictures"), metavar="engine|checkpoint|pictures",
                   help="this engine beside torch.distributed.fsdp.fully_shard; saving and loading beside torch.distributed.checkpoint; "
                        "drawing, exporting and watching")
    what = p.parse_args(argv[:1]).what
    if what == "engine":
        from .bench import engine as command
    elif what == "checkpoint":
        from .bench import checkpoint as command
    else:
        from .bench import pictures as command
    return command.main(argv[1:])


def plan(argv: list[str]) -> int:
    """Say what fits on which GPUs, how long a step takes, which strategy to use."""
    from .plan import command
    return command.main(argv)


def exercises(argv: list[str]) -> int:
    """Build the exercises' notebooks, check an answer, grade a folder of submissions."""
    from .exercises import command
    return command.main(argv)


def doctor(argv: list[str]) -> int:
    """Say what this machine can run, and what is wrong with it."""
    from . import doctor as command
    return command.main(argv)


def progress(argv: list[str]) -> int:
    """Say what you have done of the course, and what comes next."""
    from . import progress_command as command
    return command.main(argv)


def certificate(argv: list[str]) -> int:
    """Make keys, issue certificates from graded results, check one."""
    from .certificate import command
    return command.main(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": train, "show": show, "checkpoint": checkpoint, "bench": bench, "plan": plan,
                                                    "exercises": exercises, "progress": progress, "certificate": certificate,
                                                    "doctor": doctor}


def overview() -> Parser:
    """The parser of `fsdp-ref` itself; it knows the subcommands' names and nothing of their options."""
    p = Parser(prog="fsdp-ref", description="Fully Sharded Data Parallel and the ZeRO stages: readable, measured and visible.",
               epilog="fsdp-ref COMMAND --help tells more. A first run: fsdp-ref train --ledger --out runs/first, "
                      "then fsdp-ref show runs/first --out pictures")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=function.__doc__.rstrip("."), add_help=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run `fsdp-ref`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if sys.platform == "win32":
            raise ConfigError("fsdp_ref does not run on Windows itself; use WSL2 (wsl --install) and start it there")
        args = overview().parse_args(argv[:1])
        return COMMANDS[args.command](argv[1:])
    except FsdpRefError as error:
        print(f"fsdp-ref: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
