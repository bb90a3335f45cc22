"""torch's distributed checkpoint both ways: its stock loader reads what we write, and what it writes becomes one of ours."""

import io
import json
import os
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import dcp_export, streaming
from fsdp_ref.errors import CheckpointError

from . import support
from .support import Schedule, Toy, adamw, everything, sharded, train
from .test_round_trip import Zoo

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def states(model, optimizer):
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def build(api, seed, lr=0.01):
    """The toy, sharded by torch's fully_shard or by ours."""
    model = Toy(seed)
    if api == "torch":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model)
    else:
        model = sharded(seed)
    return model, adamw(model, lr)


def save_ours(rank, size, root):
    model, optimizer = build("ours", 0)
    train(model, optimizer, 2)
    path = checkpoint.save(root, step=2, model=model, optimizer=optimizer, scheduler=Schedule(last=2, bounds=(1, float("inf"))),
                           loader=Schedule(epoch=1), extra={"note": [1, (2, None)]})
    return path, everything(model, optimizer)


def load_stock(rank, size, dcp_dir, api):
    """Into a model that has stepped already, as torch's loader wants it: state that is not there is not loaded (F7)."""
    model, optimizer = build(api, 1, lr=7.0)
    train(model, optimizer, 1)
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=str(dcp_dir))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=False))     # `unused` has no state
    return everything(model, optimizer)


def continue_ours(rank, size, step_dir):
    model, optimizer = build("ours", 3)
    scheduler, loader = Schedule(), Schedule()
    report = checkpoint.load(step_dir, model=model, optimizer=optimizer)
    if "scheduler" in report.skipped:
        checkpoint.load(step_dir, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    return everything(model, optimizer), scheduler.state, loader.state, report.extra


def test_stock_dcp_loads_what_we_write(ranks, tmp_path):
    """Into torch's fully_shard and into ours, on other numbers of ranks; and back again, with nothing lost."""
    step_dir, expected = ranks(3, save_ours, tmp_path)[0]
    out = checkpoint.to_dcp(step_dir, tmp_path / "dcp")
    for size, api in ((2, "torch"), (4, "ours"), (1, "torch")):
        assert ranks(size, load_stock, out, api) == [expected] * size
    back = checkpoint.from_dcp(out, tmp_path / "back")
    assert back.name == "step-00000002"
    checkpoint.verify(back)
    for got, scheduler, loader, extra in ranks(2, continue_ours, back):
        assert got == expected
        assert scheduler == {"last": 2, "bounds": (1, float("inf"))} and loader == {"epoch": 1} and extra == {"note": [1, (2, None)]}


def save_stock(rank, size, where):
    model, optimizer = build("torch", 0)
    train(model, optimizer, 2)
    dcp.save(states(model, optimizer), checkpoint_id=str(where))
    return everything(model, optimizer)


def load_untied(rank, size, root):
    model = Toy(1)
    model.head.weight = nn.Parameter(model.embed.detach().clone())
    checkpoint.load(root, model=model)
    return support.model_bits(model)


def test_what_stock_dcp_writes_becomes_ours(ranks, tmp_path):
    expected = ranks(3, save_stock, tmp_path / "stock")[0]
    with pytest.raises(CheckpointError, match="give step=, a whole number from 0"):
        checkpoint.from_dcp(tmp_path / "stock", tmp_path / "run")
    with pytest.raises(CheckpointError, match="give optimizer_class="):
        checkpoint.from_dcp(tmp_path / "stock", tmp_path / "run", step=2)
    assert support.names(tmp_path) == ["stock"]
    path = checkpoint.from_dcp(tmp_path / "stock", tmp_path / "run", step=2, optimizer_class="AdamW")
    checkpoint.verify(path)
    assert ranks(2, load_untied, tmp_path / "run") == [expected["model"]] * 2        # stored once a name: torch does not note ties
    with pytest.raises(CheckpointError, match="exists already and is never written into"):
        checkpoint.from_dcp(tmp_path / "stock", tmp_path / "run", step=2, optimizer_class="AdamW")


def test_every_type_shape_and_block(tmp_path, monkeypatch):
    """Small blocks take the path that large tensors take; a tensor learning rate and state that is no tensor come along."""
    monkeypatch.setattr(dcp_export, "BLOCK", 7)
    monkeypatch.setattr(streaming, "BLOCK", 7)
    zoo = Zoo(0)
    zoo.weight = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.Adam([{"params": [zoo.weight], "lr": torch.tensor(0.25)}])
    optimizer.state[zoo.weight] = {"step": 3, "exp_avg": torch.randn(5, 3), "name.with.points": torch.ones(2)}
    path = checkpoint.save(tmp_path, step=9, model=zoo, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out = checkpoint.to_dcp(path, tmp_path / "dcp")
    stock = {"model": {name: torch.zeros_like(tensor) for name, tensor in zoo.state_dict().items()}, "step": 0}
    dcp.load(stock, checkpoint_id=str(out), no_dist=True)
    assert {name: support.bits(tensor) for name, tensor in stock["model"].items()} == support.model_bits(zoo) and stock["step"] == 9
    back = checkpoint.from_dcp(out, tmp_path / "back")
    other = Zoo(1)
    other.weight = nn.Parameter(torch.zeros(5, 3))
    target = torch.optim.Adam([{"params": [other.weight], "lr": torch.tensor(1.0)}])
    checkpoint.load(back, model=other, optimizer=target)
    assert everything(other, target) == everything(zoo, optimizer)
    first, second = (json.loads((place / "manifest.json").read_text())["model"] for place in (path, back))
    digests = lambda table: {name: [chunk["digest"] for chunk in entry["chunks"]] for name, entry in table.items()}  # noqa: E731
    assert digests(first) == digests(second)


def test_a_damaged_checkpoint_and_a_taken_directory(tmp_path):
    path = checkpoint.save(tmp_path, step=1, model=Toy())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.to_dcp(path, tmp_path / "taken")
    os.truncate(path / "model-00000-of-00001.safetensors", 700)
    with pytest.raises(CheckpointError, match="bytes instead of"):
        checkpoint.to_dcp(path, tmp_path / "out")
    assert support.names(tmp_path) == ["latest", "step-00000001", "taken"]


# -- what is not trusted ------------------------------------------------------------------------------------------------------


@pytest.fixture
def stock(tmp_path):
    """A DCP directory of one process."""
    torch.manual_seed(0)
    state = {"model": {"a": torch.randn(4, 3), "b": torch.tensor(2)}, "step": 3,
             "optim": {"state": {"a": {"m": torch.randn(4, 3)}}, "param_groups": [{"params": ["a"], "lr": 0.5}]}}
    dcp.save(state, checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    return tmp_path / "stock"


class Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def refuse(stock, match="."):
    root = stock.parent / "run"
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.from_dcp(stock, root, optimizer_class="SGD")
    assert not root.exists() or support.names(root) == []
    return str(caught.value)


def edit(stock, change):
    """Change the index as its owner could."""
    path = stock / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_b35_no_pickle_runs(stock, tmp_path):
    """Neither as the index, nor inside it, nor as a record."""
    checkpoint.from_dcp(stock, tmp_path / "fine", optimizer_class="SGD")
    good, marker = (stock / ".metadata").read_bytes(), tmp_path / "ran"
    (stock / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    refuse(stock, "it asks for posix.system, which is no part of such an index")
    for place in ("planner_data", "storage_meta", "version", "storage_data"):
        (stock / ".metadata").write_bytes(good)
        edit(stock, lambda metadata, place=place: setattr(metadata, place, Runs(marker)))
        refuse(stock, "posix.system")
    for protocol in (0, 2, 4, 5):
        for name in (b"cbuiltins\neval\n(S'1'\ntR.", b"ctorch\nload\n(S'x'\ntR.", b"ctorch.serialization\nos.system\n(S'x'\ntR."):
            (stock / ".metadata").write_bytes((b"\x80" + bytes([protocol]) if protocol > 1 else b"") + name)
            refuse(stock, "which is no part of such an index")
    (stock / ".metadata").write_bytes(good)
    buffer = io.BytesIO()
    torch.save(Runs(marker), buffer)
    data = buffer.getvalue()
    records = stock / "__0_0.distcp"
    with open(records, "ab") as file:
        begin = file.tell()
        file.write(data)

    def point(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "step":
                info.offset, info.length = begin, len(data)
    edit(stock, point)
    refuse(stock, "a record in .* is damaged or holds more than plain values")
    assert not marker.exists()


def info(metadata, name):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def enlarge(metadata):
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = entry.chunks[0].sizes = torch.Size((2**40, 3))


LIES = {
    **{f"a file called {name!r}": (lambda m, name=name: setattr(info(m, "model.a"), "relative_path", name), "no plain name of a .distcp")
       for name in ("../x.distcp", "/x.distcp", "a/../../x.distcp", "..\\x.distcp", "C:x.distcp", "x\0.distcp", "x.pkl", 5, None)},
    "a file that is not there": (lambda m: setattr(info(m, "model.a"), "relative_path", "y.distcp"), "cannot be read"),
    "a place behind the end": (lambda m: setattr(info(m, "model.a"), "offset", 10**6), "a record in it is to end at"),
    "a negative place": (lambda m: setattr(info(m, "model.a"), "offset", -1), "are not whole numbers"),
    "a huge length": (lambda m: setattr(info(m, "model.a"), "length", 2**62), "a record in it is to end at"),
    "a huge tensor": (enlarge, "takes 3298534883328 elements and its record has"),
    "a lost chunk": (lambda m: m.state_dict_metadata["model.a"].chunks.clear(), "a piece is missing"),
    "a doubled chunk": (lambda m: m.state_dict_metadata["model.a"].chunks.append(m.state_dict_metadata["model.a"].chunks[0]), "overlap"),
    "a larger tensor": (lambda m: setattr(m.state_dict_metadata["model.a"], "size", torch.Size((5, 3))), "a piece is missing"),
    "another type": (lambda m: setattr(m.state_dict_metadata["model.a"].properties, "dtype", torch.int32), "is not the tensor that"),
    "another record": (lambda m: vars(info(m, "model.b")).update(vars(info(m, "model.a"))), "is not the tensor that"),
    "another path": (lambda m: m.planner_data.update({"model.a": ("model", "b")}), "is said to have the path"),
    "a stranger": (lambda m: (m.planner_data.update({"model.a": ("model.a",)})), "holds model.a, which is neither model.NAME nor"),
    "a compressed record": (lambda m: setattr(info(m, "model.a"), "transform_descriptors", ["zstd"]), "compressed or encrypted"),
    "no places": (lambda m: m.storage_data.clear(), "is not accepted"),
    "a list as index": (lambda m: setattr(m, "storage_data", []), "is not accepted"),
}


@pytest.mark.parametrize("case", LIES)
def test_what_an_index_may_not_say(stock, case):
    change, match = LIES[case]
    edit(stock, change)
    refuse(stock, match)


def test_damaged_directories_are_refused_or_give_the_same_values(stock, tmp_path):
    """DCP has no digests: a flipped bit in a number cannot be seen. Anything else is refused, by name, and nothing runs or hangs."""
    dice, refused = random.Random(3), 0
    for number in range(300):
        path = stock / (".metadata", "__0_0.distcp")[number % 2]
        good = path.read_bytes()
        data = bytearray(good)
        place = dice.randrange(len(data))
        if number % 3:
            data[place] ^= 1 << dice.randrange(8)
        else:
            del data[place:]
        path.write_bytes(data)
        try:
            step_dir = checkpoint.from_dcp(stock, tmp_path / f"run{number}", optimizer_class="SGD")
            checkpoint.verify(step_dir)
        except CheckpointError:
            refused += 1
        path.write_bytes(good)
    assert refused > 150
    assert checkpoint.from_dcp(stock, tmp_path / "good", optimizer_class="SGD")
