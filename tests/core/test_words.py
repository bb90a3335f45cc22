"""Names of ranks, exit statuses and first lines, as every message has them."""

import pytest

from fsdp_ref.words import first_line, how_it_died, name_ranks, ranks_in


@pytest.mark.parametrize(("ranks", "text"), [([2], "rank 2"), ({3, 0}, "ranks 0 and 3"), ([1, 0, 10], "ranks 0, 1 and 10")])
def test_ranks_there_and_back(ranks, text):
    assert name_ranks(ranks) == text and ranks_in(text + " never arrived at 3 and 4") == sorted(ranks)
    assert ranks_in("no rank 3") == []


def test_how_a_process_ended():
    assert how_it_died(7) == "exited with status 7" and how_it_died(-6) == "died with signal 6 (SIGABRT)"
    assert how_it_died(-63).startswith("died with signal 63")


def test_the_first_line_of_an_error():
    gloo = RuntimeError("[/x/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically ...\nmore")
    assert first_line(gloo) == "Connection closed by peer [127.0.0.1]:1" and first_line(ValueError()) == "ValueError"
    memory = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ...")
    assert first_line(memory).startswith("DefaultCPUAllocator: can't allocate memory")
