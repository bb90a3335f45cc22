"""Other people's readers read our files: the safetensors library and torch's distributed checkpoint."""

import json
import warnings

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from fsdp_ref import checkpoint
from fsdp_ref.checkpoint import safetensors_file

from . import support
from .support import adamw, sharded, train
from .test_round_trip import Zoo


def save_toy(rank, size, root):
    model = sharded()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    checkpoint.save(root, step=1, model=model, optimizer=optimizer)
    return support.model_bits(model), support.optimizer_bits(model, optimizer)


def dcp_into_shards(rank, size, step_dir):
    model = sharded(seed=1)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(step_dir)))
    return {name: support.bits(tensor) for name, tensor in state.items()}


def test_torch_reads_a_step_directory(ranks, tmp_path):
    """The whole tensors in one process, and into the shards of another world size."""
    expected, moments = ranks(3, save_toy, tmp_path)[0]
    expected.pop("head.weight")                                  # tied: stored once, as "embed"
    step_dir = tmp_path / "step-00000001"
    whole = {name: torch.zeros_like(tensor) for name, tensor in support.Toy().state_dict().items() if name in expected}
    whole["embed.exp_avg"] = torch.zeros(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(whole, storage_reader=HuggingFaceStorageReader(str(step_dir)), no_dist=True)
    assert support.bits(whole.pop("embed.exp_avg")) == moments["embed exp_avg"]
    assert {name: support.bits(tensor) for name, tensor in whole.items()} == expected
    assert ranks(2, dcp_into_shards, step_dir) == [expected] * 2


def test_safetensors_opens_every_shard(ranks, tmp_path):
    expected, _ = ranks(2, save_toy, tmp_path)[0]
    rows = []
    for rank in range(2):
        path = tmp_path / "step-00000001" / f"model-{rank:05d}-of-00002.safetensors"
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            assert (metadata["format"], metadata["step"], metadata["rank"], metadata["world_size"]) == ("pt", "1", str(rank), "2")
            assert json.loads(metadata["global_shapes"])["embed"] == [5, 6]
            assert json.loads(metadata["DCP_SHARDING_INFO"])["embed"] == {"saved_offsets": [3 * rank, 0]}
            rows.append(file.get_tensor("embed"))
    assert support.bits(torch.cat(rows)) == expected["embed"]


def test_the_layout_of_a_file_is_the_reference_writers(tmp_path):
    """Same order, same offsets, same bytes of data; only the metadata differs."""
    tensors = {name: tensor for name, tensor in Zoo(0).named_buffers() if not name.startswith("F8_E8M0")}
    safetensors_file.write(tmp_path / "ours", tensors, {"b": "2", "a": "1"})
    theirs = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"a": "1", "b": "2"})
    ours = (tmp_path / "ours").read_bytes()
    split = lambda data: (json.loads(data[8:8 + int.from_bytes(data[:8], "little")]), data[8 + int.from_bytes(data[:8], "little"):])  # noqa: E731
    (our_header, our_data), (their_header, their_data) = split(ours), split(theirs)
    assert our_header == their_header and our_data == their_data
    assert int.from_bytes(ours[:8], "little") % 8 == 0
    loaded = safetensors.torch.load_file(tmp_path / "ours")
    assert {name: support.bits(tensor) for name, tensor in loaded.items()} == {name: support.bits(t) for name, t in tensors.items()}
