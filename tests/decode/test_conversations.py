"""The main job on tiny models: ask, remember, restart, go on. Each ``ask`` is a new engine on the same folder."""

from __future__ import annotations

import shutil

import pytest

import mlxkv

LONG = "The keeper of the lamp wrote down every ship, its flag and the hour it passed. "
CHAT = [
    {"role": "system", "content": "You keep a log. " + LONG},
    {"role": "user", "content": "Which ship came first? " + LONG},
    {"role": "assistant", "content": "The Ruby came first, at six. " + LONG},
    {"role": "user", "content": "And after it?"},
]


@pytest.fixture(params=["qwen3_5", "falcon_h1", "gemma3_text", "llama"])
def ask(request, tiny_model, tmp_path):
    model = tiny_model(request.param)

    def ask(messages, *, cache=True, **options):
        with mlxkv.load(model, cache_dir=tmp_path / "cache", cache=cache, block_size=16) as engine:
            return mlxkv.generate(engine, messages, **{"max_tokens": 12, **options})

    ask.arch = request.param
    ask.folder = tmp_path / "cache"
    return ask


def test_the_same_question_again_reads_nothing_twice(ask):
    first, second = ask(CHAT), ask(CHAT)
    assert first.cache.source == "none" and first.cache.miss_reason == "empty" and first.cache.miss_position == 0
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
    assert second.cache.source == "ssd" and second.cache.miss_reason is None and second.cache.miss_position is None
    assert second.token_ids == first.token_ids == ask(CHAT, cache=False).token_ids


def test_another_last_question_resumes_at_the_last_message(ask):
    ask(CHAT)
    changed = ask([*CHAT[:-1], {"role": "user", "content": "Who wrote it down?"}])
    assert changed.cache.miss_reason == "different_tokens"
    assert changed.cache.miss_position == changed.usage.cached_tokens
    shared = ask([*CHAT[:-1], {"role": "user", "content": "No"}], max_tokens=1).usage.cached_tokens
    assert changed.usage.cached_tokens >= shared > changed.usage.prompt_tokens - 40
    assert (
        changed.token_ids == ask([*CHAT[:-1], {"role": "user", "content": "Who wrote it down?"}], cache=False).token_ids
    )


def test_an_early_edit_resumes_before_it_and_names_the_position(ask):
    whole = ask(CHAT)
    edited = [CHAT[0], {"role": "user", "content": "Which ship came last? " + LONG}, *CHAT[2:]]
    answer = ask(edited)
    assert answer.cache.miss_reason == "different_tokens"
    assert answer.cache.miss_position == answer.usage.cached_tokens
    system_only = ask([CHAT[0], {"role": "user", "content": "X"}], max_tokens=1)
    assert answer.usage.cached_tokens >= system_only.usage.cached_tokens > 0
    assert answer.usage.cached_tokens < whole.usage.prompt_tokens - 60
    assert answer.token_ids == ask(edited, cache=False).token_ids


def test_an_answer_sent_back_resumes_at_its_end(ask):
    answer = ask(CHAT)
    back = [*CHAT, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Thank you."}]
    following = ask(back)
    assert following.usage.cached_tokens >= answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    assert following.cache.source == "ssd"


def test_ids_of_an_answer_stand_for_its_text(ask):
    answer = ask(CHAT, temperature=1.0, seed=3)
    message = {"role": "assistant", "content": answer.text, "token_ids": answer.token_ids}
    shutil.rmtree(ask.folder)
    with_ids = ask([*CHAT, message, {"role": "user", "content": "Go on."}], max_tokens=1)
    again = ask([*CHAT, message, {"role": "user", "content": "Go on."}], max_tokens=1)
    assert again.usage.cached_tokens == with_ids.usage.prompt_tokens - 1


def test_rows_without_states_are_no_place_to_resume(ask):
    first = ask(CHAT)
    for record in (ask.folder / "records").rglob("*.state.safetensors"):
        record.unlink()
    second = ask(CHAT)
    assert second.token_ids == first.token_ids
    if ask.arch in ("qwen3_5", "falcon_h1"):
        assert (second.usage.cached_tokens, second.cache.miss_reason) == (0, "no_state")
    else:
        assert second.usage.cached_tokens == second.usage.prompt_tokens - 1


def test_an_answer_is_remembered_although_a_stop_string_was_asked_for(ask):
    first = ask(CHAT, stop="never said")
    said = [*CHAT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = ask(said)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens - 1
