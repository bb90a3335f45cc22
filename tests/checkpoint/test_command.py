"""`fsdp-ref checkpoint show|verify|export|diff`: what it prints, what it finds, and its exit codes."""

import json
import os
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from fsdp_ref import checkpoint, cli
from fsdp_ref.checkpoint import compare, files, safetensors_file, streaming

from .damage import MODEL, OPTIMIZER
from .support import Schedule, Toy, adamw, sharded, train
from .test_round_trip import Zoo

pytestmark = pytest.mark.slow


def save_toy(rank, size, root, step=2, source=None, change=False):
    """Trained, or loaded from `source` and then, perhaps, changed here and there."""
    model = sharded()
    optimizer = adamw(model)
    if source is None:
        train(model, optimizer, 2)
    else:
        checkpoint.load(source, model=model, optimizer=optimizer)
    if change:
        moved(model, optimizer)
    return checkpoint.save(root, step=step, model=model, optimizer=optimizer, scheduler=Schedule(last=2), loader=Schedule(epoch=1))


@pytest.fixture(scope="module")
def two(ranks, tmp_path_factory):
    """The same state, saved by two ranks and by three."""
    root = tmp_path_factory.mktemp("toys")
    first = ranks(2, save_toy, root / "two")[0]
    return first, ranks(3, save_toy, root / "three", source=root / "two")[0]


@pytest.fixture
def copy(two, tmp_path):
    shutil.copytree(two[0], tmp_path / two[0].name)
    return tmp_path / two[0].name


def run(capsys, *argv):
    code = cli.main(["checkpoint", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_action_has_help(capsys):
    for action in ((), ("show",), ("verify",), ("export",), ("diff",)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoint", *action, "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and "usage: fsdp-ref checkpoint" in text and all(len(line) < 200 for line in text.splitlines())


def test_show(two, capsys):
    step_dir = two[0]
    for place in (step_dir, step_dir.parent):
        code, text, _ = run(capsys, "show", place)
        assert code == 0 and text.startswith("step-00000002: step 2, written by 2 ranks, 6 files, ")
    for part in ("first.weight  F32  [7, 6]  in 2 pieces  168 B", "head.weight  is embed", 'scheduler: {"last": 2}', 'loader: {"epoch": 1}',
                 "optimizer: AdamW, 21 tensors", "2 groups", "group 0: 3 parameters", "first.weight.exp_avg  F32", "extra: not saved",
                 "random state: of 2 ranks", MODEL.format(1)):
        assert part in text, part
    sizes = [int(line.split()[-2]) for line in text.split("optimizer:")[0].splitlines()[2:] if line.endswith(" B")]
    assert sizes == sorted(sizes, reverse=True)
    code, text, _ = run(capsys, "show", step_dir, "--json")
    facts = json.loads(text)
    held = sum(tensor.nbytes for name, tensor in Toy().state_dict().items() if name != "head.weight")
    assert facts["sections"]["model"] == {"tensors": 11, "elements": (held - 8) // 4 + 1, "bytes": held}
    assert facts["tensors"][0]["name"] == "first.weight" and facts["world_size"] == 2 and facts["aliases"] == {"head.weight": "embed"}
    assert facts["bytes"] == sum(entry["bytes"] for entry in facts["files"].values())


def test_the_newest_of_a_folder(two, tmp_path, capsys):
    run_folder = tmp_path / "run" / "checkpoints"
    for step in (9, 10):
        checkpoint.save(run_folder, step=step, model=Toy())
    for place in (run_folder, run_folder.parent):
        assert run(capsys, "show", place)[1].startswith("step-00000010:")
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "step-00000001"):
        code, _, err = run(capsys, "verify", place)
        assert code == 4 and "there is no checkpoint" in err and err.count("\n") == 1


# -- verify -------------------------------------------------------------------------------------------------------------------


def test_f3_verify_names_the_tensor_behind_every_byte(copy, capsys):
    """Each byte of each shard in turn (in strides): a flipped bit is told with the tensor that lies there, by the library's header."""
    assert run(capsys, "verify", copy)[:2] == (0, f"{copy} is whole: every file has the size and the digest that its manifest states\n")
    for name in (MODEL.format(0), MODEL.format(1), OPTIMIZER.format(1)):
        path = copy / name
        good = path.read_bytes()
        header = safetensors_file.read_header(path)
        for place in range(0, len(good), 83):
            data = bytearray(good)
            data[place] ^= 1
            path.write_bytes(data)
            code, out, err = run(capsys, "verify", copy)
            inside = [label for label, entry in header.entries.items() if entry.begin <= place - header.start < entry.end]
            assert code == 4 and out == "" and err.count("\n") == 1 and str(path) in err
            assert (f"tensor {inside[0]} (" if inside else "its header does not give") in err, (place, err)
        for size in range(0, len(good), 307):
            path.write_bytes(good[:size])
            code, _, err = run(capsys, "verify", copy)
            lost = [label for label, entry in header.entries.items() if entry.end > max(size - header.start, entry.begin)]
            assert code == 4 and all(f"tensor {label} (" in err for label in lost[:5]) == bool(lost)
            assert f"has {size} bytes instead of {len(good)}" in err
        path.write_bytes(good)
    assert run(capsys, "verify", copy)[0] == 0


def test_verify_tells_all_damages(copy, capsys):
    flip = lambda name, place: (copy / name).write_bytes(  # noqa: E731
        bytes(byte ^ (index == place) for index, byte in enumerate((copy / name).read_bytes())))
    flip(MODEL.format(0), os.path.getsize(copy / MODEL.format(0)) - 1)
    flip("rank-00001.json", 50)
    (copy / OPTIMIZER.format(0)).unlink()
    os.truncate(copy / OPTIMIZER.format(1), 1000)
    (copy / "stray").touch()
    os.rename(copy / "rank-00000.json", copy.parent / "elsewhere")
    (copy / "rank-00000.json").symlink_to(copy.parent / "elsewhere")
    code, out, err = run(capsys, "verify", copy)
    assert code == 4 and out == ""
    found = err.splitlines()
    for name in (MODEL.format(0), "rank-00001.json", OPTIMIZER.format(0), OPTIMIZER.format(1), "stray", "rank-00000.json"):
        assert sum(str(copy / name) + " " in line for line in found) == 1, name
    assert len(found) == 6 and MODEL.format(1) not in err


# -- export -------------------------------------------------------------------------------------------------------------------


def test_export(two, tmp_path, capsys):
    expected = {name: tensor for name, tensor in Toy().state_dict().items() if name != "head.weight"}
    code, out, _ = run(capsys, "export", two[0], tmp_path / "hf", "--dtype", "bfloat16", "--max-shard-size", "100B")
    assert code == 0 and "step-00000002 -> " in out and (tmp_path / "hf" / "model.safetensors.index.json").exists()
    held = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        held |= safetensors.torch.load_file(path)
    assert held.keys() == expected.keys() and held["embed"].dtype == torch.bfloat16 and held["count"].dtype == torch.int64
    assert run(capsys, "export", two[1].parent, tmp_path / "dcp", "--to", "dcp")[0] == 0
    assert (tmp_path / "dcp" / ".metadata").exists()
    for argv, code, told in ((("hf",), 4, "exists already"), (("x", "--max-shard-size", "big"), 2, "max_shard_size is 'big'"),
                             (("x", "--to", "dcp", "--dtype", "float16"), 2, "go with --to huggingface"),
                             (("x", "--dtype", "int8"), 2, "int8"), (("x", "--to", "tape"), 2, "tape")):
        got, _, err = run(capsys, "export", two[0], tmp_path / argv[0], *argv[1:])
        assert got == code and told in err and err.count("\n") == 1
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1e30)
    path = checkpoint.save(tmp_path / "large", step=1, model=model)
    code, _, err = run(capsys, "export", path, tmp_path / "half", "--dtype", "float16")
    assert code == 0 and err.startswith("fsdp-ref: warning: torch.float16 cannot hold some values of 1 tensors (weight)")


# -- diff ---------------------------------------------------------------------------------------------------------------------


def moved(model, optimizer):
    """Some changes, one of each kind that a run can make."""
    with torch.no_grad():
        local = model.first.weight.to_local()
        if local.numel():
            local[0, 3] += 0.5                                   # one element on each rank
        model.count += 2
        model.scale[1] = float("nan")
        optimizer.param_groups[1]["lr"] = 0.5
        optimizer.state[model.embed]["step"] += 1


def test_diff_across_world_sizes(two, ranks, tmp_path, capsys):
    ignore = ("--ignore", "world_size")
    assert run(capsys, "diff", two[0], two[0])[0] == 0
    code, out, _ = run(capsys, "diff", two[0], two[1])
    assert code == 1 and out == "world_size: 2 and 3\n"
    code, out, _ = run(capsys, "diff", *two, *ignore)
    assert code == 0 and out.endswith("hold the same (world_size not looked at)\n")
    other = ranks(3, save_toy, tmp_path, 7, two[0], True)[0]
    code, out, _ = run(capsys, "diff", two[0], other, *ignore)
    assert code == 1
    assert out.splitlines() == [
        "step: 2 and 7",
        "model count: 1 of 1 elements differ, by at most 2",
        "model first.weight: 3 of 42 elements differ, by at most 0.5, first at [0, 3]",
        "model scale: 1 of 3 elements differ, by at most not a number, first at [1]",
        "optimizer group 1, lr: 0.01 and 0.5",
        "optimizer embed.step: 1 of 1 elements differ, by at most 1",
    ]
    code, out, _ = run(capsys, "diff", two[0], other, *ignore, "--json")
    third = json.loads(out)[2]
    assert code == 1 and third["elements"] == 3 and third["of"] == 42 and third["first"] == [0, 3] and third["section"] == "model"
    assert run(capsys, "diff", two[0], other, *ignore, "--ignore", "model", "--ignore", "optimizer", "--ignore", "step")[0] == 0


def test_diff_of_everything_else(tmp_path, capsys):
    """Names, shapes, types, ties, sections, random states; and values in every type, -0.0 and NaN payloads too."""
    first, second = nn.Module(), nn.Module()
    for name, shapes in {"gone": ((2,), None), "new": (None, (2,)), "form": ((2, 3), (3, 2)), "kind": ((2,), (2,))}.items():
        for model, shape in zip((first, second), shapes, strict=True):
            if shape:
                    wide = name == "kind" and model is second
                    model.register_buffer(name, torch.zeros(shape, dtype=torch.float64 if wide else torch.float32))
    first.register_buffer("zero", torch.tensor([1.0, 0.0]))
    second.register_buffer("zero", torch.tensor([1.0, -0.0]))
    nan = torch.tensor([0x7FC00001, 0x7FC00001], dtype=torch.int32)
    first.register_buffer("nan", nan.view(torch.float32))
    second.register_buffer("nan", (nan + torch.tensor([0, 1], dtype=torch.int32)).view(torch.float32))
    first.tied = second.tied = nn.Parameter(torch.ones(2))
    first.other, second.other = first.tied, nn.Parameter(torch.ones(2))
    torch.manual_seed(0)
    a = checkpoint.save(tmp_path / "a", step=1, model=first, extra={"x": 1})
    torch.manual_seed(1)
    b = checkpoint.save(tmp_path / "b", step=1, model=second, optimizer=torch.optim.SGD([second.tied], 0.1), loader=Schedule(epoch=0))
    code, out, _ = run(capsys, "diff", a, b)
    told = out.splitlines()
    assert code == 1 and len(told) == 12
    for line in ("model gone: only in the first", "model new: only in the second", "model form: shape [2, 3] and [3, 2]",
                 "model kind: type F32 and F64", "model zero: 1 of 2 elements differ, by at most 0, first at [1]",
                 "model nan: 1 of 2 elements differ, by at most not a number, first at [1]", "model other: only in the second",
                 'model aliases: {"other": "tied"} and {}', "optimizer: only in the second", 'loader: nothing and {"epoch": 0}',
                 'extra: {"x": 1} and nothing', "random_state of rank 0: torch differ"):
        assert line in told, line


def test_diff_of_every_type_and_of_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 5)
    paths = [checkpoint.save(tmp_path / str(seed), step=1, model=Zoo(seed)) for seed in (0, 1)]
    found = {difference.name: difference for difference in compare.compare(*paths)}
    zoos = Zoo(0).state_dict(), Zoo(1).state_dict()
    for name in zoos[0]:
        a, b = (zoo[name].contiguous().reshape(-1) for zoo in zoos)
        differs = (a.view(torch.uint8).reshape(len(a), -1) != b.view(torch.uint8).reshape(len(a), -1)).any(1) if len(a) else torch.zeros(0)
        if not differs.any():
            assert name not in found
            continue
        assert (found[name].elements, found[name].of) == (int(differs.sum()), len(a))
        if zoos[0][name].dim():
            place = torch.unravel_index(differs.nonzero()[0], zoos[0][name].shape)
            assert found[name].first == tuple(map(int, place))
        if a.dtype == torch.int16:
            assert found[name].largest == float((a.double() - b.double()).abs().max())
    assert len(found) > 60


def test_diff_needs_whole_checkpoints(copy, two, capsys):
    data = bytearray((copy / MODEL.format(0)).read_bytes())
    data[-3] ^= 1
    (copy / MODEL.format(0)).write_bytes(data)
    with files.use(files.Files()):
        code, _, err = run(capsys, "diff", two[0], copy)
    assert code == 4 and "is damaged: tensor" in err
