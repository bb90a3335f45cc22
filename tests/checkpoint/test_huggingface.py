"""Hugging Face's own loader reads what we export, and what it writes goes straight into shards; a hostile directory goes nowhere."""

import json
import tracemalloc
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import files, huggingface_export, huggingface_index
from fsdp_ref.errors import CheckpointError, ConfigError

from ..engine.test_transformers import FAMILIES
from . import support
from .memory import Growth
from .opening import OpenHook, outside
from .support import Toy, no_warnings, sharded
from .test_round_trip import Zoo

# -- export, read by transformers ---------------------------------------------------------------------------------------------


def _family(family, tied, seed=0):
    from fsdp_ref.engine import fully_shard
    torch.manual_seed(seed)
    model = FAMILIES[family](tied)[0]
    fully_shard(model)
    return model


def export_families(rank, size, root):
    """Every family, tied and not, in one file and in several, loaded by `from_pretrained` (rank 0); returns what differs."""
    from transformers import AutoModelForCausalLM
    wrong = []
    for family in FAMILIES:
        for tied in (True, False):
            model = _family(family, tied)
            where = root / f"{family}-{tied}"
            step_dir = checkpoint.save(where, step=1, model=model)
            expected = support.model_bits(model)
            if rank:
                continue
            for limit in ("5GB", "20KB"):
                out = checkpoint.export_huggingface(step_dir, where / limit, max_shard_size=limit)
                model.config.save_pretrained(out)
                loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
                got = {name: support.bits(tensor) for name, tensor in loaded.state_dict().items()}
                assert (out / "model.safetensors").exists() == (limit == "5GB")
                if got != expected or info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
                    wrong.append((family, tied, limit, info))
    return wrong


def import_families(rank, size, root):
    """What `save_pretrained` writes, and what we export, goes into shards; returns what differs."""
    wrong = []
    for family in FAMILIES:
        for tied in (True, False):
            torch.manual_seed(0)
            theirs = FAMILIES[family](tied)[0]
            expected = support.model_bits(theirs)
            where = root / f"{family}-{tied}"
            if rank == 0:
                theirs.save_pretrained(where / "saved", max_shard_size="20KB")
            for source in ("saved", "5GB", "20KB"):
                model = _family(family, tied, seed=1)
                before = support.model_bits(model)
                counts = checkpoint.import_huggingface(where / source, model)
                if before == expected or support.model_bits(model) != expected or counts["model"] != len({*model.parameters()}):
                    wrong.append((family, tied, source, counts))
    return wrong


@pytest.mark.slow
def test_transformers_loads_the_export_and_the_import_loads_transformers(ranks, tmp_path):
    assert ranks(2, export_families, tmp_path) == [[]] * 2
    assert ranks(2, import_families, tmp_path) == [[]] * 2


# -- the files ----------------------------------------------------------------------------------------------------------------


def save_zoo(root):
    return checkpoint.save(root, step=1, model=Zoo(0))


def test_f5_scalars_empty_tensors_and_integers_survive(tmp_path):
    """torch's consolidation zeroes 0-d tensors and cannot take integers: here every type and shape is equal, cut or whole."""
    expected = support.model_bits(Zoo(0))
    step_dir = save_zoo(tmp_path)
    for limit in ("5GB", "500B"):
        out = checkpoint.export_huggingface(step_dir, tmp_path / limit, max_shard_size=limit)
        loaded = {}
        for path in sorted(out.glob("*.safetensors")):
            for name, entry in huggingface_index.safetensors_file.read_header(path).entries.items():
                if entry.dtype.startswith("F8_E8M0"):
                    continue                                     # which the library of this version has no type for
                with safetensors.safe_open(path, framework="pt") as file:
                    loaded[name] = support.bits(file.get_tensor(name))
        assert loaded == {name: value for name, value in expected.items() if not name.startswith("F8_E8M0")}
        other = Zoo(1)
        checkpoint.import_huggingface(out, other)
        assert support.model_bits(other) == expected


def test_shards_are_cut_as_the_hub_cuts_them(tmp_path):
    from huggingface_hub import split_torch_state_dict_into_shards
    model = nn.Module()
    for index, size in enumerate((3, 4, 9, 1, 0, 8, 8, 2, 7, 30, 1)):
        model.register_buffer(f"t{index:02d}", torch.arange(size, dtype=torch.uint8))
    step_dir = checkpoint.save(tmp_path, step=1, model=model)
    for limit in (1, 8, 9, 10, 17, 72, 73, 100):
        out = checkpoint.export_huggingface(step_dir, tmp_path / str(limit), max_shard_size=limit)
        theirs = split_torch_state_dict_into_shards(dict(sorted(model.state_dict().items())), max_shard_size=limit,
                                                    filename_pattern="model{suffix}.safetensors")
        ours = {path.name: sorted(safetensors.torch.load_file(path)) for path in out.glob("*.safetensors")}
        assert ours == {name: sorted(names) for name, names in theirs.filename_to_tensors.items()}
        assert all(len(names) == 1 or sum(model.get_buffer(n).numel() for n in names) <= limit for names in ours.values())
        if len(ours) > 1:
            text = (out / huggingface_export.INDEX).read_text()
            index = json.loads(text)
            assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
            assert index["metadata"] == {"total_size": 73}
            assert index["weight_map"] == {name: file for file, names in ours.items() for name in names}
        else:
            assert [path.name for path in out.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("text", "count"), (("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("7B", 7), (12, 12)))
def test_sizes_are_decimal(text, count):
    assert huggingface_export._parse_size(text) == count


@pytest.mark.parametrize("size", ("", "5GiB", "0GB", 0, -1, 1.5, True, None, "GB"))
def test_sizes_that_are_none(tmp_path, size):
    with pytest.raises(ConfigError, match="max_shard_size is"):
        checkpoint.export_huggingface(save_zoo(tmp_path), tmp_path / "out", max_shard_size=size)


def test_conversion_rounds_as_torch_does_and_tells_what_became_infinite(tmp_path):
    model = nn.Module()
    for name, tensor in Zoo(0).state_dict().items():
        if name.split("_")[0] not in ("F32", "F64", "BF16") and "E8M0" not in name:      # random bits of these are large numbers
            model.register_buffer(name, tensor)
    model.register_buffer("ties", torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0, float("nan"), float("inf")]))
    model.register_buffer("large", torch.tensor([65520.0, 1.0]))
    model.register_buffer("not_large", torch.tensor([65519.9, 1.0]))
    step_dir = checkpoint.save(tmp_path, step=1, model=model)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = checkpoint.export_huggingface(step_dir, tmp_path / str(dtype), dtype=dtype)
        told = [str(warning.message) for warning in caught if "cannot hold" in str(warning.message)]
        assert len(told) == (dtype is torch.float16) and all("1 tensors (large)" in message for message in told)
        loaded = safetensors.torch.load_file(out / "model.safetensors")
        for name, tensor in model.state_dict().items():
            expected = tensor.to(dtype) if tensor.dtype.is_floating_point else tensor
            assert support.bits(loaded[name]) == support.bits(expected), name
    for odd in (torch.int32, torch.float8_e5m2, "float16"):
        with pytest.raises(ConfigError, match="give torch.float16"):
            checkpoint.export_huggingface(step_dir, tmp_path / "odd", dtype=odd)


def save_tied(rank, size, root):
    model = sharded()
    return checkpoint.save(root, step=1, model=model), support.model_bits(model)


def import_tied(rank, size, out):
    model = sharded(seed=1)
    checkpoint.import_huggingface(out, model)
    return support.model_bits(model), model.head.weight is model.embed


def test_b32_tied_weights_are_stored_once_and_tied_again(ranks, tmp_path):
    """No index names what no file holds, nothing is stored twice, and equal values that are not tied stay two tensors."""
    step_dir, expected = ranks(2, save_tied, tmp_path)[0]
    for limit in ("5GB", "100B"):
        out = checkpoint.export_huggingface(step_dir, tmp_path / limit, max_shard_size=limit)
        held = {}
        for path in out.glob("*.safetensors"):
            with safetensors.safe_open(path, framework="pt") as file:
                held |= dict.fromkeys(file.keys(), path.name)
                assert file.metadata() == ({"format": "pt", "head.weight": "embed"} if "embed" in file.keys() else {"format": "pt"})
            assert safetensors.torch.load_file(path).keys() == {name for name, file in held.items() if file == path.name}
        assert held.keys() == expected.keys() - {"head.weight"}
        if limit == "100B":
            assert json.loads((out / huggingface_export.INDEX).read_text())["weight_map"] == held
        assert ranks(2, import_tied, out) == [(expected, True)] * 2
    untied = Toy(seed=1)
    untied.head.weight = nn.Parameter(untied.embed.detach().clone())
    before = support.model_bits(untied)
    with pytest.raises(CheckpointError, match="head.weight and embed are one tensor in .* and two in the model; tie them"):
        checkpoint.import_huggingface(tmp_path / "5GB", untied)
    assert support.model_bits(untied) == before
    step_dir = checkpoint.save(tmp_path / "untied", step=1, model=untied)
    out = checkpoint.export_huggingface(step_dir, tmp_path / "both")
    assert {"embed", "head.weight"} <= safetensors.torch.load_file(out / "model.safetensors").keys()
    tied = Toy()
    checkpoint.import_huggingface(out, tied)                     # stored twice and equal: fine
    assert torch.equal(tied.embed, untied.embed)
    with torch.no_grad():
        untied.head.weight[4, 5] += 1
    out = checkpoint.export_huggingface(checkpoint.save(tmp_path / "drifted", step=1, model=untied), tmp_path / "drifted" / "out")
    with pytest.raises(CheckpointError, match="embed and head.weight are one tensor in the model and hold different values"):
        checkpoint.import_huggingface(out, tied)


def test_an_export_appears_whole_or_not_at_all(tmp_path):
    step_dir = save_zoo(tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("precious")
    for target in (taken, taken / "mine.txt"):
        with pytest.raises(CheckpointError, match="exists already and is never written into"):
            checkpoint.export_huggingface(step_dir, target)
    assert support.contents(taken) == {"mine.txt": b"precious"}
    (tmp_path / "empty").mkdir()
    checkpoint.export_huggingface(step_dir, tmp_path / "empty")
    with files.use(support.Tripwire()) as counted:
        out = checkpoint.export_huggingface(step_dir, tmp_path / "out", max_shard_size="500B")
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    order = [name for name, _ in counted.log]
    assert order[-3:] == ["fsync_dir", "rename", "fsync_dir"] and order.count("fsync") == order.count("create") == len(list(out.iterdir()))

    def fail():
        raise OSError(28, "No space left on device")
    before = support.names(tmp_path)
    for at in (1, 2, 5, len(counted.log) - 3, len(counted.log) - 2, len(counted.log) - 1):
        with files.use(support.Tripwire(at, fail)), pytest.raises(CheckpointError, match="cannot be written .No space left on device"):
            checkpoint.export_huggingface(step_dir, tmp_path / "failed", max_shard_size="500B")
        assert support.names(tmp_path) == before
    data = bytearray((step_dir / "model-00000-of-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (step_dir / "model-00000-of-00001.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.export_huggingface(step_dir, tmp_path / "damaged")
    assert support.names(tmp_path) == before


def test_an_export_needs_little_memory(tmp_path):
    """128 MiB of weights through blocks of 8 MiB."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2048, 16384))
    step_dir = checkpoint.save(tmp_path, step=1, model=model)
    del model
    with Growth() as growth:
        checkpoint.export_huggingface(step_dir, tmp_path / "out", dtype=torch.bfloat16)
    assert growth.bytes < 50 << 20
    with Growth() as growth:
        checkpoint.export_huggingface(step_dir, tmp_path / "large", max_shard_size=10**6)
    assert growth.bytes < 50 << 20


# -- import -------------------------------------------------------------------------------------------------------------------


def write_model(directory, tensors, weight_map=None, **fields):
    """A model directory by hand: {file: {name: tensor}}, and an index when there is a weight map."""
    directory.mkdir(parents=True)
    for file, held in tensors.items():
        safetensors.torch.save_file(held, directory / file)
    if weight_map is not None:
        (directory / huggingface_export.INDEX).write_text(json.dumps({"weight_map": weight_map, **fields}))
    return directory


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def two_files(directory, weight_map=None, **fields):
    model = linear()
    tensors = {TWO[0]: {"weight": model.weight.detach()}, TWO[1]: {"bias": model.bias.detach()}}
    return write_model(directory, tensors, {"weight": TWO[0], "bias": TWO[1]} if weight_map is None else weight_map, **fields)


def refuse_import(directory, match, model=None):
    """The import raises, opens nothing outside the directory, takes little memory, and changes no bit."""
    model = model or linear(1)
    before = support.model_bits(model)
    tracemalloc.start()
    try:
        with OpenHook() as opened, pytest.raises(CheckpointError, match=match):
            checkpoint.import_huggingface(directory, model)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert support.model_bits(model) == before
    assert outside(directory, opened) == []


HOSTILE = ("../x.safetensors", "/abs.safetensors", "C:\\x.safetensors", "C:x.safetensors", "a/../../x.safetensors", "..\\x.safetensors",
           "x\0y.safetensors", "\\\\host\\share\\x.safetensors", "model.bin", "pytorch_model.pkl", "", ".", "..", ".hidden.safetensors",
           "x.safetensors:stream", "x.safetensors ", "con|x.safetensors", "é" * 200 + ".safetensors", 1, None, ["a.safetensors"], {})


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name)[:30])
def test_b35_a_file_name_never_leaves_the_directory(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(b"outside")
    directory = two_files(tmp_path / "model", {"weight": TWO[0], "bias": name})
    refuse_import(directory, "which is no plain name of a .safetensors file")


def test_b35_links_a_million_entries_and_a_huge_header(tmp_path):
    outside = two_files(tmp_path / "other")
    directory = two_files(tmp_path / "link")
    (directory / TWO[1]).unlink()
    (directory / TWO[1]).symlink_to(outside / TWO[1])
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        checkpoint.import_huggingface(directory, linear())
    directory = two_files(tmp_path / "many")
    with open(directory / huggingface_export.INDEX, "w") as file:
        file.write('{"weight_map": {' + ",".join(f'"t{i}":"{TWO[0]}"' for i in range(10**6)) + "}}")
    refuse_import(directory, "and at most 25000000 make sense there")
    for length in (2**63, 2**64 - 1, 25_000_001, 10**6):
        directory = two_files(tmp_path / str(length))
        data = (directory / TWO[0]).read_bytes()
        (directory / TWO[0]).write_bytes(length.to_bytes(8, "little") + data[8:])
        refuse_import(directory, f"its header claims {length} bytes")


INDEX = {
    "entry without tensor": ({"weight": TWO[1], "bias": TWO[0]}, {}, "'weight' lies in .*00002-of-00002.*, which does not hold it"),
    "tensor without entry": ({"weight": TWO[0], "more": TWO[1]}, {}, "'more' lies in .*, which does not hold it"),
    "unlisted tensor": ({"weight": TWO[0]}, {}, f"{TWO[1]} is not in model.safetensors.index.json"),
    "missing file": ({"weight": TWO[0], "bias": "model-00003-of-00002.safetensors"}, {}, "model-00003-of-00002.safetensors is missing"),
    "wrong total": (None, {"metadata": {"total_size": 31}}, "states 31 bytes and the files hold 32"),
    "total is true": (None, {"metadata": {"total_size": True}}, "states True bytes"),
    "metadata is a list": (None, {"metadata": []}, "states None bytes"),
    "no table": ([], {}, "has no table weight_map"),
    "empty table": ({}, {}, "has no table weight_map"),
}


@pytest.mark.parametrize("case", INDEX)
def test_index_and_files_must_agree(tmp_path, case):
    weight_map, fields, match = INDEX[case]
    refuse_import(two_files(tmp_path / "model", weight_map, **fields), match)


def test_what_stands_in_two_places_or_nowhere(tmp_path):
    model = linear()
    twice = {TWO[0]: {"weight": model.weight.detach(), "bias": model.bias.detach()}, TWO[1]: {"bias": model.bias.detach()}}
    refuse_import(write_model(tmp_path / "twice", twice, {"weight": TWO[0], "bias": TWO[1]}), "holds tensor 'bias' and .* does not say so")
    (tmp_path / "nothing").mkdir()
    refuse_import(tmp_path / "nothing", "has neither model.safetensors nor model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.import_huggingface(tmp_path / "nowhere", model)
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is no .safetensors file"):
        checkpoint.import_huggingface(tmp_path / "file.bin", model)
    both = two_files(tmp_path / "both")
    safetensors.torch.save_file({"weight": model.weight.detach()}, both / "model.safetensors")
    refuse_import(both, "model.safetensors is not in model.safetensors.index.json")
    for number, text in enumerate(("[]", "{", '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "\xff")):
        path = two_files(tmp_path / f"text{number}") / huggingface_export.INDEX
        path.write_text(text, encoding="latin-1")
        refuse_import(path.parent, "index.json")
    checkpoint.import_huggingface(two_files(tmp_path / "good", metadata={"total_size": 32}), model)
    checkpoint.import_huggingface(tmp_path / "good", model)
    with no_warnings():
        assert checkpoint.import_huggingface(tmp_path / "good", model)["bytes"] == 32


def misfit(rank, size, root):
    """Every kind of misfit on every rank: the message, and whether a bit changed."""
    told = []
    for name in ("missing", "unexpected", "shape", "type", "integer"):
        model = sharded(seed=1)
        before = support.model_bits(model)
        try:
            checkpoint.import_huggingface(root / name, model, cast=name == "integer")
            told.append((name, "", False))
        except CheckpointError as error:
            told.append((name, str(error), support.model_bits(model) == before))
    model = sharded(seed=1)
    counts = checkpoint.import_huggingface(root / "type", model, cast=True)
    return told, support.model_bits(model), counts


def test_f7_missing_unexpected_shape_and_type_are_errors_on_every_rank(ranks, tmp_path):
    """torch ignores what the target lacks and casts silently; here nothing is ignored, and only asking casts."""
    state = {name: tensor.detach().clone() for name, tensor in Toy().state_dict().items() if name != "head.weight"}
    wide = {name: tensor.double() if name == "embed" else tensor for name, tensor in state.items()}
    sources = {"missing": {name: tensor for name, tensor in state.items() if name != "unused"},
               "unexpected": state | {"odd": torch.ones(1)}, "shape": state | {"embed": torch.ones(6, 5)}, "type": wide,
               "integer": state | {"embed": torch.ones(5, 6, dtype=torch.int32)}}
    for name, tensors in sources.items():
        write_model(tmp_path / name, {"model.safetensors": tensors})
    results = ranks(3, misfit, tmp_path)
    assert results[0][0] == results[1][0] == results[2][0]
    expected = {"missing": "lacks 1 tensors of the model: unused;", "unexpected": "has 1 tensors that the model lacks: odd;",
                "shape": "embed has the shape [6, 5] in ", "type": "has the type F64 in ", "integer": "embed has the type I32 in "}
    for name, message, unchanged in results[0][0]:
        assert expected[name] in message and unchanged, (name, message)
    assert "give cast=True" in dict((name, message) for name, message, _ in results[0][0])["type"]
    assert results[0][1] == results[1][1] == support.model_bits(Toy())
    assert results[0][2]["bytes"] < sum(tensor.nbytes for tensor in wide.values())                # a part each
