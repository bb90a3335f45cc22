"""A save in the background holds the state of the moment of the call, runs alone, and its failure is told once and never lost."""

import json
import os
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ref import checkpoint, collectives, ledger, world
from fsdp_ref.checkpoint import background, files, snapshot
from fsdp_ref.errors import CheckpointError, RankError

from . import crashing, support

ROOT = Path(__file__).parents[2]
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.int16, torch.float16, torch.bfloat16,
          torch.int32, torch.float32, torch.complex64, torch.float64, torch.int64)


@pytest.fixture(autouse=True)
def nothing_runs():
    yield
    background.finish()
    background._last = None
    background._unheard.clear()


def failing(layer_at: int = 1, **options) -> support.Tripwire:
    def act():
        raise OSError(28, "No space left on device")
    return support.Tripwire(layer_at, act, **options)


# -- B28: the state of the moment of the call ---------------------------------------------------------------------------------


def disturb(model, optimizer, schedule, loader, extra):
    """What the next training steps do, and worse."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(1)
        for state in optimizer.state.values():
            for value in state.values():
                (value.to_local() if hasattr(value, "to_local") else value).fill_(3)
    for group in optimizer.param_groups:
        group["lr"] = 77.0
    schedule.state["nested"]["done"].append("more")
    schedule.state["step"] += 1
    loader.state["at"] = -1
    extra.append("later")
    support.draws()


def save_and_disturb(rank, size, root, background_save):
    """What was there at the call, and what a fresh model loads; training's own collectives run while the writer stands still."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    model = support.sharded(1)
    optimizer = support.adamw(model)
    support.train(model, optimizer, 2)
    schedule, loader, extra = support.Schedule(step=2, nested={"done": [1]}), support.Schedule(at=7), ["now"]
    expected = support.everything(model, optimizer)
    options = dict(step=2, model=model, optimizer=optimizer, scheduler=schedule, loader=loader, extra=extra)
    gate = support.Gate()
    if background_save:
        before = support.random_states()
        with files.use(gate):
            handle = checkpoint.async_save(root, **options)
            assert support.random_states() == before and not handle.done and handle.stall > 0
            gate.reached.wait(10)
            draws = support.draws()
            losses = support.train(model, optimizer, 2, first=2)
            disturb(model, optimizer, schedule, loader, extra)
            gate.release.set()
            handle.wait()
    else:
        checkpoint.save(root, **options)
        draws = support.draws()
        losses = support.train(model, optimizer, 2, first=2)
    fresh = support.sharded(5)
    again = support.adamw(fresh)
    schedule, loader = support.Schedule(), support.Schedule()
    report = checkpoint.load(root, model=fresh, optimizer=again, scheduler=schedule, loader=loader)
    assert support.draws() == draws
    assert (report.step, report.extra) == (2, ["now"])
    assert (schedule.state, loader.state) == ({"step": 2, "nested": {"done": [1]}}, {"at": 7})
    return support.everything(fresh, again) == expected, losses


@pytest.mark.parametrize("size", (1, 2))
def test_b28_the_state_at_the_call(ranks, tmp_path, size):
    told = ranks(size, save_and_disturb, tmp_path / "async", True)
    plain = ranks(size, save_and_disturb, tmp_path / "sync", False)
    assert told == plain and all(same for same, _ in told)
    one, other = (next(root.glob("step-*")) for root in (tmp_path / "async", tmp_path / "sync"))
    assert support.contents(one) == support.contents(other)                  # the very same bytes as a save that is waited for


def save_and_draw(rank, size, root):
    """The generators' states around each kind of save, on a rank that has drawn its own number of times."""
    model = support.sharded(1)
    optimizer = support.adamw(model)
    support.train(model, optimizer, 1)
    for _ in range(rank + 1):
        support.draws()
    states = [support.random_states()]
    checkpoint.save(root, step=1, model=model, optimizer=optimizer)
    states.append(support.random_states())
    handle = checkpoint.async_save(root, step=2, model=model, optimizer=optimizer)
    states.append(support.random_states())
    handle.wait()
    states.append(support.random_states())
    return all(state == states[0] for state in states), hash(states[0])


def test_b15_saving_draws_no_random_number(ranks, tmp_path):
    told = ranks(2, save_and_draw, tmp_path)
    assert all(same for same, _ in told) and len({state for _, state in told}) == 2


class Zoo(nn.Module):
    """A buffer of every type, special values, odd layouts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for dtype in DTYPES:
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            self.register_buffer(str(dtype).replace(".", "_"), raw.view(dtype).view(2, 3))           # NaN payloads among them
        self.register_buffer("transposed", torch.randn(4, 3, generator=generator).t())
        self.register_buffer("scalar", torch.tensor(-0.0))
        self.register_buffer("empty", torch.empty(0, 3))


def test_b28_every_type_and_layout(tmp_path):
    model, gate = Zoo(1), support.Gate()
    expected = support.model_bits(model)
    with files.use(gate):
        handle = checkpoint.async_save(tmp_path, step=1, model=model)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        gate.release.set()
        handle.wait()
    assert support.model_bits(model) != expected
    checkpoint.load(tmp_path, model=model)
    assert support.model_bits(model) == expected


# -- one at a time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ("save", "async_save", "load"))
def test_b28_a_second_one_waits(tmp_path, second):
    model, _ = crashing.small(1)
    gate = support.Gate()
    with files.use(gate):
        first = checkpoint.async_save(tmp_path, step=1, model=model)
        gate.reached.wait(10)
        began = threading.Event()

        def then():
            began.set()
            if second == "load":
                checkpoint.load(tmp_path, model=crashing.small(9)[0])
            else:
                result = getattr(checkpoint, second)(tmp_path, step=2, model=model)
                second == "save" or result.wait()
        thread = threading.Thread(target=then)
        thread.start()
        began.wait(10)
        thread.join(0.1)
        assert thread.is_alive() and len(support.names(tmp_path)) == 1       # the first one's temporary directory
        gate.release.set()
        thread.join(10)
    assert first.done and first.wait() == tmp_path / "step-00000001"
    assert [path.name for path in checkpoint.committed(tmp_path)][1:] == ([] if second == "load" else ["step-00000002"])


def test_the_copies_are_used_again(tmp_path):
    """One copy of the state, in the same memory from save to save; other shapes get other memory; it goes with the model."""
    model, optimizer = crashing.small(1)
    checkpoint.async_save(tmp_path, step=1, model=model, optimizer=optimizer).wait()
    staging = sys.modules["fsdp_ref.checkpoint.save"]._stagings[model]
    state = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    state += sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    places = {key: buffer.data_ptr() for key, buffer in staging._buffers.items()}
    assert staging.bytes == state
    checkpoint.async_save(tmp_path, step=2, model=model, optimizer=optimizer).wait()
    assert {key: buffer.data_ptr() for key, buffer in staging._buffers.items()} == places
    model.weight = nn.Parameter(torch.zeros(2, 3))
    checkpoint.async_save(tmp_path, step=3, model=model).wait()
    assert set(staging._buffers) == {("model", "weight"), ("model", "bias")} and staging.bytes == 4 * (6 + 5)
    assert staging._buffers["model", "bias"].data_ptr() == places["model", "bias"]


def test_the_copy_of_a_cuda_tensor_is_pinned_and_waited_for(monkeypatch):
    """Without a GPU: a stand-in records what would be asked of CUDA, and in which order."""
    log = []

    class Fake:
        is_cuda, device, shape, dtype = True, torch.device("cuda", 0), torch.Size([2]), torch.float32

    class Buffer:
        shape, dtype = Fake.shape, Fake.dtype

        def is_pinned(self):
            return True

        def copy_(self, part, non_blocking):
            log.append(("copy", non_blocking))

    class Stream:
        def synchronize(self):
            log.append("synchronize")

    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: log.append(("empty", pin_memory)) or Buffer())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: log.append(str(device)) or Stream())
    local = snapshot.LocalTensor("w", "F32", (2,), Fake(), None, 1, 0)
    staging = snapshot.Staging()
    for _ in range(2):
        held = staging.hold({"model": {"w": local}})
        assert isinstance(held["model"]["w"].part, Buffer)
    once = [("copy", True), "cuda:0", "synchronize"]
    assert log == [("empty", True), *once, *once]


# -- failures -----------------------------------------------------------------------------------------------------------------


def fail_and_ask(rank, size, root):
    """The failure of one rank's thread, as `wait`, the next save, and the one after it tell it."""
    model, optimizer = crashing.small(1, shard=True)
    layer = failing() if rank == 1 else files.Files()
    said = []

    def attempt(call):
        try:
            said.append(str(call()))
        except (CheckpointError, RankError) as error:
            said.append(f"{type(error).__name__}: {error}")

    with files.use(layer):
        handle = checkpoint.async_save(root, step=1, model=model, optimizer=optimizer)
        background.finish()
    attempt(handle.wait)
    attempt(lambda: checkpoint.save(root, step=2, model=model).name)           # everybody was told: it goes on
    with files.use(failing() if rank == 1 else layer):
        handle = checkpoint.async_save(root, step=3, model=model, optimizer=optimizer)
        background.finish()
    if rank == 0:                                                             # only one rank asks: the next save tells all
        attempt(handle.wait)
    attempt(lambda: checkpoint.async_save(root, step=4, model=model).wait().name)
    attempt(lambda: checkpoint.save(root, step=4, model=model).name)
    return said


def test_f2_a_failure_is_told_by_wait_or_by_the_next_save(ranks, tmp_path):
    first, second = ranks(2, fail_and_ask, tmp_path)
    for said, step in ((first, 1), (second, 1), (first[2:], 3), (first[3:], 3), (second[2:], 3)):
        assert said[0].startswith(f"CheckpointError: rank 1 could not save step {step}: No space left on device; free some space"), said
    assert first[1] == second[1] == "step-00000002"
    assert first[4:] == second[3:] == ["step-00000004"]
    assert sorted(support.names(tmp_path)) == ["latest", "step-00000002", "step-00000004"]


def test_what_cannot_be_saved_is_told_by_wait(tmp_path):
    model, _ = crashing.small(1)
    for options, says in (({"step": -1}, "step is -1"), ({"step": 1, "extra": print}, "extra"),
                          ({"step": 1, "keep_last": 0}, "keep_last is 0")):
        handle = checkpoint.async_save(tmp_path, model=model, **options)
        with pytest.raises(CheckpointError, match=says):
            handle.wait()
        with pytest.raises(CheckpointError, match=says):                      # who asks again is told again
            handle.wait()
    assert support.names(tmp_path) == []
    assert checkpoint.save(tmp_path, step=1, model=model).name == "step-00000001"


def test_wait_has_a_limit(tmp_path):
    gate = support.Gate()
    with files.use(gate):
        handle = checkpoint.async_save(tmp_path, step=1, model=crashing.small(1)[0])
        with pytest.raises(CheckpointError, match="step 1 is not saved after 0.05 s"):
            handle.wait(0.05)
        gate.release.set()
        assert handle.wait(10).name == "step-00000001"


def leave_early(rank, size, root):
    model, _ = crashing.small(1, shard=True)
    checkpoint.async_save(root, step=1, model=model)
    world.stop()


def test_leaving_the_world_finishes_the_save(ranks, tmp_path):
    ranks(2, leave_early, tmp_path)
    checkpoint.verify(tmp_path / "step-00000001")


def destroy(rank, size, root):
    """The process group goes under the thread's feet; nobody may then commit alone."""
    model, _ = crashing.small(1, shard=True)
    gate = support.Gate()
    with files.use(gate):
        handle = checkpoint.async_save(root, step=1, model=model)
        gate.reached.wait(10)
        torch.distributed.destroy_process_group()
        gate.release.set()
        try:
            return str(handle.wait())
        except RankError as error:
            return str(error)


def test_a_destroyed_process_group_drops_the_save(ranks, tmp_path):
    assert all(said.startswith("the process group was destroyed while a checkpoint was written") for said in ranks(2, destroy, tmp_path))
    assert checkpoint.committed(tmp_path) == []


def one_rank_alone(rank, size, root, call):
    model, _ = crashing.small(1, shard=True)
    checkpoint.save(root, step=1, model=model)
    if call == "async_save again":
        checkpoint.async_save(root, step=2, model=model).wait()
    if rank:
        threading.Event().wait(4.5)
        return ""
    grace, world.GRACE = world.GRACE, 0.2                     # the absent ones say nothing however long we listen
    try:
        getattr(checkpoint, call.split()[0])(root, step=3, model=model).wait()
    except RankError as error:
        return str(error)
    finally:
        world.GRACE = grace


@pytest.mark.parametrize("call", ("save", "async_save", "async_save again"))
def test_b42_one_rank_alone(ranks, tmp_path, call):
    """`if rank == 0: save()`: an error within the limit that names the absent ranks; the checkpoint before is intact."""
    said = ranks(3, one_rank_alone, tmp_path, call, timeout=3.0)
    assert said[0].startswith("ranks 1 and 2 never arrived at"), said
    names = [path.name for path in checkpoint.committed(tmp_path)]
    assert names == ["step-00000001", *(["step-00000002"] if "again" in call else [])]
    checkpoint.verify(tmp_path / names[-1])


# -- the end of the process ---------------------------------------------------------------------------------------------------

ENDS = {"ends": 0, "exception": 1, "child": 0, "killed": -15, "fails": 4, "fails exception": 4, "fails child": 4}     # exit codes
FAILED = "fsdp-ref: could not save step 1: No space left on device; free some space, older checkpoints are untouched\n"
SCRIPT = """
import json, multiprocessing, os, signal, sys, time
from pathlib import Path
from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import files
from tests.checkpoint import crashing, support, test_async

class Slow(files.Files):
    def fsync(self, descriptor):
        time.sleep(0.2)
        super().fsync(descriptor)

def work():
    model, optimizer = crashing.small(1)
    checkpoint.async_save(home / kind, step=1, model=model, optimizer=optimizer)

home, codes = Path(sys.argv[1]), {}
for kind in test_async.ENDS:                                  # a fork each, for importing torch takes seconds
    child = os.fork()
    if child == 0:
        os.dup2(os.open(home / f"{kind}.err", os.O_WRONLY | os.O_CREAT), 2)
        break
    codes[kind] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    (home / "codes.json").write_text(json.dumps(codes))
    sys.exit()
files._layer = test_async.failing() if "fails" in kind else Slow()
if "child" in kind:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
work()
if "exception" in kind:
    raise ValueError("training went wrong")
if "killed" in kind:
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_the_end_of_the_process(tmp_path):
    """Finished or dropped whole; a failure that nobody asked for is printed once, and the exit code is not 0."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=env, cwd=ROOT, check=True, timeout=120)
    assert json.loads((tmp_path / "codes.json").read_text()) == ENDS
    for kind in ENDS:
        said = (tmp_path / f"{kind}.err").read_text()
        assert (FAILED in said) == ("fails" in kind) and said.count("fsdp-ref:") == ("fails" in kind), (kind, said)
        assert ("ValueError: training went wrong" in said) == ("exception" in kind)
        if "fails" in kind or kind == "killed":
            assert checkpoint.latest(tmp_path / kind) is None
        else:
            assert crashing.loaded(tmp_path / kind) == (1, crashing.expected(1)), kind


# -- what training sees -------------------------------------------------------------------------------------------------------


def record_both(rank, size, root):
    """Training's messages while the threads of some ranks wait in a vote and that of the last rank has not come there yet."""
    model, optimizer = crashing.small(1, shard=True)
    gate = support.Gate() if rank == size - 1 else support.Tripwire()
    with ledger.record() as book, files.use(gate):
        handle = checkpoint.async_save(root, step=1, model=model, optimizer=optimizer)
        if rank == size - 1:
            gate.reached.wait(10)
        else:
            while [name for name, _ in gate.log].count("fsync") < 3:
                threading.Event().wait(0.01)
            threading.Event().wait(0.1)                      # from its last file into the vote
        seen = [collectives.gather_json([rank, round]) for round in range(20)]
        assert not handle.done
        if rank == size - 1:
            gate.release.set()
        handle.wait()
    assert seen == [[[other, round] for other in range(size)] for round in range(20)]
    stage = [event for event in book.events if event.name == "stage"]
    assert [(event.lane, event.unit, event.phase) for event in stage] == [(ledger.Lane.CHECKPOINT, "step 1", "checkpoint")]
    assert stage[0].end - stage[0].start == pytest.approx(handle.stall) and stage[0].bytes > 0
    return sorted(event.unit for event in book.events if event.name == "write")


def test_messages_do_not_mix_and_the_stall_is_recorded(ranks, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = ranks(3, record_both, tmp_path)
    assert told == [[f"{kind}-0000{rank}-of-00003.safetensors" for kind in ("model", "optimizer")] for rank in range(3)]
