"""The search for reference cycles is off inside and afterwards as it was, also after an error."""

import gc

import pytest

from fsdp_ref.garbage import uncollected


@pytest.mark.parametrize("searches", [True, False])
def test_afterwards_all_is_as_before(searches):
    before = gc.isenabled()
    try:
        (gc.enable if searches else gc.disable)()
        with pytest.raises(KeyError), uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == searches
    finally:
        (gc.enable if before else gc.disable)()
