"""Fewer boxes, the same picture: joined gaps, majority hatching, and a long recording that draws few artists."""

import matplotlib.collections
import numpy as np
import pytest

from fsdp_ref.viz import memory_over_step, step_timeline
from fsdp_ref.viz.thinned import covered, joined, mostly

from . import samples


def test_gaps_under_the_limit_are_closed_within_a_row_alone():
    rows = np.array([(2, 3, 0, 1), (0, 1, 0, 1), (5, 6, 0, 1), (1, 2, 1, 2)], float)
    assert joined(rows, 1).tolist() == [[0, 3, 0, 1], [5, 6, 0, 1], [1, 2, 1, 2]]
    assert joined(rows[:0], 1).shape == (0, 4)


def test_coverage_of_cells():
    boxes = np.array([(0.5, 2.0, 0, 1), (2.25, 2.5, 0, 1)])
    assert covered(boxes, np.array([0.0, 1, 2, 3, 4])) == pytest.approx([0.5, 1.0, 0.25, 0])


def test_a_third_of_the_time_does_not_hatch_the_bar_but_two_thirds_do():
    below = np.array([(i, i + 0.9, 0, 1) for i in range(300)])
    assert not len(mostly(below + [0.6, 0, 0, 0], below, 10))
    assert mostly(below + [0.2, 0, 0, 0], below, 10)[:, :2].tolist() == [[pytest.approx(0.2), pytest.approx(300.2)]]


def test_a_long_recording_draws_few_shapes_and_keeps_its_peak():
    ledger = samples.zero3(2, 400)
    count = lambda p: sum(len(c.get_paths()) for a in p.figure.axes for c in a.collections  # noqa: E731
                          if isinstance(c, matplotlib.collections.PolyCollection))
    timeline, memory = step_timeline(ledger), memory_over_step({"x": ledger})
    assert len(ledger.events) > 5000 and count(timeline) < 4000
    axes = memory.figure.axes[0]
    top = max(p.vertices[:, 1].max() for c in axes.collections for p in c.get_paths())
    assert top == pytest.approx(memory.table[-1]["x rank 0, peak MiB"])
    assert sum(len(p.vertices) for c in axes.collections for p in c.get_paths()) < 60_000
