"""The training command, started from a notebook as a process of its own, so that a lesson can kill it and start it again.

It must never outlive the kernel: ranks watch the command (see world.die_with_parent), and the command watches the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ..errors import ConfigError, RankError

LIMIT = 120.0           # seconds any wait for the command may take


class Training:
    """`fsdp-ref train` with these options, running. `out` is its folder.

    >>> run = Training("runs/a", ranks=4, steps=30)         # doctest: +SKIP
    >>> run.until_step(12).kill()                           # doctest: +SKIP
    """

    def __init__(self, out: str | os.PathLike, **options: object) -> None:
        self.out = Path(out)
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "fsdp_ref.lab.command", str(os.getpid()), "train", "--out", str(self.out), *words]
        self._errors: str | None = None
        self._family: list[psutil.Process] = []
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def losses(self) -> dict[int, str]:
        """Step -> training loss of every step logged so far, as hexadecimal floats: equal text means equal bits."""
        log = self.out / "log.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
        return {row["step"]: row["loss_hex"] for row in rows if "loss_hex" in row}

    def until_step(self, step: int) -> Training:
        """Wait until `step` has been logged. Raises RankError when the command ends before, or does not come there in time."""
        deadline = time.monotonic() + LIMIT
        while max(losses := self.losses(), default=0) < step:
            if losses and not self._family:
                self._family = self._find_family()             # now, so that the kill itself takes no time
            if self._process.poll() is not None:
                raise RankError(f"the training command ended before step {step}: {self._last_words()}")
            if time.monotonic() > deadline:
                self.kill()
                raise RankError(f"the training command did not come to step {step} in {LIMIT:g} s and was killed; give it fewer steps")
            time.sleep(0.005)
        return self

    def kill(self) -> dict[str, int]:
        """SIGKILL the command and its ranks, so that nothing of it can tidy up. Returns how many processes there were, and are now."""
        family = self._family or self._find_family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=10)
        self._process.wait(timeout=10)
        return {"before": len(family), "after": len(alive)}

    def preempt(self, number: int = signal.SIGTERM) -> int:
        """Ask the run to stop, as a scheduler does that will take the machine away; wait until it has. Returns its exit code: 75 when the
        step under way was finished and saved. Raises RankError when it does not end in time."""
        self._process.send_signal(number)
        try:
            self._errors = self._process.communicate(timeout=LIMIT)[1]
        except subprocess.TimeoutExpired:
            self.kill()
            raise RankError(f"the training command did not end {LIMIT:g} s after it was asked to and was killed; give it "
                            "smaller steps") from None
        return self._process.returncode

    def _find_family(self) -> list[psutil.Process]:
        """The ranks, and the command that started them."""
        command = psutil.Process(self._process.pid)
        return [*command.children(recursive=True), command]

    def finish(self) -> Training:
        """Wait for the end. Raises RankError with the command's own words when it failed."""
        try:
            _, self._errors = self._process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RankError(f"the training command did not end in {LIMIT:g} s and was killed; give it fewer steps") from None
        if self._process.returncode:
            raise RankError(f"the training command failed: {self._last_words()}")
        return self

    def _last_words(self) -> str:
        if self._errors is None:
            self._errors = self._process.communicate(timeout=10)[1]
        return (self._errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]


def main() -> int:
    """Run the command named by the arguments, as a child that ends with the kernel whose process id comes first."""
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        raise ConfigError("this starts a command for a notebook; use fsdp-ref from a terminal")
    from .. import cli, world
    world.die_with_parent(int(sys.argv[1]))
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
