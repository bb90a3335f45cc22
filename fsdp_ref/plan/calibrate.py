"""`fsdp-ref plan calibrate`: this machine's alpha, beta, matmul and memory rates, measured, as a hardware file.

A few ranks time what the models reckon with: a matrix multiplication, a copy in memory, an all-gather of a small and of a large message.
With n ranks an all-gather of S bytes takes (n-1) alpha + (n-1)/n S / beta; the small message gives alpha, the large one beta. Medians,
after a first round that is not kept; a busy machine measures itself busy.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from ..errors import ConfigError
from .hardware import FIGURES, NETWORK, Machine
from .quantities import pick, whole

SMALL, ROUNDS = 1024, 15


def calibrate(ranks: int = 2, *, device: str = "auto", name: str = "mine") -> Machine:
    """Measure this machine with `ranks` ranks (2 or more).

    Raises:
        ConfigError: fewer than 2 ranks, or no GPU for each where GPUs were asked for.
        RankError: a rank was lost.
    """
    whole(ranks=ranks)
    pick("device", device, ("auto", "cpu", "cuda"))
    if ranks < 2:
        raise ConfigError("calibrate needs 2 ranks or more: a link has two ends; use --ranks 2")
    from ..bench import processes  # needs torch, and starts processes
    figures = processes.run(measure, ranks, device)
    alpha = max(0.0, figures["small"] / (ranks - 1))
    wire = figures["large_bytes"] * (ranks - 1) / ranks
    link = wire / max(1e-9, figures["large"] - figures["small"])
    how = f"measured by fsdp-ref plan calibrate with {ranks} {figures['backend']} ranks"
    values = {"flops": figures["flops"], "matmul": 1.0, "memory": figures["memory"], "hbm": figures["hbm"], "link": link, "nic": link,
              "per_node": ranks, "link_share": 1.0, "nic_share": 1.0, "hop_link": alpha, "hop_nic": alpha, "base": 0.0,
              "pcie": figures["pcie"], "host": figures["host"]}
    sources = {**dict.fromkeys(values, how), "matmul": "flops is what a matrix multiplication reached", "per_node": "the ranks measured",
               "nic": "as link: one machine was measured", "hop_nic": "as hop_link: one machine was measured"}
    return Machine(name, **values, sources=sources)


def measure(here) -> dict:
    """What one rank does (torch is loaded here): times and rates, medians over ROUNDS, the slowest rank's."""
    import psutil
    import torch

    from .. import collectives
    from ..collectives import Label
    cuda = here.device.type == "cuda"
    dtype, side, large = (torch.bfloat16, 8192, 2**28) if cuda else (torch.float32, 512, 2**22)
    a = torch.randn(side, side, device=here.device).to(dtype)
    source = torch.empty(large, dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    gathered = {size: torch.empty(size, dtype=torch.uint8, device=here.device) for size in (SMALL, large)}

    def gather(size: int) -> None:
        shard = source[: size // here.size]
        collectives.all_gather(gathered[size][: shard.numel() * here.size], shard, torch.distributed.group.WORLD, Label("calibrate")).wait()

    at_home, elsewhere = torch.empty(large, dtype=torch.uint8), torch.empty(large, dtype=torch.uint8)
    timed = {"matmul": _median(lambda: a @ a, cuda), "copy": _median(lambda: target.copy_(source), cuda),
             "to host": _median(lambda: at_home.copy_(source), cuda), "host": _median(lambda: elsewhere.copy_(at_home), cuda),
             "small": _median(lambda: gather(SMALL), cuda), "large": _median(lambda: gather(large), cuda)}
    everyone = collectives.gather_json(timed)
    slowest = {key: max(row[key] for row in everyone) for key in timed}
    memory = torch.cuda.get_device_properties(here.device).total_memory if cuda else psutil.virtual_memory().total / here.size
    return {"pcie": large / slowest["to host"], "host": 2 * large / slowest["host"], "flops": 2 * side**3 / slowest["matmul"],
            "hbm": 2 * large / slowest["copy"], "memory": memory, "large_bytes": large,
            "backend": here.backend, "small": slowest["small"], "large": slowest["large"]}


def _median(work, cuda: bool) -> float:
    import torch
    found = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def to_toml(machine: Machine) -> str:
    """A hardware file with this machine alone, which `--hardware` reads."""
    lines = [f"[machine.{machine.name}]"]
    lines += [f'{key} = {{ value = {getattr(machine, key)!r}, source = "{machine.sources.get(key, "given")}" }}'
              for key in (*FIGURES, *NETWORK)]
    return "\n".join(lines) + "\n"


def save(machine: Machine, path: str | Path) -> Path:
    """Write the hardware file. Raises ConfigError where it cannot be written."""
    path = Path(path)
    try:
        path.write_text(to_toml(machine), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the hardware file {path} ({error.strerror}); give a place that exists") from error
    return path
