"""Published times beside the planner's: bubbles, FLOP arithmetic, bus bandwidths, the size of collectives, and the speed of whole runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from . import pipeline
from .architecture import Architecture
from .checks import Check
from .hardware import machine
from .network import bus_factor, collective, efficiency
from .presets import preset
from .speed import Timing, step_time
from .strategy import Strategy
from .tables import read

NUMBERS = ("gpus", "tensor", "context", "pipeline", "chunks", "micro_batch", "micro_batches", "sequence")


def bubbles() -> Iterator[Check]:
    """Bubble over ideal time, and the total with a forward of 1 and a backward of 2."""
    for row in read("bubbles")[1]:
        ranks, m, chunks = (int(row[name]) for name in ("stages", "micro_batches", "chunks"))
        found = pipeline.run(pipeline.schedule(row["schedule"], ranks, m, chunks))
        what = f"{row['schedule']}, p {ranks}, m {m}, v {chunks}"
        yield Check("bubbles", f"{what}: total", float(row["total"]), found.total)
        yield Check("bubbles", f"{what}: bubble / ideal", float(Fraction(row["over_ideal"])), found.bubble_over_ideal)


def zero_bubble() -> Iterator[Check]:
    """Measured rates: 1F1B from the ideal to 0.03 above it; ZB-H1 saves, but not all of the two thirds that equal times would give."""
    for row in read("zero_bubble")[1]:
        ranks, m = int(row["stages"]), int(row["micro_batches"])
        ideal = pipeline.run(pipeline.schedule("1f1b", ranks, m)).bubble_over_total
        fine = pipeline.run(pipeline.schedule("zero-bubble-h1", ranks, m)).bubble_over_total
        what = f"{row['model']}, m {m}"
        yield Check("zero_bubble", f"{what}: 1F1B, bubble / total (ideal + 0 to 0.03)", float(row["rate_1f1b"]), ideal + 0.015, 0.015)
        yield Check("zero_bubble", f"{what}: ZB-H1 (between its ideal and 1F1B's)", float(row["rate_zb_h1"]), (fine + ideal) / 2,
                    (ideal - fine) / 2)


def megatron_flops() -> Iterator[Check]:
    """F = 96 B s L h^2 (1 + s/6h + V/16Lh) counts recomputation: its share of the peak is HFU, and MFU is about three quarters of it."""
    for row in read("megatron_weak")[1]:
        layers, dim, batch = int(row["layers"]), int(row["dim"]), int(row["batch"])
        shape = _gpt(row["billions"], layers, dim, int(row["heads"]))
        paper = 96 * batch * 2048 * layers * dim**2 * (1 + 2048 / (6 * dim) + 51200 / (16 * layers * dim))
        ours = batch * 2048 * (shape.flops_per_token(2048) + layers * shape.block_flops(2048))
        yield Check("megatron_weak", f"{row['billions']}B: FLOP of a step with recomputation (1e18)", paper / 1e18, ours / 1e18)
        yield Check("megatron_weak", f"{row['billions']}B: parameters (1e9)", float(row["billions"]), shape.parameters / 1e9,
                    0.06 if float(row["billions"]) < 1000 else 0.6)
        yield Check("megatron_weak", f"{row['billions']}B: HFU % of {row['tflops']} TFLOP/s", float(row["percent"]),
                    100 * float(row["tflops"]) / 312, 1.0)
        model_share = batch * 2048 * shape.flops_per_token(2048) / ours
        yield Check("megatron_weak", f"{row['billions']}B: MFU / HFU (about 3/4)", 0.75, model_share, 0.02)


def megatron_shape() -> Iterator[Check]:
    """The shape of table 2: from the fewest to the most GPUs at a fixed batch, ZeRO-3 keeps about a third of its speed, 3-D nearly all."""
    found = {(row["source"], row["stage"], row["model"], int(row["gpus"])): (float(row["tflops"]), timing)
             for row, timing in runs() if row["source"].endswith("table 2")}
    for stage, allowed in (("zero3", 0.2), ("ddp", 0.05)):
        for model in dict.fromkeys(key[2] for key in found):
            gpus = sorted(key[3] for key in found if key[1:3] == (stage, model))
            ends = [found["2104.04473 table 2", stage, model, number] for number in (gpus[0], gpus[-1])]
            name = "ZeRO-3" if stage == "zero3" else "3-D"
            yield Check("megatron_zero3", f"{model}, {name}: speed at {gpus[-1]} GPUs / at {gpus[0]}", ends[1][0] / ends[0][0],
                        ends[1][1].hfu / ends[0][1].hfu, allowed)


def llama() -> Iterator[Check]:
    """Llama 3's table 4: degrees multiply to the GPUs, tokens follow, and MFU is TFLOP/s over 989."""
    for row in read("llama3")[1]:
        strategy = Strategy(int(row["gpus"]), tensor=int(row["tensor"]), context=int(row["context"]), pipeline=int(row["pipeline"]),
                            micro_batches=int(row["batch_per_data"]), sequence=int(row["sequence"]))
        what = f"{row['gpus']} GPUs, {row['sequence']} tokens"
        yield Check("llama3", f"{what}: data-parallel ranks", float(row["data"]), strategy.data)
        yield Check("llama3", f"{what}: 1e6 tokens a step", float(row["millions_of_tokens"]), strategy.batch * strategy.sequence / 2**20)
        yield Check("llama3", f"{what}: MFU %", float(row["mfu_percent"]), 100 * float(row["tflops"]) * 1e12 / machine("h100").flops, 0.6)


def bus_bandwidth() -> Iterator[Check]:
    """Bus bandwidth of rings inside a node within 8 %; NVLS rows are recognised by exceeding what a ring can."""
    for row in read("nccl")[1]:
        spec, ranks, nbytes = machine(row["machine"]), int(row["gpus"]), 8 * 2**30
        predicted = nbytes / collective(spec, "all-reduce", nbytes, ranks) * bus_factor("all-reduce", ranks) / 1e9
        published = float(row["busbw"])
        if row["algorithm"] == "ring":
            yield Check("nccl", f"{ranks} x {row['machine']}, ring: bus bandwidth GB/s", published, predicted, 0.08 * published)
        if row["algbw"]:
            yield Check("nccl", f"{ranks} x {row['machine']}, {row['algorithm']}: bus / algorithm bandwidth",
                        published / float(row["algbw"]), bus_factor("all-reduce", ranks), 0.01)


def collective_size() -> Iterator[Check]:
    """Below 33 M elements a call, gathering 2^30 elements slows clearly down: under 95 % of the link at that size, over 98 % at ten
    times, under 60 % at a tenth."""
    for row in read("fsdp_paper")[1]:
        spec, ranks, elements = replace(machine("a100"), nic=250e9), 8 * int(row["nodes"]), float(row["elements_per_call"])
        for times, low, high in ((1, 0.85, 0.95), (10, 0.98, 1.0), (0.1, 0.0, 0.6)):
            found = efficiency(spec, "all-gather", 4 * times * elements, ranks)
            yield Check("fsdp_paper", f"efficiency at {times * elements / 1e6:g} M elements a call ({low:g} to {high:g})", (low + high) / 2,
                        found, (high - low) / 2)


def traps() -> Iterator[Check]:
    """What a datasheet prints first, divided by the trap, is what hardware.toml holds."""
    for row in read("hardware_checks")[1]:
        yield Check("hardware_checks", f"{row['machine']}: {row['figure']} without the trap '{row['unit']}'",
                    float(row["printed"]) / float(row["divide_by"]), getattr(machine(row["machine"]), row["figure"]),
                    0.001 * float(row["printed"]))


def _gpt(billions: str, layers: int, dim: int, heads: int) -> Architecture:
    return Architecture(f"gpt {billions}B", layers, dim, heads, 4 * dim, 51200, 2048, dropout=True)


def runs() -> Iterator[tuple[dict[str, str], Timing]]:
    """Every published run with its prediction."""
    for row in read("runs")[1]:
        number = {name: int(row[name]) for name in NUMBERS}
        shape = preset(row["model"]) if not row["layers"] else replace(
            _gpt("", int(row["layers"]), int(row["dim"]), int(row["heads"])), name=row["model"], vocab=int(row["vocab"]))
        spec = replace(machine(row["machine"]), **{name: float(row[name]) for name in ("nic", "hbm") if row[name]})
        strategy = Strategy(**number, stage=row["stage"], recompute=row["recompute"], flash=row["flash"] == "yes", dtypes=row["dtypes"],
                            schedule="interleaved" if number["chunks"] > 1 else "1f1b")
        yield row, step_time(shape, strategy, spec)


def speeds() -> Iterator[Check]:
    """TFLOP/s a GPU of every published run, not judged alone: see `error`."""
    for row, timing in runs():
        share = timing.mfu if row["counts"] == "model" else timing.hfu
        yield Check("runs", f"{row['source']}, {row['model']}, {row['gpus']} x {row['machine']}, {row['stage']}: TFLOP/s a GPU",
                    float(row["tflops"]), share * timing.machine.flops / 1e12, None)


def error(checks: list[Check]) -> dict[str, float]:
    """How far predictions lie from published speeds, over all rows: as factors (1.1 is 10 %).

    "bias" is the geometric mean of predicted / published; "typical" the median distance; "nine in ten" and "worst" likewise.
    """
    logs = [math.log(check.ratio) for check in checks]
    away = sorted(map(abs, logs))
    return {"bias": math.exp(statistics.mean(logs)), "typical": math.exp(statistics.median(away)),
            "root mean square": math.exp(math.sqrt(statistics.mean(value**2 for value in logs))),
            "nine in ten": math.exp(away[math.ceil(0.9 * len(away)) - 1]), "worst": math.exp(away[-1])}


def every() -> Iterator[Check]:
    """All of them."""
    for part in (bubbles, zero_bubble, megatron_flops, megatron_shape, llama, bus_bandwidth, collective_size, traps, speeds):
        yield from part()
