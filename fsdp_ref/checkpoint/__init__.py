"""Checkpoints: sharded safetensors with a manifest, published by one rename, loadable on any number of ranks.

    save(root, step=120, model=model, optimizer=optimizer, scheduler=schedule, loader=loader)      # on every rank
    handle = async_save(root, step=120, ...)                 # the same, written while training goes on; handle.wait()
    report = load(root, model=model, optimizer=optimizer, scheduler=schedule, loader=loader)       # on every rank

Reading order: layout (names and boxes), files (what touches the disk), safetensors_file, jsontext, manifest, state (what a model
has), votes (all ranks or none), snapshot, commit, background, save, verify, diagnosis, reading, fit, load, random_state, retention. Then
the bridges: streaming and publish, huggingface_export, huggingface_index, huggingface_import, dcp_export, dcp_directory, dcp_import; and
what people look at: describe, compare. Nothing here writes into a committed directory or changes a
model before everything has been checked, and nothing but dcp_* knows of pickle, for that format is one.
"""

from ..errors import CheckpointError
from .background import AsyncSave
from .dcp_export import to_dcp
from .dcp_import import from_dcp
from .describe import describe
from .huggingface_export import export_huggingface
from .huggingface_import import import_huggingface
from .load import LoadReport, load
from .retention import committed, latest
from .save import async_save, save
from .verify import verify

__all__ = ["AsyncSave", "CheckpointError", "LoadReport", "async_save", "committed", "describe", "export_huggingface", "from_dcp",
           "import_huggingface", "latest", "load", "save", "to_dcp", "verify"]
