"""The pool behind a notebook, with real ranks: it works, it reports once, it heals, and nothing waits without a limit."""

import signal
import sys
import threading
import types
from _thread import interrupt_main

import psutil
import pytest

from fsdp_ref.catalogue import Kind
from fsdp_ref.errors import ConfigError, WorldError
from fsdp_ref.lab import RanksFailed, cells, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab():
    pool = start(ranks=2, timeout=4.0, limit=60.0)
    yield pool
    pool.stop()


def add_ranks(value):
    import torch

    from fsdp_ref import world
    here = world.current()
    total = torch.full((2,), float(here.rank + value))
    torch.distributed.all_reduce(total)
    print(f"hello from {here.rank}")
    return {"rank": here.rank, "size": here.size, "total": total.tolist(), "timeout": here.timeout}


def test_importable_function_runs_on_every_rank(lab, capsys):
    results = lab.run(add_ranks, 10)
    assert results == [{"rank": rank, "size": 2, "total": [21.0, 21.0], "timeout": 4.0} for rank in (0, 1)]
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_function_of_a_cell_sees_the_rank_and_brings_its_helpers(lab, monkeypatch):
    cell = types.ModuleType("__main__")
    exec("def double(x):\n    return 2 * x\n\ndef work(x):\n    return double(x) + rank", cell.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", cell)
    assert lab.run(cell.work, 10) == [20, 21]
    assert lab.run(cell.work, 10, ranks=[1]) == [21]


def test_cells_keep_variables_and_print_in_rank_order(lab, capsys):
    lab.execute("import os, time\nkept = 10 * rank\ntime.sleep(0.3 * (1 - rank))\nprint('a', rank)\nprint('b', rank)")
    lab.execute("kept + world_size")
    out = capsys.readouterr().out
    assert out == "[rank 0] a 0\n[rank 0] b 0\n[rank 1] a 1\n[rank 1] b 1\n[rank 0] 2\n[rank 1] 12\n"
    lab.execute("print(os.getpid())")
    assert capsys.readouterr().out == "".join(f"[rank {rank}] {pid}\n" for rank, pid in enumerate(lab.pids))
    lab.execute("print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads(), device, fsdp_ref.__name__, dist.get_backend())", ranks=[0])
    assert capsys.readouterr().out == f"[rank 0] 1 1 cpu fsdp_ref {lab.backend}\n"


def test_b44_lines_of_several_ranks_arrive_whole_and_in_the_same_order_every_time(lab, capsys):
    seen = []
    for _ in range(2):
        lab.execute("for number in range(500):\n    print(f'{number:03d}' + str(rank) * 197)")
        seen.append(capsys.readouterr().out)
    assert seen[0] == "".join(f"[rank {rank}] {number:03d}{str(rank) * 197}\n" for rank in (0, 1) for number in range(500)) == seen[1]


def test_error_before_any_collective_keeps_the_pool(lab, capsys):
    before = lab.pids
    with pytest.raises(RanksFailed, match="rank 1 raised ValueError: only here") as raised:
        lab.execute("flag = 1\nprint('seen', rank)\nif rank == 1: raise ValueError('only here')")
    assert not raised.value.restarted and set(raised.value.ranks) == {1}
    assert capsys.readouterr().out == "[rank 0] seen 0\n[rank 1] seen 1\n"
    lab.execute("assert flag == 1")
    assert lab.pids == before


def test_a_disagreement_keeps_the_pool_while_the_ranks_are_in_step(lab):
    before = lab.pids
    lab.execute("kept = torch.full((2,), rank + 1.0)\nother = kept.clone()")
    with pytest.raises(RanksFailed, match="the ranks disagree about .*the pool goes on, its variables are kept") as raised:
        lab.execute("for t in (kept, other)[:: 1 - 2 * rank]:\n    dist.all_reduce(t)")
    assert raised.value.diagnosis.kind is Kind.ORDER and not raised.value.restarted
    lab.execute("dist.all_reduce(kept)\nassert kept.tolist() == [3.0, 3.0], kept")
    assert lab.pids == before


def test_a_disagreement_of_ranks_out_of_step_restarts_it(lab):
    before = lab.pids
    with pytest.raises(RanksFailed, match="the ranks disagree about .*pool was restarted"):
        lab.execute("from fsdp_ref import collectives\ncollectives._sequence['another group'] += rank\n"
                    "dist.all_reduce(torch.ones(2 + rank))")
    assert not set(before) & set(lab.pids)


def test_rank_that_exits_is_reported_and_the_pool_heals(lab):
    before = lab.pids
    with pytest.raises(RanksFailed, match=r"rank 1 \(pid \d+\) exited with status 7; .*pool was restarted") as raised:
        lab.execute("import os\nif rank == 1: os._exit(7)\ndist.barrier()")
    assert raised.value.restarted and f"pid {before[1]}" in str(raised.value)
    assert not set(before) & set(lab.pids) and not any(map(psutil.pid_exists, before))
    assert [result["total"] for result in lab.run(add_ranks, 0)] == [[1.0, 1.0]] * 2
    with pytest.raises(RanksFailed, match="name 'kept' is not defined"):
        lab.execute("kept")


def test_kill_on_purpose_then_heal(lab, capsys):
    victim = lab.pids[0]
    lab.kill(0)
    lab.heal()
    told = capsys.readouterr().out
    assert f"rank 0 (pid {victim}) died with signal 9 (SIGKILL)" in told and "the pool was restarted" in told
    lab.heal()
    assert capsys.readouterr().out == "all 2 ranks are well\n"


def test_death_between_two_cells_is_told_before_the_next_runs(lab, capsys):
    lab.kill(1, signal.SIGKILL)
    with pytest.raises(RanksFailed, match="rank 1 .* died with signal 9"):
        lab.execute("print('this cell must not run')")
    assert capsys.readouterr().out == ""
    lab.heal()
    assert "well" in capsys.readouterr().out


def test_missing_rank_is_named_and_the_pool_heals(lab):
    """Rank 1 never comes to the collective: the process group's limit ends it, not the cell's."""
    with pytest.raises(RanksFailed, match="rank 1 never arrived at .*within 4 s") as raised:
        lab.execute("from fsdp_ref import collectives\nif rank == 0: collectives.barrier()")
    assert raised.value.restarted


def test_hang_is_bounded_and_says_where(lab):
    with pytest.raises(RanksFailed, match=r"rank 1 did not finish within 2 s \(rank 1 is at line 3 of the cell") as raised:
        lab.execute("import time\nif rank == 1:\n    while True: time.sleep(0.01)", limit=2)
    assert raised.value.restarted and set(raised.value.ranks) == {1}


def test_interrupt_while_ranks_wait_in_a_collective(lab):
    timer = threading.Timer(1.0, interrupt_main)
    timer.start()
    with pytest.raises(RanksFailed, match="interrupted after"):
        lab.execute("if rank == 0: dist.barrier()")
    timer.join()
    lab.execute("dist.barrier()")


def test_start_again(lab, capsys):
    before = lab.pids
    assert start(ranks=2, timeout=4.0) is lab and lab.pids == before
    assert capsys.readouterr().out == f"2 ranks are ready: backend {lab.backend}, device {lab.device}, 4 s for a collective\n"
    lab.execute("dist.barrier()")


def test_values_that_cannot_work(lab):
    for bad in (0, 100, "four"):
        with pytest.raises(ConfigError, match="ranks="):
            start(ranks=bad)
    with pytest.raises(ConfigError, match="timeout"):
        start(ranks=2, timeout=0)
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        lab.kill(2)
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        lab.run(add_ranks, 1, ranks=[0, 5])


def test_stopped_pool_says_so(lab):
    pids, home = lab.pids, lab._engines.processes.home
    lab.stop()
    lab.stop()
    assert lab.pids == [] and not home.exists() and not any(map(psutil.pid_exists, pids))
    with pytest.raises(WorldError, match="start another"):
        lab.execute("1")


def test_top_level_await_is_refused_before_it_runs():
    assert cells.awaits("import asyncio\nawait asyncio.sleep(0)")
    assert not any(map(cells.awaits, ("async def f():\n    await g()\n", "%matplotlib inline", "x = (")))
