"""What every test may use: tiny models made once a session, and the mode the suite runs in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("MLXKV_NUMERICS", "exact")

from tests import tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """``tiny_model("qwen3_5")``: the folder of a tiny random-weight model of that architecture."""
    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            made[arch] = tiny.make(arch, tmp_path_factory.mktemp("models") / arch)
        return made[arch]

    return get
