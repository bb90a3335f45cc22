"""Checkpoints: sharded safetensors with a manifest, published by one rename, loadable on any number of ranks.

    save(root, step=120, model=model, optimizer=optimizer, scheduler=schedule, loader=loader)      # on every rank
    handle = async_save(root, step=120, ...)                 # the same, written while training goes on; handle.wait()
    report = load(root, model=model, optimizer=optimizer, scheduler=schedule, loader=loader)       # on every rank

Reading order: layout (names and boxes), files (what touches the disk), safetensors_file, jsontext, manifest, state (what a model
has), votes (all ranks or none), snapshot, commit, background, save, verify, reading, fit, load, random_state, retention. Nothing
here uses pickle, writes into a committed directory, or changes a model before everything has been checked.
"""

from ..errors import CheckpointError
from .background import AsyncSave
from .describe import describe
from .load import LoadReport, load
from .retention import committed, latest
from .save import async_save, save
from .verify import verify

__all__ = ["AsyncSave", "CheckpointError", "LoadReport", "async_save", "committed", "describe", "latest", "load", "save", "verify"]
