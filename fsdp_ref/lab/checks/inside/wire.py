"""What a submission sees of the other ranks: `send`, `recv` and the functions of `torch.distributed`, carried by the judge.

`install` puts them into the real module, so that `import torch.distributed as dist` means the same in a submission as in a script. Names
and arguments are torch's own; groups other than the whole world are not there. This module must never compute a result of a
collective: the judge does, from what all ranks sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .channel import Channel
from .meter import quiet, received

_cat, _empty = torch.cat, torch.empty


class Work:
    """What `async_op=True` returns: `wait` blocks until the result stands in the output tensor."""

    def __init__(self, channel: Channel, number: int, finish: Callable[[object], None]) -> None:
        self._channel, self._number, self._finish, self._done = channel, number, finish, False

    def wait(self, timeout: object = None) -> bool:
        """Wait for this collective; a second call does nothing."""
        if not self._done:
            with quiet():
                self._finish(self._channel.wait(self._number))
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` was called: nobody knows earlier."""
        return self._done


def _fill(outputs: list[torch.Tensor]) -> Callable[[object], None]:
    """Copy the answer, one flat tensor, into these tensors in order."""
    def finish(value: object) -> None:
        flat, place = value.reshape(-1), 0
        with torch.no_grad():
            for output in outputs:
                output.copy_(flat[place:place + output.numel()].reshape(output.shape))
                place += output.numel()
    return finish


def _name(op: object) -> str:
    return str(op).rsplit(".", 1)[-1].lower()


class Wire:
    """The ranks' line as functions. `rank` and `world` are this rank's number and the number of ranks."""

    def __init__(self, channel: Channel, rank: int, world: int) -> None:
        self._channel, self.rank, self.world = channel, rank, world

    # -- send and receive ---------------------------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, to: int) -> None:
        """Hand a tensor over for rank `to`; it does not wait, and later changes of the tensor do not travel."""
        _must_be_tensor(tensor)
        with quiet():
            self._channel.post("send", peer=_rank(to, self), tensor=tensor)

    def take(self, source: int) -> torch.Tensor:
        """Wait for the next tensor that rank `source` sends to this one, and return it."""
        with quiet():
            came = self._channel.wait(self._channel.post("recv", peer=_rank(source, self)))
        return received(came)

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        """torch.distributed.isend"""
        _must_be_tensor(tensor)
        with quiet():
            return Work(self._channel, self._channel.post("send", peer=_rank(dst, self), tensor=tensor), lambda _: None)

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        """torch.distributed.irecv"""
        return Work(self._channel, self._channel.post("recv", peer=_rank(src, self)), _fill([tensor]))

    def send(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        """torch.distributed.send: waits until the other has taken it."""
        self.isend(tensor, dst).wait()

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None):
        """torch.distributed.recv"""
        self.irecv(tensor, src).wait()
        return src

    def batch_isend_irecv(self, ops):
        """torch.distributed.batch_isend_irecv"""
        return [(self.isend if op.op.__name__ == "isend" else self.irecv)(op.tensor, op.peer) for op in ops]

    # -- collectives --------------------------------------------------------------------------------------------------------------

    def _all(self, op: str, source: torch.Tensor | None, outputs: list[torch.Tensor], async_op: bool, **fields: object):
        if source is not None:
            _must_be_tensor(source)
        with quiet():
            work = Work(self._channel, self._channel.post("all", op=op, tensor=source, **fields), _fill(outputs))
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(self, tensor, op="sum", group=None, async_op=False):
        """torch.distributed.all_reduce"""
        return self._all("all_reduce", tensor, [tensor], async_op, reduce=_name(op))

    def reduce(self, tensor, dst=None, op="sum", group=None, async_op=False, group_dst=None):
        """torch.distributed.reduce"""
        return self._all("reduce", tensor, [tensor] if dst == self.rank else [], async_op, reduce=_name(op), root=_rank(dst, self))

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        """torch.distributed.broadcast"""
        return self._all("broadcast", tensor, [tensor], async_op, root=_rank(src, self))

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        """torch.distributed.all_gather_into_tensor"""
        _must_fit("all_gather_into_tensor", output_tensor.numel(), input_tensor.numel() * self.world)
        return self._all("all_gather", input_tensor, [output_tensor], async_op)

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        """torch.distributed.all_gather"""
        return self._all("all_gather", tensor, tensor_list, async_op)

    def reduce_scatter_tensor(self, output, input, op="sum", group=None, async_op=False):  # noqa: A002 (torch's name)
        """torch.distributed.reduce_scatter_tensor"""
        _must_fit("reduce_scatter_tensor", input.numel(), output.numel() * self.world)
        return self._all("reduce_scatter", input, [output], async_op, reduce=_name(op))

    def reduce_scatter(self, output, input_list, op="sum", group=None, async_op=False):
        """torch.distributed.reduce_scatter"""
        return self._all("reduce_scatter", _cat([each.reshape(-1) for each in input_list]), [output], async_op, reduce=_name(op))

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):  # noqa: A002
        """torch.distributed.all_to_all_single, in equal parts"""
        if output_split_sizes or input_split_sizes:
            raise NotImplementedError("all_to_all_single with split sizes is not there in an exercise; send equal parts")
        return self._all("all_to_all", input, [output], async_op)

    def gather(self, tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
        """torch.distributed.gather"""
        return self._all("gather", tensor, gather_list or [], async_op, root=_rank(dst, self))

    def scatter(self, tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
        """torch.distributed.scatter"""
        source = _cat([each.reshape(-1) for each in scatter_list]) if self.rank == src else _empty(0, dtype=tensor.dtype)
        return self._all("scatter", source, [tensor], async_op, root=_rank(src, self))

    def barrier(self, group=None, async_op=False, device_ids=None):
        """torch.distributed.barrier"""
        return self._all("barrier", None, [], async_op)

    # -- who am I -----------------------------------------------------------------------------------------------------------------

    def get_rank(self, group=None):
        """torch.distributed.get_rank"""
        return self.rank

    def get_world_size(self, group=None):
        """torch.distributed.get_world_size"""
        return self.world

    def is_initialized(self):
        """torch.distributed.is_initialized"""
        return True


NAMES = ("isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "all_gather",
         "reduce_scatter_tensor", "reduce_scatter", "all_to_all_single", "gather", "scatter", "barrier", "get_rank", "get_world_size",
         "is_initialized")
MISSING = ("init_process_group", "destroy_process_group", "new_group", "all_to_all", "all_gather_object", "broadcast_object_list",
           "gather_object", "scatter_object_list", "monitored_barrier", "send_object_list", "recv_object_list", "all_gather_coalesced",
           "all_reduce_coalesced")


def install(wire: Wire) -> None:
    """Put the wire behind the names of torch.distributed, for the rest of this process's life."""
    import torch.distributed as dist
    for name in NAMES:
        setattr(dist, name, getattr(wire, name))
    for name in MISSING:
        setattr(dist, name, _missing(name))


def _missing(name: str) -> Callable:
    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"dist.{name} is not there in an exercise; use one of: {', '.join(NAMES)}")
    return refuse


def _rank(number: object, wire: Wire) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < wire.world:
        raise ValueError(f"there is no rank {number!r}; ranks count from 0 to {wire.world - 1}")
    return number


def _must_be_tensor(value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"only a tensor can be sent, and this is a {type(value).__name__}")


def _must_fit(name: str, have: int, need: int) -> None:
    if have != need:
        raise ValueError(f"{name}: the larger tensor has {have} elements and must have {need}: ranks times those of the smaller one")
