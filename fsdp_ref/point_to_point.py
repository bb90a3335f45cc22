"""One rank to one other: send and receive, labelled and recorded like the collectives beside them (collectives.py).

A ring is made of these. Both return a `Pending` at once, so that a rank can send and receive at the same time; a rank that waits for its
receive before it sends, opposite one that does the same, waits until the process group's time limit and is then told so.
This module must never take part in the order of collectives: nothing here is counted or compared between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import collectives, ledger, wire, world
from .errors import ConfigError
from .ledger import Lane
from .pending import Label, Pending

__all__ = ["receive", "send"]

MESSAGE = Label(phase="message")


def send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup | None = None, label: Label = MESSAGE) -> Pending:
    """Begin to send `tensor` to rank `to` of the group; do not write to it before `wait` has returned. Moves all of its bytes.

    rank 0 sends [1 2] to 1, rank 1 receives from 0  ->  rank 1 [1 2]

    Raises:
        ConfigError: `to` is no other rank of the group. RankError (from `wait`): that rank died or never received.
    """
    return _issue("send", "to", tensor, to, group, label)


def receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None = None, label: Label = MESSAGE) -> Pending:
    """Begin to receive into `tensor` what rank `source` of the group sends: as many elements, of the same dtype. Raises as `send`."""
    return _issue("receive", "from", tensor, source, group, label)


def _issue(name: str, preposition: str, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, label: Label) -> Pending:
    group = group or dist.group.WORLD
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if not 0 <= peer < size or peer == rank:
        raise ConfigError(f"rank {rank} cannot {name} {preposition} rank {peer}; choose one of the others, 0 to {size - 1}")
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} needs a contiguous tensor, and this one has shape {tuple(tensor.shape)} and stride {tensor.stride()}; "
                          "pass tensor.contiguous()")
    start = (lambda: dist.isend(tensor, group=group, group_dst=peer)) if name == "send" else (
        lambda: dist.irecv(tensor, group=group, group_src=peer))
    nbytes = tensor.numel() * tensor.element_size()
    facts = (Lane.SEND, name, label.unit, label.phase, nbytes, 1, -1, -1)
    what = f"{name} {preposition} rank {peer} of {label.unit or 'the whole world'} ({label.phase})"
    try:
        if tensor.is_cuda:
            return collectives.queue_cuda(start, what, -1, label, (tensor,), None, facts)
        begin = ledger.now()
        return Pending(_arrive(start().wait, begin, nbytes, facts), what, -1, label, (tensor,))
    except RuntimeError as error:
        raise world.explain_failure(error, what, -1) from error


def _arrive(wait: Callable[[], object], begin: float, nbytes: int, facts: tuple) -> Callable[[], None]:
    """Wait for the message, at least as long as an emulated link needs for it, and record it."""
    began, link = time.perf_counter(), wire.link()

    def arrive() -> None:
        wait()
        wire.hold(link, began, nbytes)
        collectives.write_down(facts, begin, ledger.now())
    return arrive
