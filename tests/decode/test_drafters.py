"""Drafters: what is proposed depends on the committed tokens alone, whatever was proposed or refused before."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.head import HeadCache
from mlxkv.decode.drafters import Asked, Round
from mlxkv.decode.drafters.model import DraftModel, check_tokenizers, open_draft_model
from mlxkv.decode.drafters.mtp import MTP
from mlxkv.decode.memory import Memory
from mlxkv.errors import ConfigError
from mlxkv.models import load
from mlxkv.models.mtp import WithHead
from tests import headed, tiny

VOCAB = 320


@dataclass
class Greedy:
    """A trial that takes the likeliest, and remembers what it was shown."""

    logits: list[mx.array] = field(default_factory=list)
    plain: bool = False
    #: how many drafts may come
    most: int = 100

    @property
    def open(self) -> bool:
        return len(self.logits) < self.most

    def draft(self, logits: mx.array) -> mx.array:
        self.logits.append(logits)
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def drafted(self, token: mx.array) -> mx.array:
        return token

    def given(self, tokens: list[int]) -> None:
        raise AssertionError("nothing was looked up")


class Words:
    """A sequence: its committed tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)


def asked(*sequences: Words | None, heads=None) -> Round:
    rows = {slot: Asked(s, Greedy()) for slot, s in enumerate(sequences) if s is not None}
    return Round(rows, len(sequences), heads)


def drafts(drafter, round: Round, k: int) -> list[list[int]]:
    assert drafter.ready(round.rows, 512)
    found = drafter.propose(round, k)
    assert found is not None and found.dtype == mx.int32
    return found.tolist()


# a smaller model


@pytest.fixture(scope="module")
def small():
    """Architecture -> a drafter on a tiny model of it."""
    made = {}

    def get(arch: str, **options) -> DraftModel:
        if arch not in made:
            made[arch] = tiny.build(arch)[0]
        return DraftModel(made[arch], VOCAB, **options)

    return get


# rows that are dropped; windows; recurrent states; compressed rows
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "falcon_h1", "deepseek_v4"])
def test_a_draft_model_drafts_as_if_it_had_read_the_committed_tokens_only(small, arch):
    rng = random.Random(arch)
    drafter = small(arch)
    words = Words(tiny.ids(30, seed=1))
    for _ in range(8):
        k = rng.randrange(1, 6)
        round = asked(words)
        mine = drafts(drafter, round, k)
        fresh = small(arch)
        assert mine == drafts(fresh, asked(Words(words.tokens)), k)
        match rng.choice(("all", "some", "void", "lost")):
            case "all":
                kept = k + 1
            case "some":
                kept = rng.randrange(1, k + 1)
            case "void":
                drafter.committed(round, {0: 0})
                continue
            case "lost":  # the cycle failed before anybody could tell
                continue
        words.tokens += [*mine[0][: kept - 1], rng.randrange(300)]
        drafter.committed(round, {0: kept})
        if rng.random() < 0.3:  # plain steps in between
            words.tokens += tiny.ids(rng.randrange(1, 40), seed=len(words.tokens))


def test_rows_of_a_group_are_drafted_for_beside_each_other(small):
    drafter = small("qwen3_5")
    a, b = Words(tiny.ids(20, seed=2)), Words(tiny.ids(33, seed=3))
    first, none, second = drafts(drafter, asked(a, None, b), 3)
    assert none == [0, 0, 0]
    assert [first, second] == [drafts(small("qwen3_5"), asked(w), 3)[0] for w in (a, b)]


def test_a_long_prompt_is_read_in_pieces_between_steps(small):
    drafter, words = small("llama"), Words(tiny.ids(100, seed=4))
    round = asked(words)
    assert [drafter.ready(round.rows, 40) for _ in range(3)] == [False, False, True]
    assert drafts(drafter, round, 2) == drafts(small("llama"), asked(words), 2)


def test_what_a_draft_model_holds_is_charged_and_freed_with_its_sequence(small):
    layout = small("llama").layout
    memory = Memory(1 << 30, 0, layout)
    drafter = small("llama", memory=memory)
    a, b = Words(tiny.ids(20)), Words(tiny.ids(20))
    drafts(drafter, asked(a, b), 2)
    assert memory.reserved >= 2 * drafter.bytes_for(20) > 0
    a.tokens += tiny.ids(2400)  # its caches grow, and are charged as they do
    before = memory.reserved
    assert not drafter.ready(asked(a).rows, 8)
    assert memory.reserved >= before + drafter.bytes_for(2400) - drafter.bytes_for(2304)
    for words in (a, b, a):
        drafter.forget(words)
    assert memory.reserved == 0
    memory.check_integrity([])


def test_without_room_or_context_nothing_is_drafted_and_nothing_fails(small):
    layout = small("llama").layout
    memory = Memory(10_000, 0, layout)
    memory.charge("caches", "somebody", 9_000)
    assert not small("llama", memory=memory).ready(asked(Words(tiny.ids(20))).rows, 512)
    short = small("llama", context_length=64)
    assert short.ready(asked(Words(tiny.ids(20))).rows, 512)
    assert not short.ready(asked(Words(tiny.ids(60))).rows, 512)


def test_a_draft_model_may_pad_its_logits_otherwise(small):
    narrow = DraftModel(small("llama").model, 300)
    wide = DraftModel(small("llama").model, 400)
    for drafter, size in ((narrow, 300), (wide, 400)):
        round = asked(Words(tiny.ids(20)))
        drafts(drafter, round, 2)
        assert [x.shape for x in round.rows[0].trial.logits] == [(1, size)] * 2  # type: ignore[attr-defined]


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path):
    target = load(tiny.make("llama", tmp_path / "target"))
    assert open_draft_model(tiny.make("qwen3_5", tmp_path / "draft"), target).name == "draft_model"
    vocabulary = dict(target.tokenizer.get_vocab())
    word, other = list(vocabulary)[:2]
    vocabulary[word], vocabulary[other] = vocabulary[other], vocabulary[word]

    def fake(**changes):
        tokenizer = SimpleNamespace(
            get_vocab=lambda: changes.get("vocabulary", target.tokenizer.get_vocab()),
            all_special_ids=changes.get("special", target.tokenizer.all_special_ids),
        )
        ends = changes.get("ends", target.eos_token_ids)
        return SimpleNamespace(tokenizer=tokenizer, eos_token_ids=ends, name="small")

    check_tokenizers(fake(), target)  # type: ignore[arg-type]
    for changes, message in (
        ({"vocabulary": vocabulary}, "2 of"),
        ({"special": [1]}, "special tokens"),
        ({"ends": {5}}, "ends of text"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_tokenizers(fake(**changes), target)  # type: ignore[arg-type]


# a prediction head


@pytest.fixture(scope="module")
def with_head(tmp_path_factory) -> WithHead:
    loaded = load(headed.make(tmp_path_factory.mktemp("headed") / "model"))
    assert loaded.head is not None
    return WithHead(loaded.model, loaded.head)


def test_a_head_drafts_what_its_equations_say(with_head):
    """Each draft against a head without a cache, run over all pairs there are."""
    tokens, k = tiny.ids(20, seed=5), 4
    caches = [*make_prompt_cache(with_head.model), HeadCache(with_head.runner())]
    with_head(mx.array([tokens[:-1]]), cache=caches)
    head = caches[-1]
    hidden = head.hidden[0]
    found = drafts(MTP(with_head.logits), asked(Words(tokens), heads=head), k)
    ids = tokens[1:]
    for i in range(k):
        m = with_head.runner()(mx.array([ids]), hidden, None)
        draft = mx.argmax(with_head.logits(m)[0, -1]).item()
        assert found[0][i] == draft
        ids, hidden = [*ids, draft], mx.concatenate([hidden, m[:, -1:]], axis=1)
    assert head.kv.offset == len(tokens) - 1  # of committed tokens only


def test_a_head_drafts_nothing_before_the_first_hidden_state(with_head):
    head = HeadCache(with_head.runner())
    round = asked(Words([5]), heads=head)
    assert MTP(with_head.logits).propose(round, 3) is None
    assert MTP(with_head.logits).propose(asked(Words([5])), 3) is None
    assert round.rows[0].trial.logits == []  # type: ignore[attr-defined]


def test_drafts_end_where_no_other_may_follow(with_head, small):
    tokens = tiny.ids(20, seed=6)
    caches = [*make_prompt_cache(with_head.model), HeadCache(with_head.runner())]
    with_head(mx.array([tokens[:-1]]), cache=caches)
    for drafter, heads in ((MTP(with_head.logits), caches[-1]), (small("llama"), None)):
        words = Words(tokens)
        free = drafts(drafter, asked(words, heads=heads), 4)[0]
        bound = asked(words, heads=heads)
        bound.rows[0].trial.most = 2  # type: ignore[attr-defined]
        found = drafts(drafter, bound, 4)[0]
        assert found[:2] == free[:2] and found[2:] in ([], [0, 0])
        drafter.committed(bound, {0: 2})
        words.tokens += [found[0], 7]


def test_a_trial_that_fails_leaves_the_head_in_step(with_head):
    tokens = tiny.ids(20, seed=6)
    caches = [*make_prompt_cache(with_head.model), HeadCache(with_head.runner())]
    with_head(mx.array([tokens[:-1]]), cache=caches)
    head, drafter = caches[-1], MTP(with_head.logits)
    round = asked(Words(tokens), heads=head)
    calls = iter(range(5))

    def fail(logits):
        if next(calls) == 2:
            raise RuntimeError("no way on")
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    round.rows[0].trial.draft = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        drafter.propose(round, 4)
    assert head.kv.offset == head.seen == len(tokens) - 1
    whole = [*make_prompt_cache(with_head.model), HeadCache(with_head.runner())]
    with_head(mx.array([tokens[:-1]]), cache=whole)
    other = asked(Words(tokens), heads=whole[-1])
    assert drafts(drafter, asked(Words(tokens), heads=head), 3) == drafts(drafter, other, 3)
