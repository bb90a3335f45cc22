"""A manifest whose digest is right and whose text lies: refused from what the files and the other entries say."""

import json

import pytest
import safetensors.torch

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import safetensors_file
from fsdp_ref.errors import CheckpointError

from .damage import MODEL, OPTIMIZER, edit, refuse, swap


def rename_file(value, old, new):
    value["files"][new] = value["files"].pop(old)
    for entry in value["model"].values():
        for chunk in entry["chunks"]:
            chunk["file"] = new if chunk["file"] == old else chunk["file"]


def weight(value):
    return value["model"]["weight"]


def set_in(path, new):
    def change(value):
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = new
    return change


MANIFEST = {
    **{f"file called {name!r}": lambda value, name=name: rename_file(value, MODEL.format(0), name)
       for name in ("../x.safetensors", "/etc/passwd", "C:\\x", "a/../../x", "..\\x", "x\x00y", "", ".", "manifest.json", "latest")},
    "a chunk in another kind of file": lambda v: weight(v)["chunks"][0].update(file=OPTIMIZER.format(0)),
    "a chunk in the random state": lambda v: weight(v)["chunks"][0].update(file="rank-00000.json"),
    "two chunks in one file": lambda v: weight(v)["chunks"][1].update(file=MODEL.format(0)),
    "a chunk is missing": lambda v: weight(v)["chunks"].pop(),
    "no chunks": lambda v: weight(v).update(chunks=[]),
    "chunks overlap": lambda v: weight(v)["chunks"][1].update(offsets=[2, 0]),
    "a chunk sticks out": lambda v: weight(v)["chunks"][1].update(offsets=[4, 0]),
    "chunks exchanged": lambda v: (weight(v)["chunks"][0].update(offsets=[2, 0]), weight(v)["chunks"][1].update(offsets=[0, 0])),
    "a larger shape": lambda v: weight(v).update(shape=[6, 3]),
    "another shape of the same size": lambda v: weight(v).update(shape=[3, 5]),
    "another type": lambda v: weight(v).update(dtype="I32"),
    "an unknown type": lambda v: weight(v).update(dtype="F31"),
    "a float as size": lambda v: weight(v).update(shape=[5.0, 3]),
    "a bool as offset": lambda v: weight(v)["chunks"][0].update(offsets=[False, 0]),
    "a negative offset": lambda v: weight(v)["chunks"][0].update(offsets=[-1, 0]),
    "a huge shape": lambda v: weight(v).update(shape=[2**62, 2**62]),
    "an alias of nothing": lambda v: v["aliases"].update(extra="nothing"),
    "an alias of a real name": lambda v: v["aliases"].update(weight="bias"),
    "another step": lambda v: v.update(step=3),
    "a fractional step": lambda v: v.update(step=2.0),
    "a larger world": lambda v: v.update(world_size=3),
    "an enormous world": lambda v: v.update(world_size=2**62),
    "no world": lambda v: v.update(world_size=0),
    "a later format": lambda v: v.update(format_version=3),
    "another format": lambda v: v.update(format="something else"),
    "an unknown entry": lambda v: v.update(surprise=1),
    "a missing entry": lambda v: v.pop("loader"),
    "another size of a file": lambda v: v["files"][MODEL.format(0)].update(bytes=1),
    "another digest": lambda v: v["files"][MODEL.format(0)].update(digest="xxh3-128:" + "0" * 32),
    "exchanged digests": lambda v: v["files"].update({"rank-00000.json": v["files"]["rank-00001.json"]}),
    "a group names nobody": lambda v: v["optimizer"]["groups"][0].update(parameters=["weight", "nobody"]),
    "a group names someone twice": lambda v: v["optimizer"]["groups"][0].update(parameters=["weight", "weight", "bias"]),
    "a group lost a parameter": lambda v: v["optimizer"]["groups"][0].update(parameters=["weight"]),
    "options with a strange mark": lambda v: v["optimizer"]["groups"][0]["options"].update(lr={"$code": "x"}),
    "options are a list": lambda v: v["optimizer"]["groups"][0].update(options=[]),
    "a tensor lost its owner": lambda v: v["optimizer"]["tensors"]["weight.exp_avg"].update(parameter="nobody"),
    "a tensor under another key": lambda v: v["optimizer"]["tensors"]["weight.exp_avg"].update(key="exp_avg_sq"),
    "a tensor is missing in the list": lambda v: v["optimizer"]["tensors"].pop("weight.exp_avg"),
    "a tensor is a list": lambda v: v["model"].update(weight=[]),
    "the model is a list": lambda v: v.update(model=[]),
    "the files are a number": lambda v: v.update(files=1),
    "the optimizer is a text": lambda v: v.update(optimizer="AdamW"),
    "the optimizer is gone": lambda v: v.update(optimizer=None),
}


@pytest.mark.parametrize("case", MANIFEST)
def test_what_a_forged_manifest_may_not_say(step_dir, target, case):
    edit(step_dir, MANIFEST[case])
    refuse(step_dir, target)
    with pytest.raises(CheckpointError):
        checkpoint.verify(step_dir)


@pytest.mark.parametrize("doubled", (False, True), ids=("missing", "doubled"))
def test_rows_that_no_file_or_two_files_hold(step_dir, target, doubled):
    """Shard and manifest agree with each other, and only the count of rows tells: rank 1 has none of `bias`, or rank 0's too."""
    path = step_dir / MODEL.format(1)
    header = safetensors_file.read_header(path)
    tensors = safetensors.torch.load_file(path)
    sharding = json.loads(header.metadata["DCP_SHARDING_INFO"])
    if doubled:
        sharding["bias"] = {"saved_offsets": [2]}
    else:
        del tensors["bias"]
    path.unlink()
    written = safetensors_file.write(path, tensors, {**header.metadata, "DCP_SHARDING_INFO": json.dumps(sharding)})

    def change(value):
        value["files"][path.name] = {"bytes": written.bytes, "digest": written.digest}
        if doubled:
            value["model"]["bias"]["chunks"][1]["offsets"] = [2]
        else:
            value["model"]["bias"]["chunks"].pop()
    edit(step_dir, change)
    refuse(step_dir, target, "two pieces of bias overlap" if doubled else "bias has 3 of its 5 elements, a piece is missing")


def test_swapped_shards_with_matching_digests(step_dir, target):
    """The shard itself says which rank wrote it."""
    swap(step_dir, MODEL.format(0), MODEL.format(1))

    def change(value):
        table = value["files"]
        first, second = MODEL.format(0), MODEL.format(1)
        table[first], table[second] = table[second], table[first]
    edit(step_dir, change)
    refuse(step_dir, target, "model-00000-of-00002.safetensors says it is of rank 1 and not 0")
