"""Random state of one rank: Python, NumPy, torch on the CPU and on every CUDA device, as text.

Each rank has its own, so it is stored by rank and never merged. Taking it and putting it back draws no number. With another
world size there is no exact continuation: then every rank derives a new seed from a saved state and its own rank, always the same
one, and the report says so.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
import xxhash

from ..errors import CheckpointError
from . import files, votes
from .jsontext import parse
from .manifest import seal, unseal

LIMIT = 64 << 20         # bytes of a file of random states


def capture(step: int, rank: int, world_size: int | None = None) -> bytes:
    """This rank's random state, as the bytes of its file. `world_size`: of the checkpoint; by default the number of ranks there are."""
    version, words, cached = random.getstate()
    kind, keys, position, has_cached, cached_number = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return seal({
        "format": "fsdp_ref random state", "format_version": 2, "step": step, "rank": rank,
        "world_size": votes.world_size() if world_size is None else world_size,
        "python": {"version": version, "words": _hex(np.array(words, np.uint32)), "cached": cached},
        "numpy": {"kind": kind, "keys": _hex(keys), "position": int(position), "has_cached": int(has_cached),
                  "cached": float(cached_number)},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
    })


def read(path: Path, step: int, rank: int, world_size: int | None = None) -> dict:
    """The random state in a file, checked as far as it can be without setting it. `world_size`: of the checkpoint, where it is known.

    Raises:
        CheckpointError: the file is damaged or belongs to another step or rank.
    """
    data = files.read_small(path, LIMIT)
    try:
        state = unseal(parse(data, str(path)), data)
        found = [state["format"], state["step"], state["rank"], state["world_size"]]
        wanted = ["fsdp_ref random state", step, rank, state["world_size"] if world_size is None else world_size]
        if found != wanted or any(type(number) is not int for number in found[1:]):
            raise CheckpointError(f"it holds step {found[1]} of rank {found[2]} of {found[3]} and not step {step} of rank {rank} of "
                                  f"{wanted[3]}")
        _decode(state)
        return state
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); restore the checkpoint from a copy") from error


def restore(state: dict) -> bool:
    """Put a rank's state back. False when the number of CUDA devices differs, so that some of them could not be set."""
    python, numpy_state, cpu, cuda = _decode(state)
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(cpu)
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, device_state in enumerate(cuda[:present]):
        torch.cuda.set_rng_state(device_state, device)
    return len(cuda) <= present


def derive(state: dict, rank: int, world_size: int) -> int:
    """Seed everything from a saved state, this rank and the new world size; returns the seed. The same input gives the same seed."""
    seed = xxhash.xxh3_64_intdigest(f"{state['torch']} rank {rank} of {world_size}".encode()) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def _decode(state: dict) -> tuple[tuple, tuple, torch.Tensor, list[torch.Tensor]]:
    """What the four libraries' setters take; tried on generators of our own, so a bad state is found before any is set."""
    python, numpy_part = state["python"], state["numpy"]
    words = np.frombuffer(bytes.fromhex(python["words"]), "<u4")
    ours = (python["version"], tuple(int(word) for word in words), python["cached"])
    random.Random().setstate(ours)
    keys = np.frombuffer(bytes.fromhex(numpy_part["keys"]), "<u4").astype(np.uint32)
    theirs = (numpy_part["kind"], keys, numpy_part["position"], numpy_part["has_cached"], numpy_part["cached"])
    np.random.RandomState().set_state(theirs)
    cpu = _bytes(state["torch"])
    try:
        torch.Generator().set_state(cpu)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    return ours, theirs, cpu, [_bytes(text) for text in state["cuda"]]


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _hex(words: np.ndarray) -> str:
    return words.astype("<u4").tobytes().hex()
