"""What one rank does in a training run: build, resume, step, look at the held-out text, save.

Every rank runs this same code. What only one of them may do (the folder, the log, the printed lines) is done by rank 0, and
whether it worked is agreed on by all: an error on any rank becomes the same error on every rank (`together`), so nobody waits for
a rank that has given up. This module must never draw from a random generator that dropout does not own.
"""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from . import checkpoint, collectives, data, errors, ledger, train_run, world
from .collectives import Label
from .engine import data_parallel
from .errors import ConfigError, FsdpRefError
from .models import GPT, GPTConfig
from .placements import DDP, HSDP, ZERO1, ZERO2, ZERO3
from .train_options import Options, as_dict, learning_rate

PLACEMENTS = {"zero3": ZERO3, "zero2": ZERO2, "zero1": ZERO1, "ddp": DDP, "hsdp": HSDP}
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


def train(options: Options) -> None:
    """Join the world, train as `options` say, leave the world."""
    here = world.start(device=options.device)
    if here.size != options.ranks:
        raise ConfigError(f"--ranks is {options.ranks} and {here.size} ranks were started; leave --ranks out under torchrun")
    out = collectives.gather_json(options.out or train_run.new_name())[0]
    start = together(lambda: train_run.begin(out, options.resume))
    corpus = together(lambda: data.load(options.data))
    trainer = together(lambda: Trainer(options, here, corpus, Path(out)))
    if start.source is not None:
        trainer.resume(start.source)
    together(trainer.open_run)
    try:
        trainer.run()
    finally:
        trainer.close()
    world.stop()


def weight_decay_groups(model: torch.nn.Module, decay: float = 0.1) -> list[dict]:
    """AdamW's two groups, by name: matrices decay, vectors (norms and biases) do not (Loshchilov and Hutter 2019; minGPT)."""
    named = list(model.named_parameters())
    return [{"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": decay},
            {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0}]


class Trainer:
    """One rank's model, optimizer and place in the text. `step` counts finished optimizer steps."""

    def __init__(self, options: Options, here: world.World, corpus: data.Corpus, out: Path) -> None:
        self.options, self.here, self.corpus, self.out = options, here, corpus, out
        self.loader = data.Loader(corpus, context=options.context, batch=options.batch, seed=options.seed, rank=here.rank, ranks=here.size)
        torch.manual_seed(options.seed)                      # the same weights on every rank
        config = GPTConfig(context=options.context, dim=options.dim, layers=options.layers, heads=options.heads, dropout=options.dropout)
        model = GPT(config).to(here.device)
        placements, mesh = PLACEMENTS[options.strategy], None
        if placements.replicas:
            shape = options.replicas, here.size // options.replicas
            mesh = init_device_mesh(here.device.type, shape, mesh_dim_names=("replicate", "shard"))
        self.model = data_parallel(model, placements, mesh, units=model.units())
        self.optimizer = torch.optim.AdamW(weight_decay_groups(self.model), lr=options.lr, betas=(0.9, 0.95), fused=True)
        torch.manual_seed((options.seed << 20) + here.rank + 1)        # from here on randomness is dropout, another stream on each rank
        self.step = self.start = 0
        self.checkpoints = out / "checkpoints"
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
        self.folder.open_log(self.step)
        for path in train_run.set_aside_after(self.checkpoints, self.step):
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
        """Train to the last step."""
        options = self.options
        if self.step >= options.steps:
            self.say(f"nothing to do: the run is at step {self.step} of {options.steps}; give more --steps to go on")
            return
        began = lines_began = time.perf_counter()
        to_record = min(self.step + 3, options.steps) if options.ledger else -1      # by the third step every buffer and moment exists
        while self.step < options.steps:
            step_began = time.perf_counter()
            row = self.recorded_step() if self.step + 1 == to_record else self.train_step()
            row["tokens_per_second"] = round(options.batch * options.context / (time.perf_counter() - step_began), 1)
            last = self.step == options.steps
            if last or (options.eval_every and self.step % options.eval_every == 0):
                held_out = self.held_out_loss()
                row |= {"held_out": held_out, "held_out_hex": held_out.hex()}
            if self.folder is not None:
                self.folder.log(row)
                self.bar.update()
            if self.step % options.log_every == 0 or last:
                steps = min(options.log_every, self.step - self.start)
                self.tell(row, steps * options.batch * options.context / (time.perf_counter() - lines_began))
                lines_began = time.perf_counter()
            if options.save_every and (last or self.step % options.save_every == 0):
                self.save()
        speed = (self.step - self.start) * options.batch * options.context / (time.perf_counter() - began)
        self.say(f"done: {self.step} steps, held-out loss {row['held_out']:.3f} nats a byte (knowing only how often each byte occurs: "
                 f"{self.unigram:.3f}); {speed:,.0f} tokens/s over all; {self.out / 'log.jsonl'}")

    def train_step(self) -> dict:
        """One optimizer step; its line for the log, the same on every rank: the loss is the mean over the global batch."""
        inputs, targets = (torch.from_numpy(part).to(self.here.device) for part in self.loader.next())     # each (B / ranks, T)
        lr = learning_rate(self.step + 1, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.model.loss(inputs, targets)
        loss.backward()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        collectives.all_reduce(mean, dist.group.WORLD, Label("loss", "report")).wait()
        self.step += 1
        value = float(mean)
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"the loss became {value} at step {self.step}; go on from the last checkpoint with a smaller --lr than "
                              f"{self.options.lr}")
        return {"step": self.step, "epoch": self.loader.epoch, "loss": value, "loss_hex": value.hex(), "lr": lr, "gradient_norm": norm}

    def clip(self) -> float:
        """Scale the gradients so that their norm over all ranks is at most 1; returns the norm before (Pascanu et al. 2013)."""
        try:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        except RuntimeError as error:                        # torch's own all-reduce of the norm: its failure named like that of ours
            raise world.explain_failure(error, "all-reduce of the gradient norm", self.step) from error

    def recorded_step(self) -> dict:
        """A step with the ledger on; rank 0 writes RUN/ledger.json with the rows of every rank."""
        facts = {"strategy": PLACEMENTS[self.options.strategy].name, "world_size": self.here.size, "backend": self.here.backend,
                 "device": self.here.device.type, "step": self.step + 1}
        with ledger.record(activations=True, **facts) as mine:
            collectives.barrier()                            # so that the picture does not begin with ranks waiting for each other
            with ledger.mark("step"):
                row = self.train_step()
        everyone = collectives.gather_ledgers(mine)
        if self.folder is not None:
            everyone.save(self.out / "ledger.json")
        return row

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss in nats a byte over the same held-out windows every time, shared by the ranks; equal on every rank.

        Every rank runs the model equally often (a sharded forward is a collective): where the windows do not divide, the last
        ranks run the first window again and do not count it.
        """
        options, device = self.options, self.here.device
        windows = data.held_out_windows(self.corpus, options.context, options.eval_windows)
        share = -(-len(windows) // self.here.size)
        mine = windows[self.here.rank * share:(self.here.rank + 1) * share]
        counts = torch.tensor([1.0] * len(mine) + [0.0] * (share - len(mine)), device=device)
        mine += windows[:1] * (share - len(mine))
        total = torch.zeros(2, dtype=torch.float64, device=device)
        at_once = max(1, options.batch // self.here.size)
        self.model.eval()
        for first in range(0, share, at_once):
            rows = data.cut_windows(self.corpus.held_out, mine[first:first + at_once], options.context)
            inputs, targets = (torch.from_numpy(part).to(device) for part in rows)
            logits = self.model(inputs)                      # (b, T, V)
            losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)       # (b,)
            weight = counts[first:first + at_once]
            total += torch.stack([(losses * weight).sum(), weight.sum()])
        self.model.train()
        collectives.all_reduce(total, dist.group.WORLD, Label("held-out loss", "report"), op=dist.ReduceOp.SUM).wait()
        return float(total[0] / total[1])

    def save(self) -> None:
        """A checkpoint of this step, with what it takes to make the next steps the same: weights, moments, position, random state."""
        about = {name: value for name, value in as_dict(self.options).items() if name not in ("out", "data")}     # no paths of this machine
        checkpoint.save(self.checkpoints, step=self.step, model=self.model, optimizer=self.optimizer, loader=self.loader,
                        extra={"options": about}, keep_last=self.options.keep_last or None)

    def tell(self, row: dict, speed: float) -> None:
        """The printed line."""
        held_out = f"  held-out {row['held_out']:.3f}" if "held_out" in row else ""
        width = len(str(self.options.steps))
        self.say(f"step {row['step']:>{width}}/{self.options.steps}  loss {row['loss']:.3f}{held_out}  lr {row['lr']:.2e}"
                 f"  {speed:,.0f} tokens/s")
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
