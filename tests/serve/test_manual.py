"""The manual is whole: every route, field, option, metric and value of the extension object is named in it, as code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from mlxkv.cli import app
from mlxkv.decode.request import CacheReport, DraftReport, Timings

ROOT = Path(__file__).parents[2]
#: marks of code: a block between fences, or a span between backticks
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def code(*files: str) -> str:
    """All that is set as code in these files."""
    return "\n".join(CODE.findall("\n".join((ROOT / file).read_text("utf-8") for file in files)))


@pytest.fixture(scope="module")
def manual() -> str:
    return code("docs/server.md")


@pytest.fixture
def document(http) -> dict:
    return http.get("/openapi.json").json()


def test_routes(document, manual):
    paths = {re.sub(r"\{[^}]*\}", "{id}", path) for path in document["paths"]}
    assert len(paths) > 15
    missing = {path for path in paths if not re.search(rf"{re.escape(path)}(?![\w/])", manual)}
    assert not missing


def test_fields_of_bodies(document, manual):
    named, missing = set(re.findall(r"\w+", manual)), {}
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if absent := body["properties"].keys() - named:
            missing[path] = sorted(absent)
    assert not missing


def test_metrics(http, manual):
    names = re.findall(r"^# HELP mlxkv:(\w+)", http.get("/metrics").text, re.MULTILINE)
    assert len(names) > 30
    missing = set(names) - set(re.findall(r"\w+", manual))
    assert not missing


def test_the_extension_object(manual):
    told = {field.name for kind in (CacheReport, Timings, DraftReport) for field in fields(kind)}
    missing = told - set(re.findall(r"\w+", manual))
    assert not missing


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_options(command):
    found = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    flags = {flag for option in found for flag in option.opts if flag.startswith("--")}
    assert len(flags) > 20
    told = set(re.findall(r"--[\w-]+", code("README.md", "docs/server.md")))
    missing = flags - told - {"--help", "--temperature"}  # the other name of --temp
    assert not missing


def test_files_of_the_map():
    """What docs/serving.md says is there, and what is there is in it."""
    told = (ROOT / "docs/serving.md").read_text("utf-8")
    names = set(re.findall(r"(\w+\.py)`", told))
    places = [ROOT / "mlxkv/serve", ROOT / "mlxkv/serve/pipeline"]
    there = {path.name for place in places for path in place.glob("*.py")} - {"__init__.py"}
    assert not there - names
    tests = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("mlxkv/*.py")]
    assert not names - there - {path.name for path in tests} - {"serve.py"}
