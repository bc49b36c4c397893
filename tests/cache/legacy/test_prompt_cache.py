"""Prompt caches that mlx-lm has saved: proven against their prompt, imported, and resumed with the logits of a cold
run; with any other prompt refused, never guessed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from mlxkv.cache.layout import Layout, probe
from mlxkv.cache.legacy.header import HostileFile
from mlxkv.cache.legacy.journal import Journal
from mlxkv.cache.legacy.prompt_members import fit
from mlxkv.cache.legacy.prompt_proof import Prover
from mlxkv.cache.legacy.reasons import Refused
from tests import tiny
from tests.cache.legacy.prompt_files import LENGTH, Saved, imported, prefilled, refusal, with_model
from tests.cache.stores import recached, reopened
from tests.cache.test_equality import INEXACT
from tests.probe import TOLERANCE, equal, run, runtime

MORE = tiny.ids(9, seed=21)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Saved:
    """A window of 12 rows below a layer that keeps all."""
    folder = tmp_path_factory.mktemp("mixed")
    kinds = ["sliding_attention", "full_attention"]
    return Saved(tiny.make("llama", folder / "m", sliding_window=12, layer_types=kinds), folder)


def resumes(rt, tokens: list[int], cached: int, bound: float = 0.0) -> None:
    """Asked for ``tokens`` and more, the store gives ``cached`` of them, and the logits are those of a cold run."""
    asked = [*tokens, *MORE]
    logits, completion = run(rt, asked, keep=False)
    assert completion.usage.cached_tokens == cached
    cold, _ = run(rt, asked, use_cache=False)
    assert equal(logits, cold, max(bound, TOLERANCE))


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_what_mlx_lm_saves_resumes_with_the_logits_of_a_cold_run(saved, tmp_path, arch):
    s = saved(arch)
    path = s.save(tmp_path / "saved.safetensors")
    before = path.read_bytes()
    with s.store() as rt:
        report = imported(rt, path, s.tokens)
        assert (report.imported.files, report.refused) == (1, {})
        assert "are the prompt's" in report.proven[0][1]
        resumes(rt, s.tokens, LENGTH, INEXACT.get(arch, (0.0, ""))[0])
        again = imported(rt, path, s.tokens)
        assert (again.already.files, again.new_bytes) == (1, 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", (0, 18, LENGTH - 1))
@pytest.mark.parametrize("arch", ("llama", "qwen3_5", "gemma3_text"))
def test_one_other_token_is_another_prompt(saved, tmp_path, arch, place):
    s = saved(arch)
    path = s.save(tmp_path / "saved.safetensors")
    wrong = list(s.tokens)
    wrong[place] = wrong[place] % 300 + 1
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, wrong))
        assert code == "PROMPT" and detail.startswith(f"token {place} ")
        assert run(rt, [*s.tokens, *MORE], keep=False)[1].usage.cached_tokens == 0
        # and the right one is still taken
        assert imported(rt, path, s.tokens).imported.files == 1


@pytest.mark.parametrize("change", (lambda t: t[:-1], lambda t: [*t, 7], lambda t: t[1:]))
def test_a_prompt_of_another_length_is_another_prompt(saved, tmp_path, change):
    s = saved("qwen3_5")
    path = s.save(tmp_path / "saved.safetensors")
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, change(s.tokens)))
        assert code == "PROMPT" and f"{LENGTH} tokens" in detail


def test_without_a_prompt_nothing_is_imported(saved, tmp_path):
    s = saved("llama")
    path = s.save(tmp_path / "saved.safetensors")
    with s.store() as rt:
        assert refusal(imported(rt, path, None))[0] == "NO_TOKENS"
        assert refusal(imported(rt, path, [*s.tokens[:-1], 10**6]))[0] == "PROMPT"


def test_a_dry_run_proves_and_stores_nothing(saved, tmp_path):
    s = saved("lfm2")
    path = s.save(tmp_path / "saved.safetensors")
    with s.store() as rt:
        report = imported(rt, path, s.tokens, dry_run=True)
        assert report.imported.files == 1 and report.new_bytes > 0
        assert run(rt, [*s.tokens, *MORE], keep=False)[1].usage.cached_tokens == 0
        wrong = [s.tokens[0] + 1, *s.tokens[1:]]
        assert refusal(imported(rt, path, wrong, dry_run=True))[0] == "PROMPT"


def test_a_model_without_rows_has_to_be_trusted(saved, tmp_path):
    s = saved("mamba2")
    path = s.save(tmp_path / "saved.safetensors")
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, s.tokens))
        assert code == "NO_PROOF" and "--trust-prompt" in detail
        trusted = imported(rt, path, s.tokens, dry_run=True, trust_prompt=True)
        assert trusted.proven[0][1].endswith("trusted, not proven")
        assert refusal(imported(rt, path, s.tokens))[0] == "NO_PROOF"  # a dry run keeps no trust
        assert imported(rt, path, s.tokens, trust_prompt=True).imported.files == 1
        resumes(rt, s.tokens, LENGTH, 2e-6)
        # what was trusted once is in the journal: for this file and this prompt, no other
        assert imported(rt, path, s.tokens).already.files == 1
        assert refusal(imported(rt, path, [*s.tokens[:-1], 5]))[0] == "NO_PROOF"


def test_a_trusted_file_is_still_checked(saved, tmp_path):
    s = saved("mamba2")
    caches = make_prompt_cache(s.plain)
    for c, held in zip(caches, s.caches, strict=True):
        c.cache = [held.cache[0], held.cache[1] * float("nan")]
    with s.store() as rt:
        bad = s.save(tmp_path / "nan.safetensors", caches)
        assert refusal(imported(rt, bad, s.tokens, trust_prompt=True))[0] == "NOT_FINITE"
        short = s.save(tmp_path / "short.safetensors", s.caches[:1])
        assert refusal(imported(rt, short, s.tokens, trust_prompt=True))[0] == "LAYOUT"
    llama = saved("llama")
    path = llama.save(tmp_path / "saved.safetensors")
    with llama.store() as rt:  # where there is proof, trust is not asked for
        assert refusal(imported(rt, path, llama.tokens[:-1], trust_prompt=True))[0] == "PROMPT"
        assert refusal(imported(rt, path, [5, *llama.tokens[1:]], trust_prompt=True))[0] == "PROMPT"


def test_several_readings_of_a_prompt_are_not_guessed_between(saved, tmp_path):
    from mlxkv.cache.legacy.prompt_text import Candidate

    s = saved("mamba2")
    path = s.save(tmp_path / "saved.safetensors")
    two = (Candidate("one", tuple(s.tokens)), Candidate("other", tuple(s.tokens[1:])))
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, None, readings=two, trust_prompt=True))
        assert code == "NO_PROOF" and "--prompt-tokens" in detail
    s = saved("qwen3_5")
    path = s.save(tmp_path / "proven.safetensors")
    wrong = Candidate("wrong", (*s.tokens[:-1], 5))
    two = (Candidate("shorter", tuple(s.tokens[1:])), wrong, Candidate("right", tuple(s.tokens)))
    with s.store() as rt:
        assert imported(rt, path, None, readings=two).proven[0][1].startswith("right: ")


@pytest.mark.parametrize(
    ("overrides", "code"),
    (
        ({"num_hidden_layers": 3}, "LAYOUT"),
        ({"head_dim": 16}, "SHAPE"),
        ({"seed": 1}, "PROMPT"),
        ({"dtype": "bfloat16"}, "DTYPE"),
    ),
)
def test_the_file_of_another_model(saved, tmp_path, overrides, code):
    s = saved("llama")
    if "dtype" in overrides:
        caches = prefilled(s.plain, s.tokens)
        for c in caches:
            c.keys, c.values = c.keys.astype(mx.bfloat16), c.values.astype(mx.bfloat16)
    else:
        model, _ = tiny.build("llama", **overrides)
        caches = prefilled(model, s.tokens)
    path = s.save(tmp_path / "other.safetensors", caches)
    with s.store() as rt:
        found, detail = refusal(imported(rt, path, s.tokens))
        assert found == code, detail
        if code == "PROMPT":
            assert detail.startswith("token 0 ") and "these weights" in detail


def test_other_weights_in_upper_layers_are_noticed(saved, tmp_path):
    """An adapter, say: the first layer is the same, and its rows with it."""
    s = saved("llama")
    model, _ = tiny.build("llama")
    model.layers[0].mlp.down_proj.weight = model.layers[0].mlp.down_proj.weight * 1.01
    path = s.save(tmp_path / "adapted.safetensors", prefilled(model, s.tokens))
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, s.tokens))
        assert code == "WEIGHTS" and detail.startswith("layer 1")


def test_rings_in_place_of_growing_rows_are_another_layout(saved, tmp_path):
    """As ``mlx_lm.cache_prompt --max-kv-size`` makes them."""
    s = saved("llama")
    rings = [RotatingKVCache(max_size=64, keep=4) for _ in range(2)]
    path = s.save(tmp_path / "rings.safetensors", prefilled(s.plain, s.tokens, rings))
    with s.store() as rt:
        code, detail = refusal(imported(rt, path, s.tokens))
        assert code == "LAYOUT" and "RotatingKVCache of 64 rows (the first 4 kept)" in detail


def test_a_layer_below_that_holds_something_else_is_noticed(saved, tmp_path):
    s = saved("qwen3_5")
    caches = prefilled(s.plain, s.tokens)
    caches[0].cache[1] = caches[0].cache[1] * 1.5  # below the first rows, so it is computed again
    path = s.save(tmp_path / "state.safetensors", caches)
    with s.store() as rt:
        assert refusal(imported(rt, path, s.tokens))[0] == "STATE"


def test_other_numerics_are_refused_where_bits_are_promised(saved, tmp_path):
    s = saved("llama")
    caches = prefilled(s.plain, s.tokens)
    caches[0].keys = caches[0].keys * (1 + 2**-22)
    path = s.save(tmp_path / "rounded.safetensors", caches)
    with s.store() as rt:
        assert refusal(imported(rt, path, s.tokens))[0] == "NUMERICS"
        with HostileFile.open(path, ordered=False) as file:  # in fast it is the same prompt
            assert Prover(rt.model, rt.make_cache, 10, exact=False).prove(fit(file, rt.layout), s.tokens)


@pytest.mark.parametrize("arch", ("qwen3_5", "falcon_h1", "llama"))
def test_only_the_layers_below_run_and_in_chunks_of_any_length(saved, tmp_path, arch):
    s = saved(arch)
    path = s.save(tmp_path / "saved.safetensors")
    made = []

    def make_cache():
        made.append(s.rt.make_cache())
        return made[-1]

    with HostileFile.open(path, ordered=False) as file:
        contents = fit(file, s.rt.layout)
        lengths = []

        def model(ids, cache):
            lengths.append(ids.shape[1])
            return s.rt.model(ids, cache=cache)

        for chunk in (1, 7, 16, 64):
            made.clear(), lengths.clear()
            Prover(model, make_cache, chunk, exact=False).prove(contents, s.tokens)
            first = next(i for i, m in enumerate(contents.members) if m.spec.record == "rows")
            above = [c for i, c in enumerate(made[0]) if i > contents.members[first].spec.path[0]]
            assert above and all(c.empty() for c in above)
            assert max(lengths[: -(-LENGTH // chunk)]) <= chunk


def test_a_layer_that_keeps_no_rows_when_it_runs_proves_nothing(saved, tmp_path):
    s = saved("llama")
    path = s.save(tmp_path / "saved.safetensors")
    with s.store() as rt:
        idle = with_model(rt, lambda ids, cache: mx.zeros((1, ids.shape[1], tiny.VOCAB)))
        assert refusal(imported(idle, path, s.tokens))[0] == "NO_PROOF"


def test_quantised_rows(saved, tmp_path):
    s = saved("llama")

    def make_cache():
        return [QuantizedKVCache(group_size=32, bits=8) for _ in range(2)]

    path = s.save(tmp_path / "q.safetensors", prefilled(s.plain, s.tokens, make_cache()))
    rt = recached(s.rt, tmp_path / "c", make_cache)
    try:
        assert refusal(imported(rt, path, [5, *s.tokens[1:]]))[0] == "PROMPT"
        assert imported(rt, path, s.tokens).imported.files == 1
        resumes(rt, s.tokens, LENGTH, 2e-6)
    finally:
        rt.store.close()
    with s.store() as rt:
        assert refusal(imported(rt, path, s.tokens))[0] == "LAYOUT"
    plain = s.save(tmp_path / "plain.safetensors")
    rt = recached(s.rt, tmp_path / "d", make_cache)
    assert refusal(imported(rt, plain, s.tokens))[0] == "LAYOUT"
    rt.store.close()


@pytest.mark.parametrize("length", (5, 13, 37))
def test_rings_that_have_come_round(mixed, tmp_path, length):
    """One layer's rows grow, the other's lie in a ring of 12: prefilled, and then decoded into."""
    s = mixed
    tokens = s.tokens[:length]
    caches = prefilled(s.plain, tokens[:-3], step=4)
    for token in tokens[-3:]:
        s.plain(mx.array([[token]]), cache=caches)
    path = s.save(tmp_path / "ring.safetensors", caches)
    with s.store() as rt:
        assert imported(rt, path, tokens).imported.files == 1
        resumes(rt, tokens, length, 2e-6)


@pytest.mark.parametrize("keep", (0, 3))
def test_the_rows_of_a_ring_are_told_by_their_position(saved, tmp_path, keep):
    """Rows that hold their own position, written in steps of several lengths, come out as what each is."""
    s = saved("llama")
    (spec,) = probe(s.rt.model, lambda: [RotatingKVCache(12, keep=keep), KVCache()]).members[:1]
    layout = Layout((spec,))
    for steps in ([1] * 40, [4] * 5 + [1] * 20, [30, *[1] * 10], [3, 9, 1, 14, 1, 1], [12, 1, 12, 1]):
        cache, length = RotatingKVCache(12, keep=keep), 0
        for step in steps:
            rows = mx.broadcast_to(mx.arange(length, length + step)[None, None, :, None], (1, 1, step, 32))
            cache.update_and_fetch(rows.astype(mx.float32), -rows.astype(mx.float32))
            length += step
            path = s.save(tmp_path / "ring.safetensors", [cache])
            with HostileFile.open(path, ordered=False) as file:
                strips = fit(file, layout).stand(length).strips
            assert [(x.start, x.end) for x in strips] == spec.needs(length), (steps, length)
            for strip in strips:
                for name, sign in (("0.keys", 1), ("0.values", -1)):
                    found = strip.arrays[name][1][0, 0, :, 0] * sign
                    assert found.tolist() == list(range(strip.start, strip.end)), (steps, length)


def test_a_window_that_has_come_round_alone_proves_nothing(saved, tmp_path):
    s = saved("llama")

    def make_cache():
        return [RotatingKVCache(12), RotatingKVCache(12)]

    path = s.save(tmp_path / "ring.safetensors", prefilled(s.plain, s.tokens, make_cache()))
    rt = recached(s.rt, tmp_path / "c", make_cache)
    try:
        assert refusal(imported(rt, path, s.tokens))[0] == "NO_PROOF"
        assert refusal(imported(rt, path, s.tokens[:-1], trust_prompt=True))[0] == "PROMPT"
        # the rows that it does hold are compared, trusted or not
        other = [*s.tokens[:-4], s.tokens[-4] + 1, *s.tokens[-3:]]
        code, detail = refusal(imported(rt, path, other, trust_prompt=True))
        assert code == "PROMPT" and detail.startswith(f"token {LENGTH - 4} ")
        assert imported(rt, path, s.tokens, trust_prompt=True).imported.files == 1
        resumes(rt, s.tokens, LENGTH, 2e-6)
    finally:
        rt.store.close()


def test_rows_without_the_windows_before_them_are_stood_on_at_their_end_only(saved, tmp_path):
    """A ring holds the last rows; a prompt that parts earlier begins anew, and is then stored with its windows."""
    s = saved("gemma3_text")
    path = s.save(tmp_path / "saved.safetensors")
    bound = INEXACT["gemma3_text"][0]
    with s.store() as rt:
        assert imported(rt, path, s.tokens).imported.files == 1
        parting = [*s.tokens[:20], *MORE]
        cold, _ = run(rt, parting, use_cache=False)
        logits, completion = run(rt, parting)
        assert completion.usage.cached_tokens == 0 and equal(logits, cold, max(bound, TOLERANCE))
        assert rt.store.writer.flush(10)
        logits, completion = run(rt, [*parting, 5], keep=False)
        assert completion.usage.cached_tokens >= 24
        assert equal(logits, run(rt, [*parting, 5], use_cache=False)[0], max(bound, TOLERANCE))
        resumes(rt, s.tokens, LENGTH, bound)


def test_a_folder_of_prompt_caches(saved, tmp_path):
    s = saved("llama")
    folder = tmp_path / "caches"
    folder.mkdir()
    s.save(folder / "right.safetensors")
    s.save(folder / "shorter.safetensors", prefilled(s.plain, s.tokens[:-1]))
    (folder / "link.safetensors").symlink_to(folder / "right.safetensors")
    (folder / "notes.txt").write_text("none of it")
    with s.store() as rt:
        report = imported(rt, folder, s.tokens)
        assert report.imported.files == 1
        assert {code: part.files for code, part in report.refused.items()} == {"PROMPT": 1, "NOT_A_FILE": 1}


def test_trust_that_was_given_is_for_one_file_and_prompt(saved, tmp_path):
    s = saved("mamba2")
    path = s.save(tmp_path / "a.safetensors")
    with s.store() as rt:
        assert imported(rt, path, s.tokens, trust_prompt=True).imported.files == 1
        other = s.save(path, prefilled(s.plain, [5, *s.tokens[1:]]))
        assert refusal(imported(rt, other, s.tokens))[0] == "NO_PROOF"
        journal = Journal(rt.store.folder.path, None)
        assert not journal.trusted(path, path.name, b"", b"")
        journal.close()


def test_a_headed_model_says_so(saved, tmp_path):
    from tests.headed import make  # a model whose MTP head keeps rows of its own

    s = saved("qwen3_5")
    path = s.save(tmp_path / "saved.safetensors")
    headed = runtime(make(tmp_path / "m"), tmp_path / "c")
    with HostileFile.open(path, ordered=False) as file, pytest.raises(Refused) as caught:
        fit(file, headed.layout)
    assert caught.value.code == "HEAD" and caught.value.path == path
    headed.store.close()


def test_a_store_that_keeps_rows_quantised_takes_them_quantised(saved, tmp_path):
    s = saved("llama")
    path = s.save(tmp_path / "saved.safetensors")
    rt = reopened(s.rt, tmp_path / "c", store_bits=8)
    try:
        assert imported(rt, path, s.tokens).imported.files == 1
        asked = [*s.tokens, *MORE]
        logits, completion = run(rt, asked, keep=False)
        assert completion.usage.cached_tokens == LENGTH
        cold, _ = run(rt, asked, use_cache=False)
        assert 0 < abs(logits - cold).max() < 0.2 * abs(cold).max()
    finally:
        rt.store.close()
