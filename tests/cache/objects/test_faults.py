"""A server that is stopped, silent, or returns wrong bytes: requests are served cold, on time, with a reason."""

from __future__ import annotations

import threading
import time

import pytest

import mlxkv
from mlxkv.cache.record import RecordError
from mlxkv.decode.request import Request, SamplingParams
from tests import tiny
from tests.cache.objects.machines import sent
from tests.cache.objects.server import between, objects, put
from tests.cache.objects.test_sharing import SECRET, prompts
from tests.cache.synthetic import MODELS, ask
from tests.probe import run, runtime

#: seconds: a request that waits for a server that never answers would take for ever
ON_TIME = 30.0


def flipped(data: bytes, at: float) -> bytes:
    i = min(int(len(data) * at), len(data) - 1)
    return data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]


DAMAGE = {
    "header": lambda d: flipped(d, 0.02),
    "data": lambda d: flipped(d, 0.97),
    "short": lambda d: d[: len(d) // 2],
    "longer": lambda d: d + b"x",
    "nonsense": lambda d: b"<html>try later</html>",
}


@pytest.mark.parametrize(("what", "secret"), [*((what, None) for what in DAMAGE), ("data", SECRET), ("short", SECRET)])
def test_wrong_bytes_are_a_miss_with_a_reason_and_are_replaced(machine, tmp_path, what, secret):
    """``ask`` compares every bit that is restored. Nobody deletes the object; the next upload of the record, by who
    found it damaged, replaces it."""
    model, url, prompt = MODELS["mixed"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url, secret)
    ask(model, a, prompt)
    sent(a)
    there = objects(url)
    for path, data in there.items():
        put(url, path, DAMAGE[what](data))
    b = machine(model, "b", url, secret)
    found = ask(model, b, prompt)
    assert (found.tokens, found.reason) == (0, "corrupt") and b.faults == {"corrupt": 1}
    assert objects(url).keys() == there.keys()
    sent(b)
    c = machine(model, "c", url, secret)
    found = ask(model, c, prompt, keep=False)
    assert (found.tokens, found.source, found.reason) == (len(prompt) - 1, "object", None)


@pytest.mark.parametrize("kind", ["rows", "window", "state"])
def test_one_damaged_record_costs_what_hangs_on_it(machine, tmp_path, kind):
    model, url, prompt = MODELS["mixed"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url)
    ask(model, a, prompt, ends=(8, 16, 24), messages=True)
    sent(a)
    last = [path for path in objects(url) if path.endswith(kind)]
    for path in last[:1]:
        put(url, path, b"other bytes")
    b = machine(model, "b", url)
    found = ask(model, b, prompt, keep=False)
    assert found.tokens == len(prompt) - 1 or found.reason == "corrupt"
    assert found.tokens == len(prompt) - 1 or b.faults == {"corrupt": 1}


def test_a_record_under_another_name_is_not_taken(machine, tmp_path):
    """Whole records, each where another belongs: of other tokens of this model, and of another model."""
    url, prompt, model = f"file://{tmp_path}/shared", prompts()[0], MODELS["recurrent"]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    there = objects(url)
    for end in ("rows", "state"):
        same = [path for path in there if path.endswith(end)]
        for path, other in zip(same, [*same[1:], same[0]], strict=True):
            put(url, path, there[other])
    b = machine(model, "b", url)
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.reason) == (0, "corrupt")


def test_a_stopped_server(server, bucket, machine, monkeypatch):
    """Cold, with a reason; nothing waits to be told again while it rests; what was not sent is sent once it is back."""
    model, prompt = MODELS["recurrent"], prompts()[0]
    with between(server, monkeypatch) as port:
        a = machine(model, "a", bucket, seconds=20.0, rest=0.05)
        port.close()
        started = time.monotonic()
        found = ask(model, a, prompt)
        assert (found.tokens, found.reason) == (0, "io_error") and time.monotonic() - started < ON_TIME
        assert a.shared is not None and not a.shared.status().answers and a.shared.status().why
        assert ask(model, a, prompt, keep=False).reason is None, "what is here is served"
    a.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["AWS_ENDPOINT_URL"])
    again = machine(model, "a", bucket)
    assert again.shared and again.shared.uploads and again.shared.uploads.wait_compared(20)
    found = ask(model, machine(model, "b", bucket), prompt, keep=False)
    assert (found.source, found.reason) == ("object", None)


def test_a_silent_server_is_waited_for_once(server, bucket, machine, monkeypatch):
    model, prompt = MODELS["mixed"], prompts()[0]
    a = machine(model, "a", bucket)
    ask(model, a, prompt)
    sent(a)
    with between(server, monkeypatch) as port:
        b = machine(model, "b", bucket, seconds=0.3, rest=60.0)
        port.mode = "silent"
        started = time.monotonic()
        found = ask(model, b, prompt, keep=False)
        assert (found.tokens, found.reason) == (0, "io_error") and time.monotonic() - started < ON_TIME
        assert b.shared is not None
        asked = b.shared.tier.verdicts.probed
        for other in prompts()[1:]:
            assert ask(model, b, other, keep=False).reason == "io_error"
        assert b.shared.tier.verdicts.probed == asked, "it is left alone"


def test_a_download_that_is_late_is_there_for_the_next_request(machine, tmp_path, monkeypatch):
    """Slow: the look-up answers, the downloads do not in time. The request goes on without them; they go on too."""
    model, url, prompt = MODELS["mixed"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    b = machine(model, "b", url, seconds=0.5)
    assert b.shared is not None
    place = b.shared.tier.place
    get, slow, begun = place.get, threading.Event(), []

    async def late(path, *more):
        import asyncio

        begun.append(path)
        while not slow.is_set():
            await asyncio.sleep(0.01)
        return await get(path, *more)

    monkeypatch.setattr(place, "get", late)
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.reason) == (0, "pending")
    slow.set()
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.source, found.reason) == (len(prompt) - 1, "object", None)
    assert len(begun) == len(set(begun)), "nothing was downloaded twice"


def test_objects_that_are_gone_after_the_look_up(machine, tmp_path, monkeypatch):
    """A rule of the bucket removed them a moment ago."""
    import obstore

    from mlxkv.cache.objects.place import open_store

    model, url, prompt = MODELS["recurrent"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    b = machine(model, "b", url)
    assert b.shared is not None
    load = b.shared.tier.load

    def gone(question, offer):
        obstore.delete(open_store(url), list(objects(url)))
        return load(question, offer)

    monkeypatch.setattr(b.shared.tier, "load", gone)
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.reason) == (0, "evicted")


def test_others_decode_while_one_waits(server, bucket, tiny_model, tmp_path, monkeypatch):
    """A look-up that nobody answers holds up nobody but its own request, and that one not for ever."""
    with between(server, monkeypatch) as port:
        port.mode = "silent"
        options = {"cache_dir": tmp_path / "c", "object_store": bucket, "object_timeout": 60.0, "block_size": 16}
        with mlxkv.load(tiny_model("qwen3_5"), **options) as engine:
            sampling = SamplingParams(max_tokens=8)
            waits = engine.submit(Request(tokens=tiny.ids(40, 1), sampling=sampling))
            other = engine.submit(Request(tokens=tiny.ids(40, 2), sampling=sampling, use_cache=False))
            assert len(other.result().token_ids) == 8
            assert engine.status().restoring == 1, "it still waits"
            port.close()
            found = waits.result()
            assert found.cache.miss_reason == "io_error" and len(found.token_ids) == 8
            status = engine.status().store
            assert status is not None and status.objects is not None and not status.objects.answers
            assert status.objects.faults == {"io_error": 1}


@pytest.mark.parametrize("architecture", ["qwen3_5", "deepseek_v4"])
def test_logits_are_those_of_a_cold_run(tiny_model, tmp_path, architecture):
    """A model's state, by the object store and back, and cold where its objects are damaged."""
    url, tokens, model = f"file://{tmp_path}/shared", tiny.ids(60, 3), tiny_model(architecture)
    rt = runtime(model, tmp_path / "a", object_store=url)
    cold, _ = run(rt, tokens, use_cache=False)
    for end in (13, 29, 31, 60):  # blocks that fill bit by bit
        run(rt, tokens[:end])
    assert rt.store is not None
    rt.store.close()
    rt = runtime(model, tmp_path / "b", object_store=url)
    warm, completion = run(rt, tokens, keep=False)
    assert rt.store is not None
    rt.store.close()
    assert completion.cache.source == "object" and completion.usage.cached_tokens == len(tokens) - 1
    assert (warm == cold).all()
    for path, data in objects(url).items():
        put(url, path, flipped(data, 0.9))
    rt = runtime(model, tmp_path / "c", object_store=url)
    again, completion = run(rt, tokens, keep=False)
    assert rt.store is not None
    rt.store.close()
    assert completion.usage.cached_tokens == 0 and completion.cache.miss_reason == "corrupt"
    assert (again == cold).all()


def test_a_sealed_payload_does_not_open_elsewhere(monkeypatch):
    from mlxkv.cache.objects import seal
    from mlxkv.cache.objects.seal import Secret

    monkeypatch.setattr(seal, "FRAME", 1024)
    secret, key = Secret(SECRET), b"k" * 32
    for size in (0, 1, 1024, 2048, 2053):
        plain = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        sealed = secret.seal(key, "rows", [plain])
        assert bytes(secret.open(key, "rows", memoryview(sealed))) == plain
        assert sealed != secret.seal(key, "rows", [plain]), "the same record twice says nothing"
    head, frame = len(sealed) - size - 3 * 16, 1024 + 16
    for wrong_key, kind, data in (
        (b"l" * 32, "rows", sealed),
        (key, "state", sealed),
        (key, "rows", sealed[: head + 2 * frame]),  # the last frame is missing
        (key, "rows", sealed[:head] + sealed[head + frame : head + 2 * frame] + sealed[head : head + frame]),
        (key, "rows", flipped(sealed, 0.5)),
        (key, "rows", sealed[:40]),
    ):
        with pytest.raises(RecordError):
            secret.open(wrong_key, kind, memoryview(data))
