"""Prediction beside measurement: a GPT on real gloo ranks with an emulated link, and the simulator's word on the same step.

    print(compare(2, link_ratios=(0.5, 1.0, 2.0)))

Compute is measured on one link and predicted for others: costs come from recorded steps of all ranks on the first link; every other link
is a prediction in the strict sense. A link's ratio says how long a block's gather takes beside its forward. Steps on different links
alternate, so that a busy machine is busy for all of them, and medians are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..errors import ConfigError
from ..ledger import Lane, Ledger
from .costs import Costs, from_ledger
from .quantities import both, seconds, table, whole

LATENCY = 100e-6


@dataclass(frozen=True)
class Row:
    """One link: (predicted, measured) of the step's seconds, the seconds that waited for collectives, and peak bytes of the books."""

    bandwidth: float
    step: tuple[float, float]
    exposed: tuple[float, float]
    peak: tuple[int, int]
    fitted: bool


@dataclass(frozen=True)
class Comparison:
    """All links, of `ranks` ranks."""

    ranks: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [("link", "step predicted", "measured", "", "exposed predicted", "measured", "", "peak predicted", "measured", "")]
        for row in self.rows:
            cells = [f"{row.bandwidth / 1e6:.3g} MB/s" + (" (costs from here)" if row.fitted else "")]
            for pair, show in ((row.step, seconds), (row.exposed, seconds), (row.peak, both)):
                cells += [show(pair[0]), show(pair[1]), f"{100 * (pair[0] / pair[1] - 1):+.1f} %" if pair[1] else "-"]
            lines.append(tuple(cells))
        return f"GPT on {self.ranks} gloo ranks, emulated link, medians\n" + table(lines, right=range(1, 10))


def compare(ranks: int = 2, *, dim: int = 128, layers: int = 6, batch: int = 8, link_ratios: Sequence[float] = (1.0, 0.5, 2.0),
            rounds: int = 5, nap: float = 0.0) -> Comparison:
    """Measure and predict.

    Args:
        dim, layers, batch: of the GPT; its context is 64.
        link_ratios: of the emulated links; the first gives the costs.
        rounds: recorded steps of each link.
        nap: seconds that every block's forward and backward (twice as long) sleep besides computing: a GPU's work does not need the CPU,
            and on a busy machine naps are steadier than work.

    Raises:
        ConfigError: numbers that cannot be.
        RankError: a rank was lost.
    """
    whole(ranks=ranks, dim=dim, layers=layers, batch=batch, rounds=rounds)
    if ranks < 2 or not link_ratios:
        raise ConfigError("compare needs 2 ranks or more and a link; there is nothing to predict otherwise")
    from ..bench import processes
    told = processes.run(measure, ranks, "cpu", dim, layers, batch, list(link_ratios), rounds, nap)
    measured = [[Ledger.from_json(book) for book in books] for books in told["ledgers"]]
    taken = [[Costs(**costs) for costs in ranks] for ranks in told["costs"]]                # a step after the other, all ranks of each
    rows = []
    for index, (bandwidth, books) in enumerate(zip(told["bandwidths"], measured, strict=True)):
        rows.append(_row(bandwidth, books, taken, ranks, (dim, layers, batch), fitted=index == 0))
    return Comparison(ranks, tuple(rows))


def _row(bandwidth: float, books: list[Ledger], taken: list[list[Costs]], ranks: int, shape: tuple[int, int, int], fitted: bool) -> Row:
    """[Note: a step at a time] A rank is late now in this piece, now in that one. The median of every piece would know of no lateness, and
    its maximum of too much, so each recorded step of all ranks is replayed by itself, and medians are taken of what comes out."""
    import torch

    from .simulator import simulate
    dim, layers, batch = shape
    found = [simulate(lambda: gpt(dim, layers), ranks, costs=costs[0], peers=costs[1:], link=(bandwidth, LATENCY),
                      inputs=torch.zeros(batch, 64, dtype=torch.int64)) for costs in taken]
    predicted = lambda measure: statistics.median(map(measure, found))  # noqa: E731
    middle = lambda measure: statistics.median(map(measure, books))  # noqa: E731
    step = predicted(lambda each: each.seconds), middle(lambda book: book.end - book.start)
    peak = found[0].peak, int(middle(lambda book: book.peak_bytes(0)))
    return Row(bandwidth, step, (predicted(lambda each: each.exposed), middle(waited)), peak, fitted)


def waited(book: Ledger) -> float:
    """Seconds that rank 0 waited for collectives in training (not at the barrier before the step)."""
    return sum(event.end - event.start for event in book.events if event.rank == 0 and event.lane == Lane.WAIT and event.unit)


def gpt(dim: int, layers: int, nap: float = 0.0):
    """The model of the comparison."""
    from ..models import GPT, GPTConfig
    model = GPT(GPTConfig(dim=dim, layers=layers, heads=4))
    for block in model.blocks if nap else ():
        block.register_forward_hook(lambda module, args, output: _nap(output, nap))
    return model


def measure(here, dim: int, layers: int, batch: int, ratios: list[float], rounds: int, nap: float) -> dict:
    """What every rank does: train on each link in turn; rank 0's recorded steps are returned."""
    import torch

    from .. import collectives, ledger
    from ..engine import data_parallel
    from ..placements import ZERO3
    torch.manual_seed(0)
    model = data_parallel(gpt(dim, layers, nap), ZERO3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 256, (batch, 64))

    def step() -> Ledger:
        with ledger.record() as book:
            collectives.barrier()                           # here, since a recording begins with a garbage collection
            with ledger.mark("step"):
                model(tokens).float().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return book.window("step")

    for _ in range(2):
        step()
    block = [event for event in step().events if event.unit.startswith("blocks.") and event.phase == "forward"]
    forward = statistics.median(event.end - event.start for event in block if event.lane == Lane.COMPUTE)
    sent = next(event.wire_bytes for event in block if event.lane == Lane.ALL_GATHER)
    forward = min(collectives.gather_json(forward))
    links = [sent / max(1e-6, ratio * forward) for ratio in ratios]
    books: list[list[dict]] = [[] for _ in links]
    taken = []
    for turn in range(1 + rounds):
        for index, bandwidth in enumerate(links):
            with collectives.emulate(bandwidth, LATENCY):
                book = step()
            if turn:
                books[index].append(book.to_json())
                taken += [collectives.gather_json(asdict(from_ledger(book, ledger.rank())))] if index == 0 else []
    return {"bandwidths": links, "ledgers": books, "costs": taken}


def _nap(output, naptime: float):
    """Sleep now, and twice as long in backward."""
    import time

    from .simulator import after
    time.sleep(naptime)
    return after(output, lambda: time.sleep(2 * naptime))
