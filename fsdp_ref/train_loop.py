"""What one rank does in a training run: build, resume, step, look at the held-out text, save, and leave when it is asked to.

Every rank runs this same code. What only one of them may do (the folder, the log, the printed lines) is done by rank 0, and
whether it worked is agreed on by all: an error on any rank becomes the same error on every rank (`together`), so nobody waits for
a rank that has given up. This module must never draw from a random generator that dropout does not own.

[Note: a step whose evaluation was cut short] A signal may come while the held-out text is looked at. The step is done by then, its
line for the log is not. So the line goes into the checkpoint, and the run that goes on looks at the held-out text first and then writes
the line: the log is the one of a run that nobody stopped.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from . import checkpoint, collectives, data, errors, ledger, preemption, train_run, world
from .errors import ConfigError, FsdpRefError, Preempted
from .train_options import Options, as_dict
from .train_saving import Saver
from .train_step import PLACEMENTS, Learner

T = TypeVar("T")


def together(work: Callable[[], T]) -> T:
    """`work()` of this rank; when it fails on any rank, every rank raises the first such rank's error."""
    result, vote = None, None
    try:
        result = work()
    except FsdpRefError as error:
        vote = [type(error).__name__, str(error)]
    for other in collectives.gather_json(vote):
        if other is not None:
            raise getattr(errors, other[0], FsdpRefError)(other[1])
    return result


def train(options: Options, stop: preemption.Stop | None = None) -> None:
    """Join the world, train as `options` say, leave the world.

    Raises:
        Preempted: a signal asked some rank to stop; the step that was done is saved.
    """
    here = world.start(device=options.device, timeout=options.timeout)
    if here.size != options.ranks:
        raise ConfigError(f"--ranks is {options.ranks} and {here.size} ranks were started; leave --ranks out under torchrun")
    restarts = max(collectives.gather_json(max(here.restarts, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))))
    out = collectives.gather_json(options.out or here.remember("run folder", train_run.new_name()))[0]
    start = together(lambda: train_run.begin_again(out, options.resume) if restarts else train_run.begin(out, options.resume))
    corpus = together(lambda: data.load(options.data))
    trainer = together(lambda: Trainer(options, here, corpus, Path(out), stop))
    if start.source is not None:
        trainer.resume(start.source)
    together(trainer.open_run)
    if restarts:
        trainer.say(f"the ranks were started again (number {restarts}) after one was lost")
    try:
        trainer.run()
    finally:
        trainer.close()
    world.stop()


class Trainer(Learner):
    """A learner with a run's folder. `unfinished`: see [Note: a step whose evaluation was cut short]."""

    def __init__(self, options: Options, here: world.World, corpus: data.Corpus, out: Path, stop: preemption.Stop | None = None) -> None:
        super().__init__(options, here, corpus, stop)
        self.out, self.start = out, 0
        self.saver = Saver(self, out / "checkpoints")
        self.unfinished: dict | None = None
        self.folder: train_run.Run | None = None
        self.bar: tqdm | None = None
        self.unigram = data.unigram_entropy(corpus.held_out)

    # -- the folder -----------------------------------------------------------------------------------------------------------

    def resume(self, source: Path) -> None:
        """Continue from a checkpoint; a damaged one that an older one can stand in for is told as a warning."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = checkpoint.load(source, model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.step = self.start = report.step
        self.unfinished = (report.extra or {}).get("unfinished")
        if report.path.parent.resolve() == self.saver.home.resolve():
            self.saver.newest = report.step
        for warning in caught:
            if issubclass(warning.category, UserWarning):
                self.say(f"warning: {warning.message}")
        again = "" if report.random_state == "exact" else f"; {report.saved_world_size} ranks saved it, so dropout draws anew from here on"
        self.say(f"resumed after step {self.step} from {report.path}{again}")

    def open_run(self) -> None:
        """Rank 0 opens the folder and says what is about to happen."""
        if self.here.rank:
            return
        options, corpus = self.options, self.corpus
        self.folder = train_run.Run(self.out)
        self.folder.write_config(
            as_dict(options), world_size=self.here.size, backend=self.here.backend, parameters=self.model.config.parameters(),
            text={"source": corpus.source, "files": corpus.files, "bytes": len(corpus.data), "xxh3_128": corpus.digest, "cut": corpus.cut,
                  "held_out_unigram_entropy": self.unigram},
            versions={"python": platform.python_version(), "torch": torch.__version__})
        self.folder.open_log(self.step - (self.unfinished is not None))
        for path in train_run.set_aside_after(self.saver.home, self.step):
            self.say(f"a checkpoint that could not be used was renamed to {path}")
        cut = f", cut at {data.LIMIT // 2**20} MiB" if corpus.cut else ""
        self.say(f"{PLACEMENTS[options.strategy].name} on {self.here.size} {'rank' if self.here.size == 1 else 'ranks'} "
                 f"({self.here.device.type}, {self.here.backend}); a GPT of {self.model.config.parameters():,} parameters; "
                 f"{corpus.source}: {len(corpus.data) / 2**20:.1f} MiB in {corpus.files} files{cut}; run folder {self.out}")
        shown = options.progress == "always" or (options.progress == "auto" and sys.stderr.isatty())
        self.bar = tqdm(total=options.steps, initial=self.step, disable=not shown, unit="step", file=sys.stderr, dynamic_ncols=True)

    def close(self) -> None:
        """Close the progress bar and the folder."""
        if self.bar is not None:
            self.bar.close()
        if self.folder is not None:
            self.folder.close()

    def say(self, text: str) -> None:
        """One line on rank 0's standard output, above the progress bar."""
        if self.here.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    # -- the run --------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, or until a signal asks for the end.

        Raises:
            Preempted: it did; all ranks raise it after the same step, which is saved.
        """
        options = self.options
        if self.step >= options.steps and self.unfinished is None:
            self.say(f"nothing to do: the run is at step {self.step} of {options.steps}; give more --steps to go on")
            return
        self.saver.begin()
        began = self.lines_began = time.perf_counter()
        to_record = min(self.step + 3, options.steps) if options.ledger else -1      # by the third step every buffer and moment exists
        self.stopping = self.stop.agreed()                   # asked while the ranks came up
        while not self.stopping and (self.step < options.steps or self.unfinished):
            row = self.unfinished or self.timed_step(self.step + 1 == to_record)
            self.unfinished = None if self.evaluate(row) else row
            if self.unfinished is None:
                self.log(row)
            if not self.stopping and self.saver.due():
                self.saver.save()
                self.stopping = self.stop.agreed()           # asked during the save: no second one
        if self.stopping and (self.step < options.steps or self.unfinished):
            self.leave()
        speed = (self.step - self.start) * options.batch * options.context / (time.perf_counter() - began)
        for line in self.saver.summary():
            self.say(line)
        self.say(f"done: {self.step} steps, held-out loss {row['held_out']:.3f} nats a byte (knowing only how often each byte occurs: "
                 f"{self.unigram:.3f}); {speed:,.0f} tokens/s over all; {self.out / 'log.jsonl'}")

    def leave(self) -> None:
        """Save what is done and end; every rank is here after the same step."""
        self.saver.save(collectives.gather_json(self.unfinished)[0])         # rank 0's line: each has measured other times
        raise Preempted(f"a signal asked the run to stop; step {self.step} is saved, go on with fsdp-ref train --out {self.out} "
                        "--resume auto")

    def timed_step(self, record: bool) -> dict:
        """One step, and how long it and the save before it took."""
        began, stall = time.perf_counter(), self.saver.take_stall()
        row = self.recorded_step() if record else self.train_step()
        row["tokens_per_second"] = round(self.options.batch * self.options.context / (time.perf_counter() - began), 1)
        if stall:
            row["save_seconds"] = round(stall, 4)
        return row

    def evaluate(self, row: dict) -> bool:
        """Add the held-out loss to the row where one is due; False when a signal came before it was known."""
        options = self.options
        if self.step != options.steps and not (options.eval_every and self.step % options.eval_every == 0):
            return True
        held_out = None if self.stopping else self.held_out_loss()
        if held_out is None:
            return False
        row |= {"held_out": held_out, "held_out_hex": held_out.hex()}
        return True

    def log(self, row: dict) -> None:
        """The row into the log, and now and then to the screen."""
        options = self.options
        if self.folder is not None:
            self.folder.log(row)
            self.bar.update()
        if self.step % options.log_every == 0 or self.step == options.steps:
            steps = min(options.log_every, self.step - self.start)
            self.tell(row, steps * options.batch * options.context / (time.perf_counter() - self.lines_began))
            self.lines_began = time.perf_counter()

    def recorded_step(self) -> dict:
        """A step with the ledger on; rank 0 writes RUN/ledger.json with the rows of every rank."""
        facts = {"strategy": PLACEMENTS[self.options.strategy].name, "world_size": self.here.size, "backend": self.here.backend,
                 "device": self.here.device.type, "step": self.step + 1}
        with ledger.record(**facts) as mine:
            collectives.barrier()                            # so that the picture does not begin with ranks waiting for each other
            with ledger.mark("step"):
                row = self.train_step()
        everyone = collectives.gather_ledgers(mine)
        if self.folder is not None:
            everyone.save(self.out / "ledger.json")
        return row

    def tell(self, row: dict, speed: float) -> None:
        """The printed line."""
        held_out = f"  held-out {row['held_out']:.3f}" if "held_out" in row else ""
        width = len(str(self.options.steps))
        self.say(f"step {row['step']:>{width}}/{self.options.steps}  loss {row['loss']:.3f}{held_out}  lr {row['lr']:.2e}"
                 f"  {speed:,.0f} tokens/s")
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
