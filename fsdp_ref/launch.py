"""Bringing up the ranks of one machine and telling their failure in one line; torch elastic does the work.

The ranks meet on the loopback interface at a port the system picks. They are restarted only if the user said so (--max-restarts), and
never outlive this process: each watches it (world.die_with_parent). A SIGTERM or SIGUSR1 that comes here is sent on to the ranks, which
save and end within torch elastic's 30 seconds. This module must never train, and never print more than one line about a failure.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from . import diagnosis, preemption, train, train_run
from .diagnosis import Evidence, Raised
from .errors import ConfigError, Preempted, RankError
from .train_options import Options

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT")


def run(given: dict, argv: list[str]) -> int:
    """Check everything that can be checked without ranks, start them, wait; returns the exit code.

    Raises:
        FsdpRefError: an option, the text or the run's folder cannot be used; no rank was started.
    """
    options = train.options_of_this_start(given)
    out = options.out or train_run.new_name()
    train_run.begin(out, options.resume)
    from . import data
    data.load(options.data).check(options.context)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")             # before torch is imported, here and in the ranks
    from . import world
    world.choose_backend(options.ranks, options.device)
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {out} ({error.strerror}); choose another --out") from error
    return _start(options, [*argv, *([] if options.out else ["--out", out])], Path(out))


def _start(options: Options, argv: list[str], out: Path) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")                      # more threads than cores cost more than they give
    handled = [name for name in SIGNALS if name in ("SIGTERM", "SIGUSR1") or signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-train-", ignore_cleanup_errors=True) as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=options.ranks, run_id=uuid.uuid4().hex,
            max_restarts=options.max_restarts, monitor_interval=0.1,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost", logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=",".join(handled))
        os.environ[train.PARENT] = str(os.getpid())
        logging.disable(logging.CRITICAL)                              # what elastic would log, the one line below says
        try:
            elastic_launch(config, sys.executable)("-m", "fsdp_ref.train", *argv)
            return 0
        except ChildFailedError as error:
            line, code = describe(error, out)
        except SignalException as error:
            code = Preempted.exit_code if error.sigval in preemption.SIGNALS else 128 + int(error.sigval)
            line = f"stopped by {error.sigval.name}; {_how_to_go_on(out)}"
        except KeyboardInterrupt:
            line, code = "stopped by SIGINT before the ranks were up; start it again", 130
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[train.PARENT]                               # a torchrun started from this process later is its own parent
    print(f"fsdp-ref train: {line}", file=sys.stderr)
    return code


def describe(error: ChildFailedError, out: Path) -> tuple[str, int]:
    """One sentence about the rank that failed first, and the exit code of the command.

    A rank that only reports that another was lost (exit code 3) is not the first cause when there is another: unless that other hung,
    and was killed by torch elastic only because the first had given it up.
    """
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode == RankError.exit_code and diagnosis.names_the_cause(_message(failure)):
            found = diagnosis.diagnose(Evidence({rank: Raised("RankError", _message(failure))}))
            return f"{found}; {_how_to_go_on(out)}", failure.exitcode
    for _, failure in sorted(error.failures.items()):
        if failure.exitcode == Preempted.exit_code:
            return _message(failure), failure.exitcode
    rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode == RankError.exit_code, item[1].timestamp, item[0]))
    if -failure.exitcode in preemption.SIGNALS:
        return f"rank {rank} was stopped by {failure.signal_name()} before it could listen; {_how_to_go_on(out)}", Preempted.exit_code
    if failure.exitcode < 0:
        return f"{diagnosis.diagnose(Evidence(ended={rank: failure.exitcode})).sentence}; {_how_to_go_on(out)}", RankError.exit_code
    return f"rank {rank} stopped with exit code {failure.exitcode}: {_message(failure)}", failure.exitcode


def _message(failure: ProcessFailure) -> str:
    message = failure.message
    if isinstance(message, dict) and isinstance(message.get("message"), str):
        return message["message"]
    return "it left no message; look at its output above"


def _how_to_go_on(out: Path) -> str:
    if found := train_run.checkpoints(out):
        return f"go on from the last checkpoint ({found[-1].name}) with fsdp-ref train --out {out} --resume auto"
    return f"there is no checkpoint yet, start over with fsdp-ref train --out {out} --resume none"
