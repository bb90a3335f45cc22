"""The shard map: to scale, padding hatched, empty shards named, nothing left out in silence."""

import math

import matplotlib.collections
import pytest
from matplotlib.colors import to_hex

from fsdp_ref.errors import ConfigError, FsdpRefError
from fsdp_ref.ledger import Ledger
from fsdp_ref.viz import shard_map, style
from fsdp_ref.viz.shards import SHARDED, WHOLE, item_bytes

from . import samples


def _map(shape, world=4, *, whole=False, **kwargs):
    return shard_map(Ledger(shards=samples.shards_of("u", "u.weight", shape, world, whole=whole)), **kwargs)


def _widths(picture, fill, hatch):
    found = [c for c in picture.figure.axes[0].collections if isinstance(c, matplotlib.collections.PolyCollection)]
    paths = [p for c in found if to_hex(c.get_facecolor()[0]) == fill.lower() and (c.get_hatch() or "") == hatch for p in c.get_paths()]
    return [p.vertices[:, 0].max() - p.vertices[:, 0].min() for p in paths]


def _texts(picture):
    return [text.get_text() for text in picture.figure.axes[0].texts]


def test_blocks_and_padding_are_drawn_to_scale():
    picture = _map((5, 3))                                            # chunks of 2: rows 2, 2, 1 + 1 padding, 0 + 2 padding
    held, padding = _widths(picture, SHARDED.fill, ""), _widths(picture, style.PAPER, style.LOST)
    frame = _widths(picture, "#eeeeee", "")
    row = frame[0] / 5
    assert held == pytest.approx([2 * row, 2 * row, row])
    assert padding == pytest.approx([row, 2 * row])
    assert frame == pytest.approx([5 * row] * 4)


def test_the_table_names_rows_padding_and_empty_shards():
    row = _map((5, 3)).table[0]
    assert [row[f"rank {r}"] for r in range(4)] == ["rows 0–1", "rows 2–3", "row 4 + 1 padding", "empty + 2 padding"]
    assert "rank 3: empty" in _texts(_map((5, 3)))
    assert "rank 3: empty in u.weight" in _map((5, 3)).alt


def test_each_blocks_place_is_its_rows_place():
    axes = _map((2,)).figure.axes[0]                                  # rows 0, 1, then two empty shards with one padding row each
    boxes = [p.vertices[:, 0].min() for c in axes.collections if c.get_zorder() == 2 for p in c.get_paths()]
    step = (axes.get_xlim()[1] - 0.02 + 0.08) / 4                     # a column and its gap
    unit = (step - 0.08) / 4
    assert sorted(boxes) == pytest.approx([i * step + i * unit for i in range(4)])


def test_replicated_parameters_are_whole_on_every_rank():
    picture = _map((6, 2), world=3, whole=True)
    frame = _widths(picture, "#eeeeee", "")
    assert _widths(picture, WHOLE.fill, WHOLE.hatch) == pytest.approx(frame)
    assert len(frame) == 3 and not _widths(picture, SHARDED.fill, "")
    assert "0 are cut into shards by rows, 1 are whole on every rank" in picture.alt


def test_sums_of_bytes():
    ledger = samples.zero3(world=3)
    elements = sum(math.prod(shape) for _, _, shape in {(s.unit, s.name, s.shape) for s in ledger.shards})
    held, padding = shard_map(ledger).table[-2:]
    assert sum(held[f"rank {r}"] for r in range(3)) * 1024 == pytest.approx(4 * elements)
    allocated = sum(s.padded_rows * math.prod(s.shape[1:]) * 4 for s in ledger.shards)
    assert sum(held[f"rank {r}"] + padding[f"rank {r}"] for r in range(3)) * 1024 == pytest.approx(allocated)


def test_parameters_beyond_the_limit_are_counted():
    picture = shard_map(samples.zero3(), limit=4)
    assert "+ 15 more" in _texts(picture)
    assert "15 parameters are folded into one line" in picture.alt
    folded = next(row for row in picture.table if row["unit"] == "+ 15 more parameters, KiB")
    shown = [s for s in samples.model_shards(4) if s.unit == "(root)" and s.rank == 0]
    total = next(row for row in picture.table if row["unit"] == "all held, KiB")
    assert folded["rank 0"] + sum(s.rows * math.prod(s.shape[1:]) * 4 for s in shown) / 1024 == pytest.approx(total["rank 0"])
    assert not any("more" in text for text in _texts(shard_map(samples.zero3(), limit=19)))


def test_ranks_beyond_eight_are_counted():
    picture = _map((64, 2), world=12)
    assert any("4 more ranks not drawn" in text.get_text() for text in picture.figure.texts)
    assert "4 more ranks not drawn" in picture.alt and "rank 8" not in picture.table[0]
    assert list(_map((64, 2), world=12, ranks=[10]).table[0])[-1] == "rank 10"


def test_scalars_and_parameters_cut_twice():
    assert _map((), world=1).table[0]["shape"] == "scalar"
    twice = Ledger(shards=samples.shards_of("u", "w", (8,), 2, whole=True) + samples.shards_of("u", "w", (8,), 2))
    assert shard_map(twice).table[0]["rank 1"] == "rows 4–7"


def test_sizes_of_dtypes():
    assert [item_bytes(name) for name in ("torch.float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "uint4")] == [4, 2, 1, 8, 1, 1]
    with pytest.raises(FsdpRefError, match="'mystery' of unknown size"):
        item_bytes("mystery")


def test_errors_say_what_to_do():
    with pytest.raises(FsdpRefError, match="no shards; record a model"):
        shard_map(Ledger())
    with pytest.raises(ConfigError, match="limit 0"):
        _map((4,), limit=0)
    with pytest.raises(ConfigError, match=r"\[9\] .*choose from \[0, 1, 2, 3\]"):
        _map((4,), ranks=[0, 9])
    with pytest.raises(ConfigError, match="choose from"):
        _map((4,), ranks=[])
