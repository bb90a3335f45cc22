"""Published memory beside the planner's: ZeRO's tables, Korthikanti's activations, torchtitan's difference between 8 and 128 GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from ..rows import wire_bytes
from . import activations
from .architecture import Architecture
from .checks import Check, last_digit
from .footprint import memory, states
from .presets import preset
from .quantities import GB, GiB
from .strategy import STAGES, Strategy
from .tables import read


def zero_states() -> Iterator[Check]:
    """ZeRO, table 1: model states a device. A cell agrees within one unit of its last printed digit."""
    for row in read("zero_table1")[1]:
        strategy = Strategy(gpus=int(row["ranks"]), stage=row["stage"], dtypes="mixed")
        held = sum(states(float(row["parameters"]), 0, strategy.shards, strategy).values()) / GB
        yield Check("zero_table1", f"{float(row['parameters']) / 1e9:g}B, {row['stage']}, {row['ranks']} ranks: GB", float(row["gb"]), held,
                    last_digit(row["gb"]) * 0.999999)


def zero_largest() -> Iterator[Check]:
    """ZeRO, table 2: the largest model whose states fit 32 GB. Printed from T = 1000 B on with one digit (0.5T, 1T, 2T)."""
    for row in read("zero_table2")[1]:
        for column, stage in (("base", "ddp"), ("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3")):
            strategy = Strategy(gpus=64, stage=stage, dtypes="mixed")
            largest = 32 * GB / sum(states(1.0, 0, 64, strategy).values()) * int(row["mp"]) / 1e9
            published = float(row[column])
            coarse = published >= 500                                       # "0.5T" is 512 B
            allowed = 0.03 * published if coarse else last_digit(row[column]) * int(row["mp"]) if column != "base" else 0.0
            yield Check("zero_table2", f"MP {row['mp']}, {column}: 1e9 parameters", published, largest, allowed)
        for column in ("base", "zero1"):
            share = float(row[f"measured_{column}"]) / float(row[column])
            yield Check("zero_table2", f"MP {row['mp']}, {column} measured / theory (states are a lower bound)", share, 0.75, 0.25)


def zero_volume() -> Iterator[Check]:
    """ZeRO, section 7: elements sent in a step. The collectives are those of the row's transitions, ring factor left out."""
    ranks, elements = 1024, 1024
    for row in read("zero_volume")[1]:
        placements = STAGES[row["stage"]]
        sharded = (placements.parameter.value, placements.optimizer.value) == ("shard", "shard")
        calls = ["all-gather", "all-gather", "reduce-scatter"] if sharded else (
            ["all-reduce"] if placements.optimizer.value == "replicate" else ["reduce-scatter", "all-gather"])
        sent = sum(wire_bytes(name, elements, ranks) for name in calls) / elements * ranks / (ranks - 1)
        yield Check("zero_volume", f"{row['stage']}: elements a parameter", float(row["volume"]), sent)


def korthikanti() -> Iterator[Check]:
    """Korthikanti et al.: GiB cells exactly, percentages of figure 7 within what was read from bars (0.2 points)."""
    for row in read("korthikanti")[1]:
        layers, dim, heads, batch = (int(row[name]) for name in ("layers", "dim", "heads", "micro_batch"))
        shape = Architecture(row["model"], layers, dim, heads, 4 * dim, 51200, 2048, dropout=True)
        strategy = Strategy(8 * int(row["pipeline"]), tensor=8, pipeline=int(row["pipeline"]), chunks=int(row["chunks"]), micro_batches=64,
                            schedule="interleaved" if int(row["chunks"]) > 1 else "1f1b")
        worth = layers / strategy.pipeline * activations.in_flight(strategy, 0)         # blocks' worth on the first stage
        matrices = 12 * layers * dim**2 / (8 * strategy.pipeline)                       # the paper leaves embeddings out
        weights = sum(states(matrices, 0, 1, Strategy(stage="ddp", dtypes="megatron")).values()) / GiB
        yield Check("korthikanti", f"{row['model']}: weights and optimizer GiB", float(row["states_gib"]), weights)
        kinds = {"none": (False, True), "seq": (True, True), "selective": (False, False), "both": (True, False)}
        found = {name: worth * _stored(shape, batch, split, scores) for name, (split, scores) in kinds.items()}
        found["full"] = worth * activations.block_input(shape, batch * 2048) / GiB
        for name in ("none", "both"):
            yield Check("korthikanti", f"{row['model']}: activations GiB, {name}", float(row[f"{name}_gib"]), found[name])
        for name in ("seq", "selective", "both", "full"):
            share = 100 * found[name] / found["none"]
            yield Check("korthikanti", f"{row['model']}: {name}, % of none", float(row[f"{name}_percent"]), share, 0.2)


def _stored(shape: Architecture, batch: int, split: bool, scores: bool) -> float:
    terms = activations.block(shape, batch * 2048, 2048, tensor=8, sequence_parallel=split, scores=scores)
    terms.pop("row sums of flash attention", None)                                      # newer than the paper
    return sum(terms.values()) / GiB


def torchtitan_difference() -> Iterator[Check]:
    """The peak of 8 GPUs less that of 128: activations are the same and cancel, the states' shards do not."""
    rows = {(row["variant"], int(row["gpus"])): float(row["peak_gib"]) for row in read("torchtitan")[1]}
    few, many = (memory("llama3.1-8b", gpus=gpus, micro_batch=2, sequence=8192) for gpus in (8, 128))
    for variant in dict.fromkeys(name for name, _ in rows):
        yield Check("torchtitan", f"{variant}: GiB of peak, 8 less 128 GPUs", rows[variant, 8] - rows[variant, 128],
                    (few.low - many.low) / GiB, 1.5)


def torchtitan_mfu() -> Iterator[Check]:
    """MFU from tokens a second: FLOP a token x tokens / 989 TFLOP/s."""
    flops = preset("llama3.1-8b").flops_per_token(8192)
    for row in read("torchtitan")[1]:
        if row["mfu_percent"]:
            yield Check("torchtitan", f"{row['variant']}, {row['gpus']} GPUs: MFU % of {row['tokens_per_second']} tokens/s a GPU",
                        float(row["mfu_percent"]), 100 * flops * float(row["tokens_per_second"]) / 989e12, 0.05)


def every() -> Iterator[Check]:
    """All of them."""
    for part in (zero_states, zero_largest, zero_volume, korthikanti, torchtitan_difference, torchtitan_mfu):
        yield from part()
