"""``mlxkv chat`` on a pipe: turns, commands, sessions that are kept and go on."""

from __future__ import annotations

import json
import stat

import pytest

from mlxkv.cli import session as sessions


@pytest.fixture
def chat(cli, model):
    def call(stdin, *more):
        return cli("chat", "--model", model, "--max-tokens", 6, *more, stdin=stdin)

    return call


def test_a_turn_a_line(chat):
    found = chat("hello\nand again\n")
    assert found.code == 0
    assert found.err.count("tok/s") == 2
    assert len(found.out.splitlines()) >= 2


def test_a_folder_that_is_refused_leaves_ram_and_says_so(chat, cli, model, home):
    (home / "file").write_text("no folder")
    found = chat("hello\nand again\n", "--json", "--cache-dir", home / "file")
    one, two = found.lines
    assert "nothing is kept on disk, only in RAM" in found.err and str(home / "file") in found.err
    assert (one["cache"]["miss_reason"], two["cache"]["source"]) == ("empty", "ram")
    assert two["usage"]["cached_tokens"] >= one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"] - 1
    asked = cli("run", "hello", "--model", model, "--max-tokens", 1, "--cache-dir", home / "file")
    assert asked.code == 0 and "nothing is kept on disk, only in RAM" in asked.err


def test_json_prints_one_object_a_turn(chat):
    one, two = chat("hello\n\nand again\n", "--json").lines
    assert (one["turn"], two["turn"]) == (1, 2) and one["session"] == two["session"]
    assert two["usage"]["prompt_tokens"] > one["usage"]["prompt_tokens"]
    # the second turn goes on from the state of the first answer's end
    assert two["usage"]["cached_tokens"] >= one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"] - 1


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_resume_goes_on_from_the_ssd(cli, tiny_model, arch):
    args = ("chat", "--model", tiny_model(arch), "--max-tokens", 6, "--json")
    last = cli(*args, stdin="hello\nand again\n").lines[-1]
    first = cli(*args, "--resume", stdin="go on\n").lines[0]
    assert first["session"] == last["session"] and first["turn"] == 3
    assert first["cache"]["source"] == "ssd"
    assert first["usage"]["cached_tokens"] >= last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"] - 1


def test_resume_by_id_or_its_beginning(chat, cli):
    one = chat("first\n", "--json").lines[0]["session"]
    two = chat("second\n", "--json").lines[0]["session"]
    assert one != two
    assert chat("more\n", "--json", "--resume").lines[0]["session"] == two
    assert chat("more\n", "--json", "--resume", one).lines[0]["turn"] == 2
    assert chat("more\n", "--json", "--resume", one[:-1]).lines[0]["turn"] == 3
    lost = chat("", "--resume", "zzz")
    assert lost.code == 2 and "zzz" in lost.err and "--list" in lost.err
    assert chat("", one).code == 2
    listed = cli("chat", "--list", "--json").json
    assert [(s["id"], s["turns"], s["title"]) for s in listed] == [(one, 3, "first"), (two, 2, "second")]
    assert one in cli("chat", "--list").out


def test_sessions_are_private_whole_and_not_cache(chat, home):
    turn = chat("hello\n", "--json").lines[0]
    (file,) = (home / "data" / "mlxkv" / "sessions").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    saved = json.loads(file.read_text())
    assert saved["messages"][-1] == {"role": "assistant", "content": turn["text"], "token_ids": turn["token_ids"]}


def test_commands(chat, home):
    out = home / "out" / "said.json"
    found = chat(
        f"hello\n/help\n/system Be kind.\n/system\n/save\n/save {out}\n/nope\n/reset\n/save\n/exit\nnever\n", "--json"
    )
    assert found.code == 4  # /nope
    assert len(found.lines) == 1
    for part in (
        "/resume" not in found.err,
        "Be kind." in found.err,
        "/nope" in found.err,
        "nothing to keep" in found.err,
    ):
        assert part
    said = json.loads(out.read_text())
    assert [m["role"] for m in said] == ["system", "user", "assistant"]
    assert "token_ids" not in said[2] and stat.S_IMODE(out.stat().st_mode) == 0o600


def test_several_lines_and_a_slash_inside(chat):
    chat('"""\n/exit is\nhere\n"""\nbye\n')
    (path,) = sessions.paths()
    users = [m["content"] for m in sessions.load(path).messages if m["role"] == "user"]
    assert users == ["/exit is\nhere", "bye"]


def test_a_text_that_never_ends_is_still_sent(chat):
    assert chat('"""one\ntwo', "--json").lines[0]["turn"] == 1


def test_a_question_that_is_refused_does_not_stay(chat):
    found = chat(f"{'word ' * 5000}\nhello\n", "--json")
    assert found.code == 4 and "/reset" in found.err
    assert [turn["turn"] for turn in found.lines] == [1]
    (path,) = sessions.paths()
    assert [m["role"] for m in sessions.load(path).messages] == ["user", "assistant"]


def test_a_damaged_session_is_named_and_kept(chat, home):
    whole = chat("hello\n", "--json").lines[0]["session"]
    bad = sessions.folder() / "99999999-000000-ffff.json"
    bad.write_text('{"version": 1, "id": ')
    found = chat("more\n", "--json", "--resume")
    assert found.lines[0]["session"] == whole
    assert str(bad) in found.err and "damaged" in found.err
    (kept,) = (sessions.folder() / "damaged").iterdir()
    assert kept.read_text() == '{"version": 1, "id": '


def test_a_session_of_a_newer_version_stays(chat):
    path = sessions.folder() / "20990101-000000-ffff.json"
    sessions.write_private(path, json.dumps({"version": 99}).encode())
    found = chat("", "--resume", path.stem)
    assert found.code == 2 and "99" in found.err and path.exists()


def test_another_model_warns(chat, cli, tiny_model):
    chat("hello\n")
    found = cli("chat", "--resume", "--model", tiny_model("qwen3_5"), "--max-tokens", 4, "--json", stdin="more\n")
    assert found.code == 0 and "it goes on with" in found.err
    assert found.lines[0]["turn"] == 2


def test_another_system_prompt_warns(chat):
    chat("hello\n", "--system", "Be kind.")
    assert "system prompt changed" not in chat("more\n", "--resume", "--system", "Be kind.").err
    assert "system prompt changed" in chat("more\n", "--resume", "--system", "Be brief.").err
    (path,) = sessions.paths()
    assert sessions.load(path).messages[0] == {"role": "system", "content": "Be brief."}


def test_two_chats_on_one_session_do_not_overwrite_each_other(home):
    first = sessions.Session("m")
    assert first.save()
    other = sessions.load(first.path)
    other.messages.append({"role": "user", "content": "other"})
    assert other.save()
    first.messages.append({"role": "user", "content": "first"})
    assert not first.save()
    assert first.id != other.id and len(sessions.paths()) == 2


def test_an_answer_is_shown_although_its_session_cannot_be_saved(chat, home):
    (home / "data").write_text("a file where the folder should be")
    found = chat("hello\n", "--json")
    assert found.code == 2 and "cannot be saved" in found.err
    assert found.lines[0]["usage"]["completion_tokens"] == 6
    assert "tok/s" in chat("hello\n").err


def test_another_model_on_the_way(chat, tiny_model):
    other = tiny_model("qwen3_5")
    found = chat(f"hello\n/model {other}\n/model\nagain\n/model /nonexistent\nonce more\n/stats\n", "--json")
    assert found.code == 3 and "going back to the model before" in found.err and "/nonexistent" in found.err
    assert f"{other.name} on" in found.err and f"* {other.name}" in found.err
    one, two, three = found.lines
    assert [one["turn"], two["turn"], three["turn"]] == [1, 2, 3]
    # the second turn found nothing of the first model's; after the failure the state of the second model is there
    assert two["usage"]["cached_tokens"] == 0 and two["cache"]["source"] == "none"
    assert three["usage"]["cached_tokens"] >= two["usage"]["prompt_tokens"] + two["usage"]["completion_tokens"] - 1
    (path,) = sessions.paths()
    assert sessions.load(path).model == str(other)
    asked, cached = (sum(t["usage"][k] for t in found.lines) for k in ("prompt_tokens", "cached_tokens"))
    assert f"{asked:,} tokens, {cached:,} of them cached" in found.err
    assert "answers       18 tokens" in found.err and str(other) in found.err


def test_a_model_of_the_configuration(chat, cli, home, tiny_model):
    other = tiny_model("qwen3_5")
    (home / "config" / "mlxkv").mkdir(parents=True)
    (home / "config" / "mlxkv" / "config.toml").write_text(f'[models.other]\npath = "{other}"\ndraft = "off"\n')
    found = chat("/model\n/model other\nhello\n/stats\n", "--json", "--draft", "ngram")
    assert found.code == 0 and "  other\n" in found.err and f"model         {other.name} ({other})" in found.err
    assert "drafts        off" in found.err
    assert cli("chat", "-m", "other", "--json", "-n", 2, stdin="hello\n").code == 0
    assert {sessions.load(path).model for path in sessions.paths()} == {str(other)}
    assert cli("run", "hello", "-m", "other", "--json", "-n", 2).code == 0


def test_load(chat, home):
    first = chat("hello\n/save\n", "--json").lines[0]
    out = home / "said.json"
    found = chat(f"new\n/load\n/load {first['session']}\nmore\n/save {out}\n/load {out}\nelse\n/load zzz\n", "--json")
    assert found.code == 2 and "No session begins with 'zzz'" in found.err
    assert f"{first['session']}  " in found.err and "1 turn loaded." in found.err
    assert [(line["session"] == first["session"], line["turn"]) for line in found.lines] == [
        (False, 1),
        (True, 2),
        (False, 3),  # a file's messages begin a session of their own
    ]
    bad = home / "bad.json"
    bad.write_text('[{"role": "robot"}]')
    refused = chat(f"/load {bad}\nhello\n", "--json")
    assert refused.code == 4 and "messages[0].role" in refused.err and refused.lines[0]["turn"] == 1
