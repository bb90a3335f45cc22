"""A rank's only line to the judge: what it sends, posts and waits for.

Every message a rank sends to another goes through the judge, who therefore counts bytes and order where a submission cannot reach, and
knows at once who waits for whom. The functions of `socket` and `json` are taken before any submission runs; one that replaces them later
changes its own view only. This module must never wait for the judge without having said so.
"""

from __future__ import annotations

import socket
import threading

from . import frames

_pack, _sizes, _unpack, HEAD = frames.pack, frames.sizes, frames.unpack, frames.HEAD


class Channel:
    """One end of the line. `post` starts something and returns its number; `wait` blocks until the judge has answered it."""

    def __init__(self, line: socket.socket) -> None:
        send, receive = line.sendall, line.recv_into
        self._lock = threading.Lock()
        self._count = 0
        self._answers: dict[int, object] = {}

        def put(message: object) -> None:
            data = _pack(message)
            with self._lock:
                send(data)

        def read(count: int) -> bytes:
            data = bytearray(count)
            view, filled = memoryview(data), 0
            while filled < count:
                got = receive(view[filled:])
                if not got:
                    raise EOFError("the judge is gone")
                filled += got
            return bytes(data)

        def take() -> object:
            text, raw = _sizes(read(HEAD.size))
            return _unpack(read(text), read(raw))

        self.put, self._take = put, take

    def task(self) -> dict:
        """The first message: what to run."""
        return self._take()

    def post(self, kind: str, **fields: object) -> int:
        """Send a request; the judge answers it when it can."""
        self._count += 1
        self.put({"do": kind, "number": self._count, **fields})
        return self._count

    def wait(self, number: int) -> object:
        """The answer to request `number`."""
        if number not in self._answers:
            self.put({"do": "wait", "number": number})
        while number not in self._answers:
            answer = self._take()
            self._answers[answer["number"]] = answer.get("value")
        return self._answers.pop(number)
