"""What every engine needs, imported once by the fork server (see processes.py). It must never compute anything: a process that has
used torch's thread pool cannot be forked safely."""

import ipyparallel.engine.app  # noqa: F401
import ipyparallel.engine.kernel  # noqa: F401
import torch.distributed.tensor  # noqa: F401

import fsdp_ref.engine  # noqa: F401
