"""The command `fsdp-ref checkpoint`: look into checkpoints, check them, take them elsewhere, compare them.

This module only reads arguments and prints; torch is imported when they have proved right. It must never change a checkpoint.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from .errors import CheckpointError, ConfigError
from .train_options import Parser

DTYPES = ("float16", "bfloat16", "float32", "float64")
SECTIONS = ("step", "world_size", "model", "optimizer", "scheduler", "loader", "extra", "random_state")       # as in checkpoint.compare
STEP = "a checkpoint's folder (step-...), or the folder that holds them: then its newest"


def parser() -> Parser:
    """The options of all actions."""
    p = Parser(prog="fsdp-ref checkpoint", description="Look into checkpoints (RUN/checkpoints/step-...), check, convert and compare them.",
               epilog="exit codes: 0 done (diff: nothing differs), 1 diff found differences, 2 a wrong argument, 4 a checkpoint is damaged "
                      "or missing")
    actions = p.add_subparsers(dest="action", required=True, metavar="show|verify|export|diff")

    def action(name: str, text: str, *places: str) -> Parser:
        added = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for place in places:
            added.add_argument(place.lower(), metavar=place, type=Path, help=STEP)
        return added

    show = action("show", "what is in it: step, world size, tensors by size, groups, schedule, loader position", "STEP_DIR")
    show.add_argument("--json", action="store_true", help="as JSON, for programs")
    action("verify", "read every byte and compare it with the manifest; tells each damaged file, and the tensor in it", "STEP_DIR")
    export = action("export", "write it in another format", "STEP_DIR")
    export.add_argument("out", metavar="OUT", type=Path, help="a new or empty folder")
    export.add_argument("--to", choices=("huggingface", "dcp"), default="huggingface",
                        help="huggingface (the model, for from_pretrained; the default) or dcp (torch.distributed.checkpoint, all of it)")
    export.add_argument("--max-shard-size", metavar="SIZE", help="huggingface: bytes of tensors in one file, like 500MB (default 5GB)")
    export.add_argument("--dtype", choices=DTYPES, help="huggingface: convert floating-point tensors to this type")
    diff = action("diff", "what differs between two: settings in words, tensors element by element", "FIRST", "SECOND")
    diff.add_argument("--ignore", metavar="SECTION", action="append", choices=SECTIONS, default=[],
                      help=f"do not look at this section (may be repeated): {', '.join(SECTIONS)}")
    diff.add_argument("--json", action="store_true", help="as JSON, for programs")
    return p


def main(argv: list[str]) -> int:
    """Run one action; returns the exit code."""
    args = parser().parse_args(argv)
    return {"show": show, "verify": verify, "export": export, "diff": diff}[args.action](args)


def show(args) -> int:
    """Print what is in a checkpoint."""
    from .checkpoint.describe import describe, facts
    path = resolve(args.step_dir)
    print(json.dumps({"path": str(path), **facts(path)}, indent=2) if args.json else describe(path))
    return 0


def verify(args) -> int:
    """Print every damage; 4 when there is one."""
    from .checkpoint.verify import damages
    path = resolve(args.step_dir)
    found = damages(path)
    for damage in found:
        print(f"fsdp-ref: {damage}", file=sys.stderr)
    if found:
        return CheckpointError.exit_code
    print(f"{path} is whole: every file has the size and the digest that its manifest states")
    return 0


def export(args) -> int:
    """Convert a checkpoint."""
    import torch

    from . import checkpoint
    path = resolve(args.step_dir)
    if args.to == "dcp":
        if args.max_shard_size or args.dtype:
            raise ConfigError("--max-shard-size and --dtype go with --to huggingface; leave them out")
        checkpoint.to_dcp(path, args.out)
    else:
        dtype = getattr(torch, args.dtype) if args.dtype else None
        with warnings.catch_warnings(record=True) as told:
            checkpoint.export_huggingface(path, args.out, max_shard_size=args.max_shard_size or "5GB", dtype=dtype)
        for warning in told:
            print(f"fsdp-ref: warning: {warning.message}", file=sys.stderr)
    print(f"{path} -> {args.out}")
    return 0


def diff(args) -> int:
    """Print what differs; 1 when something does."""
    from .checkpoint.compare import compare
    first, second = resolve(args.first), resolve(args.second)
    found = compare(first, second, tuple(args.ignore))
    if args.json:
        print(json.dumps([difference.to_json() for difference in found], indent=2))
    else:
        but = f" ({', '.join(args.ignore)} not looked at)" if args.ignore else ""
        print("\n".join(map(str, found)) or f"{first} and {second} hold the same{but}")
    return 1 if found else 0


def resolve(place: Path) -> Path:
    """The checkpoint at a place: itself, or the newest one in it.

    Raises:
        CheckpointError: there is none.
    """
    from .checkpoint import committed, layout
    if layout.step_of(place.name) is not None or (place / layout.MANIFEST).is_file():
        if not place.is_dir():
            raise CheckpointError(f"there is no checkpoint {place}; give a directory that save made")
        return place
    for root in (place, place / "checkpoints"):
        if found := committed(root):
            return found[-1]
    raise CheckpointError(f"there is no checkpoint in {place}; give a directory that save wrote to")
