"""The training command: `fsdp-ref train --ranks 4`, or `torchrun --nproc-per-node 4 -m fsdp_ref.train`.

Started by a person it checks the options and brings up the ranks (launch.py); started as a rank (torchrun's variables are set)
it trains (train_loop.py). A failure is one line that says what is wrong and what to do, and an exit code. This module must never
show a traceback for an error that a user can act on, nor lose the traceback of one that only a programmer can.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from . import preemption, train_options, train_run
from .errors import FsdpRefError, Preempted

PARENT = "FSDP_REF_PARENT"          # process id of the command that launched this rank; it prints the errors of its ranks


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code (0 done, 2 wrong argument or text, 3 rank lost, 4 checkpoint, 75 SIGTERM, 130 Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else argv
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _rank_main(argv)
    try:
        given = train_options.parse(argv)
        from . import launch
        return launch.run(given, argv)
    except FsdpRefError as error:
        print(f"fsdp-ref train: {error}", file=sys.stderr)
        return error.exit_code


def options_of_this_start(given: dict) -> train_options.Options:
    """What was given, completed with the options of the run that is resumed, if any. Reads files, changes none."""
    saved = None
    if given.get("resume") not in (None, "none"):
        saved = train_run.begin(given.get("out"), given["resume"]).saved
    if "RANK" in os.environ:
        given = {"ranks": int(os.environ["WORLD_SIZE"]), **given}
    return train_options.complete(given, saved)


def _rank_main(argv: list[str]) -> None:
    """The whole life of a rank; does not return. A failed rank leaves at once: its open collectives would only wait for others."""
    given: dict = {}
    code = 0
    try:
        with preemption.watch() as stop:                     # before torch is imported: a signal is heard from here on
            given = train_options.parse(argv)
            options = options_of_this_start(given)
            _watch_parent()
            from . import train_loop
            train_loop.train(options, stop)
    except FsdpRefError as error:
        _report(str(error), told=isinstance(error, Preempted) and os.environ["RANK"] != "0")
        code = error.exit_code
    except KeyboardInterrupt:
        _report("it was interrupted (SIGINT); go on with --resume auto if there is a checkpoint")
        code = 130
    except SystemExit as end:                                # --help
        code = end.code or 0
    except BaseException as error:
        _report(f"{type(error).__name__}: {_first_line(error)}; {_keep_traceback(given.get('out'))}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch_parent() -> None:
    """End with the process that started this rank: the command, or torchrun. A rank started by hand is on its own."""
    parent = int(os.environ.get(PARENT, 0)) or (os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0)
    if not parent:
        return
    from . import world
    world.die_with_parent(parent)
    if os.getppid() != parent:
        os._exit(1)


def _report(message: str, told: bool = False) -> None:
    """Hand the message to the launcher in torch elastic's error file; print it unless our own launcher will, or another rank (`told`)."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        row = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": row}), encoding="utf-8")
    if PARENT not in os.environ and not told:
        print(f"fsdp-ref train: rank {os.environ['RANK']}: {message}", file=sys.stderr)


def _keep_traceback(out: str | None) -> str:
    """Put the traceback of an unforeseen error where it can be read; returns where that is."""
    text = traceback.format_exc()
    if out is not None and Path(out).is_dir():
        path = Path(out) / f"rank-{os.environ['RANK']}-error.txt"
        with contextlib.suppress(OSError):                       # the disk may be what failed
            path.write_text(text, encoding="utf-8")
            return f"the traceback is in {path}"
    sys.stderr.write(text)
    return "the traceback is above"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


if __name__ == "__main__":
    sys.exit(main())
