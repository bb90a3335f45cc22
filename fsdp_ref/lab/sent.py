"""How many bytes this rank really sends: every message that leaves it through the wire (wire.py), counted where it leaves.

    with sent_bytes() as sent:                      # in a rank
        all_reduce(x, dist.group.WORLD, Label("x", "demo")).wait()
    print(sum(sent), "bytes in", len(sent), "messages")

The ledger's `wire_bytes` is what a ring sends by its formula; this is the count it can be compared with. Collectives that are called on
torch.distributed itself do not pass through the wire, so they are not counted. This module must never change what is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from .. import wire


@contextlib.contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """Yield a list that grows by one number a message: its bytes. Wait for what was started before the block ends."""
    sent: list[int] = []
    send = wire._send

    def counted(tensor: torch.Tensor, rank: int, *rest: object) -> list:
        sent.append(tensor.nbytes)
        return send(tensor, rank, *rest)

    with mock.patch.object(wire, "_send", counted):
        yield sent
