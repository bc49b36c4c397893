"""Which BLAS and mode a process computes with. Each case is a process of its own: the first import of MLX decides."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxkv import numerics

ROOT = Path(__file__).parents[2]
REPORT = """
import json, sys
from mlxkv import numerics
from mlxkv.errors import ConfigError
try:
    numerics.prepare()
    assert "mlx.core" not in sys.modules or TOO_LATE
    numerics.prepare()
    now = numerics.current()
    print(json.dumps([now.mode, now.device, now.blas, now.blas_hint, now.identity()]))
except ConfigError as error:
    print(json.dumps(["error", str(error), error.exit_code]))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the BLAS is chosen on Linux only")


def report(before: str = "TOO_LATE = False", **environment: str) -> list:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLXKV_") and k != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{REPORT}"],
        env=kept | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@linux
def test_fast_finds_openblas_or_says_how_to_get_it():
    mode, _, blas, hint, identity = report()
    assert mode == "fast"
    assert blas.startswith("openblas ") and not hint or blas == "reference" and "apt-get" in hint
    assert set(identity) == {"mode", "device"}


@linux
def test_exact_uses_the_reference_blas_and_names_it_in_the_key():
    mode, device, blas, hint, identity = report(MLXKV_NUMERICS="exact")
    assert (mode, blas, hint) == ("exact", "reference", "")
    if device == "cpu":
        assert identity["blas"] == "reference"
    assert identity["mlx"]


@linux
def test_no_blas_on_request():
    assert report(MLXKV_BLAS="none")[2:4] == ["reference", ""]


@linux
def test_mlx_imported_first_is_reported():
    _, _, blas, hint, _ = report("import mlx.core; TOO_LATE = True")
    assert "imported before" in blas and hint


@linux
@pytest.mark.parametrize("module", ["decode.engine", "decode.constraint", "serve.pipeline"])
def test_whatever_part_comes_first_chooses_the_blas_before_mlx_is_there(module):
    blas, hint = report(f"import mlxkv.{module}; TOO_LATE = True")[2:4]
    assert "imported before" not in blas
    assert "before mlx" not in hint


@linux
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"MLXKV_NUMERICS": "quick"}, ["MLXKV_NUMERICS", "quick", "fast", "exact"]),
        ({"MLXKV_BLAS": "mkl"}, ["MLXKV_BLAS", "mkl", "auto", "none"]),
        ({"MLXKV_BLAS": "/nowhere/libblas.so"}, ["/nowhere/libblas.so"]),
        ({"MLXKV_NUMERICS": "exact", "MLXKV_BLAS": "/nowhere/libblas.so"}, ["exact", "MLXKV_BLAS"]),
    ],
)
def test_what_cannot_work_is_a_configuration_error(environment, words):
    kind, message, code = report(**environment)
    assert (kind, code) == ("error", 2)
    assert all(word in message for word in words)


@linux
def test_a_library_that_is_no_blas(tmp_path):
    found = [p for p in Path("/lib").glob("*-linux-gnu*/libz.so.1")] + [Path("/lib64/libz.so.1")]
    if not found[0].exists():
        pytest.skip("no small library at hand")
    kind, message, _ = report(MLXKV_BLAS=str(found[0]))
    assert kind == "error" and "cblas_sgemm" in message


@linux
def test_preloaded_openblas_is_used_in_fast_and_refused_in_exact():
    paths = numerics._candidates()
    if not paths:
        pytest.skip("OpenBLAS is not installed")
    assert report(LD_PRELOAD=paths[0], MLXKV_BLAS="none")[2].startswith("openblas")
    kind, message, _ = report(LD_PRELOAD=paths[0], MLXKV_NUMERICS="exact")
    assert kind == "error" and "LD_PRELOAD" in message
