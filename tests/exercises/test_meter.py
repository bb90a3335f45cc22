"""The meter of a rank counts storages: what is made, what is freed, what a message brings, and nothing twice."""

import torch

from fsdp_ref.lab.checks.inside import meter as meters
from fsdp_ref.lab.checks.inside.meter import Meter


def test_it_counts_what_is_alive_once():
    with Meter() as meter:
        a = torch.zeros(100)
        b = a.reshape(10, 10)[2:]
        assert meter.live() == 400 and meter.made == [400]
        c = a + 1
        del a
        assert meter.live() == 800                           # b keeps the first storage
        del b
        assert meter.live() == 400 and meter.peak == 800 and meter.largest == 400
        meter.reset()
        assert meter.peak == 400 and meter.largest == 0 and meter.made == []
        c.untyped_storage().resize_(0)
        assert meter.live() == 0
        c.untyped_storage().resize_(4000)
        assert meter.live() == 4000


def test_it_counts_what_backward_makes():
    weight = torch.randn(64, 64, requires_grad=True)
    with Meter() as meter:
        meter.know(weight)
        assert meter.live() == 64 * 64 * 4
        (torch.randn(8, 64) @ weight).sum().backward()
        assert meter.live() >= 2 * 64 * 64 * 4               # the gradient too


def test_messages_do_not_count_until_they_are_handed_over():
    with Meter() as meter:
        with meters.quiet():
            carried = torch.zeros(50)
            half = carried[:25] + 1
        assert meter.live() == 0 and meter.largest == 0
        meters.received(half)
        assert meter.live() == 100 and meter.largest == 100
    assert carried.numel() == 50


def test_torch_has_not_wrapped_it():
    """See [Note: why not defined in the class]."""
    assert Meter.__torch_dispatch__.__code__ is Meter._watch.__code__
