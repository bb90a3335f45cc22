"""Checks have limits on time; several people's tests on one machine need them longer."""

import os

os.environ.setdefault("FSDP_REF_CHECK_PATIENCE", "3")
