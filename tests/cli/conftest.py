"""A private home for every test, and the command line run inside this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxkv.cli import app
from tests import tiny


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> Path:
    """A model that goes on until it is stopped."""
    return tiny.make("llama", tmp_path_factory.mktemp("endless") / "endless", max_position_embeddings=10**6)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("MLXKV_") and name not in ("MLXKV_NUMERICS", "MLXKV_BLAS"):
            monkeypatch.delenv(name)
    for name in ("CACHE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as exactly one JSON value."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Result]


@pytest.fixture
def cli() -> Cli:
    def call(*args: str | Path, stdin: str | None = None) -> Result:
        found = CliRunner().invoke(app, [str(a) for a in args], input=stdin, catch_exceptions=False)
        return Result(found.exit_code, found.stdout, found.stderr)

    return call
