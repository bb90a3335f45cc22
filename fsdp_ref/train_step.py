"""One rank's part of the learning itself: the model, a step, the held-out loss. No folder, no checkpoint, no printed line.

Every rank runs this same code and makes the same calls in the same order. What each step reports is exchanged in one small all-reduce:
the loss, and whether a signal has asked this rank to stop (preemption.py), so that all ranks stop after the same step at no extra cost.
This module must never draw from a random generator that dropout does not own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from . import collectives, data, preemption, world
from .collectives import Label
from .engine import data_parallel
from .errors import ConfigError
from .models import GPT, GPTConfig
from .placements import DDP, HSDP, ZERO1, ZERO2, ZERO3
from .train_options import Options, learning_rate

PLACEMENTS = {"zero3": ZERO3, "zero2": ZERO2, "zero1": ZERO1, "ddp": DDP, "hsdp": HSDP}


def weight_decay_groups(model: torch.nn.Module, decay: float = 0.1) -> list[dict]:
    """AdamW's two groups, by name: matrices decay, vectors (norms and biases) do not (Loshchilov and Hutter 2019; minGPT)."""
    named = list(model.named_parameters())
    return [{"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": decay},
            {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0}]


class Learner:
    """One rank's model, optimizer and place in the text.

    Attributes:
        step: finished optimizer steps.
        stopping: a rank was asked to stop: known to all ranks, after the same step.
    """

    def __init__(self, options: Options, here: world.World, corpus: data.Corpus, stop: preemption.Stop | None = None) -> None:
        self.options, self.here, self.corpus, self.stop = options, here, corpus, stop or preemption.Stop()
        self.loader = data.Loader(corpus, context=options.context, batch=options.batch, seed=options.seed, rank=here.rank, ranks=here.size,
                                  prefetch=options.prefetch)
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
        self.step = 0
        self.stopping = False

    def train_step(self) -> dict:
        """One optimizer step; its line for the log, the same on every rank: the loss is the mean over the global batch."""
        inputs, targets = (torch.from_numpy(part).to(self.here.device) for part in self.loader.next())     # each (B / ranks, T)
        lr = learning_rate(self.step + 1, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.backward(inputs, targets)
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        value, asked = self.report(loss)
        self.stopping = asked > 0
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"the loss became {value} at step {self.step}; go on from the last checkpoint with a smaller --lr than "
                              f"{self.options.lr}")
        return {"step": self.step, "epoch": self.loader.epoch, "loss": value, "loss_hex": value.hex(), "lr": lr, "gradient_norm": norm}

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Gradients of this rank's mean loss, which is returned, in `accumulate` micro-batches; the last one alone communicates.

        All micro-batches have the same number of bytes, so the mean over them of their means is the mean over all bytes.
        """
        count = self.options.accumulate
        losses = []
        for number, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True), start=1):
            self.model.set_requires_gradient_sync(number == count)
            self.model.set_is_last_backward(number == count)
            loss = self.model.loss(x, y) / count             # x, y: (B / ranks / count, T)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def report(self, loss: torch.Tensor) -> tuple[float, float]:
        """Mean over the ranks of the loss and of whether they were asked to stop, in one message."""
        both = torch.stack([loss, loss.new_tensor(float(self.stop.requested))])
        collectives.all_reduce(both, dist.group.WORLD, Label("loss", "report")).wait()
        mean, asked = both.tolist()
        return mean, asked

    def clip(self) -> float:
        """Scale the gradients so that their norm over all ranks is at most 1; returns the norm before (Pascanu et al. 2013)."""
        try:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        except RuntimeError as error:                        # torch's own all-reduce of the norm: its failure named like that of ours
            raise world.explain_failure(error, "all-reduce of the gradient norm", self.step) from error

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """Mean loss in nats a byte over the same held-out windows every time, shared by the ranks; equal on every rank.

        Every rank runs the model equally often (a sharded forward is a collective): where the windows do not divide, the last
        ranks run the first window again and do not count it. None, on every rank, when a signal asked for the end meanwhile.
        """
        options, device = self.options, self.here.device
        windows = data.held_out_windows(self.corpus, options.context, options.eval_windows)
        share = -(-len(windows) // self.here.size)
        mine = windows[self.here.rank * share:(self.here.rank + 1) * share]
        counts = torch.tensor([1.0] * len(mine) + [0.0] * (share - len(mine)), device=device)
        mine += windows[:1] * (share - len(mine))
        total = torch.zeros(2, dtype=torch.float64, device=device)
        at_once = max(1, options.batch // self.here.size // options.accumulate)
        self.model.eval()
        for first in range(0, share, at_once):
            self.stopping = self.stopping or self.stop.agreed()
            if self.stopping:
                break
            rows = data.cut_windows(self.corpus.held_out, mine[first:first + at_once], options.context)
            inputs, targets = (torch.from_numpy(part).to(device) for part in rows)
            logits = self.model(inputs)                      # (b, T, V)
            losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)       # (b,)
            weight = counts[first:first + at_once]
            total += torch.stack([(losses * weight).sum(), weight.sum()])
        self.model.train()
        if self.stopping:
            return None
        collectives.all_reduce(total, dist.group.WORLD, Label("held-out loss", "report"), op=dist.ReduceOp.SUM).wait()
        return float(total[0] / total[1])
