"""Every test of this folder has a learner and a data folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_REF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FSDP_REF_LEARNER", "ada")
