"""``mlxkv doctor``: each line has a verdict, what fails has a cure, and the exit code says whether something fails."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests import headed, tiny


def checks(found):
    return {check["name"]: check for check in found.json["checks"]}


def test_a_healthy_set_up(cli, tiny_model, home):
    found = cli("doctor", "--model", tiny_model("qwen3_5"), "--json")
    assert found.code == 0 and found.json["ok"]
    seen = checks(found)
    assert {
        "config",
        "python",
        "mlx",
        "mlx-lm",
        "device",
        "blas",
        "memory",
        "open files",
        "cache",
        "disk",
    } <= seen.keys()
    assert "2 recurrent, 2 growing" in seen["state"]["detail"]
    assert "flag --model" in seen["config"]["detail"]
    assert not (home / "cache").exists()  # looking changes nothing


def test_for_people(cli, model):
    found = cli("doctor", "--model", model)
    assert found.code == 0
    assert all(line[:4].strip() in ("ok", "warn", "") for line in found.out.splitlines())


@pytest.mark.parametrize("damage", ["missing", "cut", "no config"])
def test_a_model_that_cannot_work_fails(cli, home, damage):
    folder = home / "model"
    if damage != "missing":
        tiny.make("llama", folder)
    if damage == "cut":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-7])
    if damage == "no config":
        (folder / "config.json").unlink()
    found = cli("doctor", "--model", folder, "--json")
    assert found.code == 1
    failed = [c for c in found.json["checks"] if c["status"] == "fail"]
    assert [c["name"] for c in failed] == ["model"]
    assert str(folder) in failed[0]["detail"]


def test_a_bad_configuration_does_not_hide_the_rest(cli, monkeypatch):
    monkeypatch.setenv("MLXKV_TOP_P", "7")
    found = cli("doctor", "--json")
    assert found.code == 1
    seen = checks(found)
    assert seen["config"]["status"] == "fail" and "MLXKV_TOP_P" in seen["config"]["detail"]
    assert seen["python"]["status"] == "ok"


def test_a_cache_folder_that_cannot_be(cli, home, model):
    (home / "file").write_text("")
    found = cli("doctor", "--model", model, "--cache-dir", home / "file", "--json")
    assert found.code == 1 and checks(found)["cache"]["status"] == "fail"
    (home / "open").mkdir(mode=0o755)
    found = cli("doctor", "--model", model, "--cache-dir", home / "open", "--json")
    assert found.code == 0 and "chmod 700" in checks(found)["cache"]["cure"]


def test_a_volume_without_locks(cli, home, model, monkeypatch):
    def flock(fd, what):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    found = cli("doctor", "--model", model, "--json")
    seen = checks(found)["cache"]
    assert found.code == 1 and seen["status"] == "fail"
    assert "locks do not work" in seen["detail"] and "only in RAM" in seen["cure"]
    assert not list(home.glob(".mlxkv-probe-*"))


def test_selftest(cli, model):
    found = cli("doctor", "--model", model, "--selftest", "--json")
    assert found.code == 0, found.out
    assert any(name.startswith("selftest ") for name in checks(found))


def test_what_is_set_is_told_but_no_secret(cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXKV_CACHE_SALT", "walrus")
    found = cli("doctor", "--model", model, "--store-bits", 8, "--json")
    assert "cache_salt=… (env MLXKV_CACHE_SALT)" in checks(found)["config"]["detail"] and "walrus" not in found.out
    assert checks(found)["store bits"]["status"] == "ok"
    recurrent = tiny.make("mamba2", tmp_path / "recurrent")
    found = checks(cli("doctor", "--model", recurrent, "--store-bits", 8, "--json"))["store bits"]
    assert found["status"] == "warn" and "changes nothing" in found["detail"]


def test_a_head_is_found(cli, model, tmp_path):
    from tests import headed

    def said(folder):
        found = checks(cli("doctor", "--model", folder, "--json"))["MTP head"]
        return found["status"], found["detail"]

    assert said(model) == ("ok", "none in this checkpoint")
    status, detail = said(headed.make(tmp_path / "headed"))
    assert status == "ok" and "Qwen3.5, 1 layer (15 tensors in model.safetensors)" in detail
    status, detail = said(headed.make(tmp_path / "mimo", "mimo"))
    assert status == "ok" and "MiMo" in detail and "1 draft in a row" in detail
    strange = tiny.make("llama", tmp_path / "strange")
    weights = dict(mx.load(str(strange / "model.safetensors"))) | {"mtp.fc.weight": mx.zeros((4, 4))}
    mx.save_safetensors(str(strange / "model.safetensors"), weights)
    status, detail = said(strange)
    assert status == "warn" and detail.startswith("found, not used: heads of llama are not supported: ")


@pytest.mark.parametrize(
    ("arch", "flags", "status", "said"),
    [
        ("qwen3_5", (), "ok", ("none: the checkpoint has no multi-token-prediction head", "--draft ngram")),
        ("qwen3_5", ("--draft", "ngram"), "ok", ("by look-up in the text, 1 to 8 at a time",)),
        ("llama", ("--draft", "ngram", "--draft-depth", 3), "ok", ("3 at a time",)),
        ("gemma3_text", ("--draft", "ngram", "--ring-spare", 2), "ok", ("1 to 2 at a time",)),
        ("gemma3_text", ("--draft", "ngram", "--ring-spare", 2, "--draft-depth", 3), "fail", ("3 drafts", "2 at most")),
        ("qwen3_5", ("--draft", "mtp"), "fail", ("cannot draft for itself",)),
        ("qwen3_5", ("--draft", "off"), "ok", ("none: it was switched off",)),
        ("mamba", (), "ok", ("none: ", "--draft ngram or --draft-model would, and run accepted", "recurrent: 0, 1")),
        ("llama", ("--draft-model", "small"), "ok", ("by small",)),
    ],
)
def test_what_would_draft(cli, tiny_model, arch, flags, status, said):
    found = cli("doctor", "--model", tiny_model(arch), *flags, "--json")
    check = checks(found)["drafts"]
    assert check["status"] == status and found.code == (status == "fail")
    assert all(part in check["detail"] for part in said), check["detail"]


def test_what_would_draft_with_a_head(cli, tmp_path):
    seen = checks(cli("doctor", "--model", headed.make(tmp_path / "model"), "--json"))
    assert seen["drafts"]["detail"].startswith("by its own head, 1 to ")


def test_layers_that_take_nothing_back_are_named(cli, tmp_path):
    """A recurrence without a journal: drafting is off, unless it is asked for."""
    folder = tiny.make("rwkv7", tmp_path / "model")
    found = cli("doctor", "--model", folder, "--json")
    detail = checks(found)["drafts"]["detail"]
    assert found.code == 0 and detail.startswith("none: ")
    assert "layers that take nothing back: recurrent: 0, 1" in detail
    found = cli("doctor", "--model", folder, "--draft", "ngram", "--json")
    check = checks(found)["drafts"]
    assert found.code == 0 and check["status"] == "ok"
    assert "accepted tokens are run again (layers that take nothing back: recurrent: 0, 1)" in check["detail"]


def test_more_drafts_than_a_head_makes_fail_here_as_in_an_engine(cli, tmp_path):
    from tests import headed

    folder = headed.make(tmp_path / "mimo", "mimo")
    check = checks(cli("doctor", "--model", folder, "--draft-depth", 2, "--json"))["drafts"]
    assert check["status"] == "fail" and "makes 1 in a row" in check["detail"] and "--draft-depth 1" in check["cure"]


def test_more_drafts_than_rings_of_compression_serve_fail_here_as_in_an_engine(cli, tmp_path):
    folder = tiny.make("deepseek_v4", tmp_path / "model")
    given = ("doctor", "--model", folder, "--draft", "ngram", "--ring-spare", 3, "--json")
    assert checks(cli(*given))["drafts"]["detail"].startswith("by look-up in the text, 1 to 3 at a time")
    check = checks(cli(*given, "--draft-depth", 6))["drafts"]
    assert check["status"] == "fail" and "12 rows that compression at ratio 4 keeps serves 5 at most" in check["detail"]
    assert "--ring-spare 6 or more, which makes a ring of 16 rows" in check["cure"]


def test_an_architecture_of_our_own(cli, home):
    folder = tiny.make("deepseek_v4", home / "model")
    found = cli("doctor", "--model", folder, "--json")
    assert found.code == 0 and "4 latents" in checks(found)["state"]["detail"]
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"sqrtsoftplus"', '"tanh"'))
    found = cli("doctor", "--model", folder, "--json")
    assert found.code == 1
    assert ["scoring_func is 'tanh'" in c["detail"] for c in found.json["checks"] if c["status"] == "fail"] == [True]
