"""Servers that lie, answer by half or not all requests, and buckets with other objects in them: a miss at worst."""

from __future__ import annotations

import re
import threading
import time

import pytest

from mlxkv.cache.objects.names import parse
from mlxkv.cache.objects.probe import probe
from mlxkv.cache.objects.url import check_url
from mlxkv.errors import ConfigError
from tests.cache.objects.faulty import Answer, faulty_server
from tests.cache.objects.machines import sent
from tests.cache.objects.server import objects, put
from tests.cache.objects.test_sharing import prompts
from tests.cache.synthetic import MODELS, ask


def _half(answer: Answer) -> None:
    answer.claims, answer.body = len(answer.body), answer.body[: len(answer.body) // 2]


def _sizes(answer: Answer) -> None:
    answer.body = re.sub(rb"<Size>\d+</Size>", b"<Size>1</Size>", answer.body)


def _error(answer: Answer) -> None:
    answer.status, answer.body = 500, b"try later"


#: what is bent: of listings or downloads, how, and the reason that is said
BENT = {
    "half an object": (False, _half, "io_error"),
    "sizes of nothing": (True, _sizes, "evicted"),
}


@pytest.mark.parametrize("what", BENT)
def test_answers_that_are_bent_are_a_miss_and_cost_nothing_for_good(what, server, bucket, machine, monkeypatch):
    """``ask`` compares all bits. Once the server says what is true, what is there is used."""
    model, prompt = MODELS["mixed"], prompts()[0]
    a = machine(model, "a", bucket)
    ask(model, a, prompt)
    sent(a)
    lists, how, reason = BENT[what]
    there = objects(bucket)
    with faulty_server(server, monkeypatch) as faulty:
        b = machine(model, "b", bucket, seconds=10.0, rest=0.0)
        faulty.bend = lambda answer: how(answer) if answer.method == "GET" and answer.lists is lists else None
        found = ask(model, b, prompt, keep=False)
        assert (found.tokens, found.reason) == (0, reason)
        faulty.bend = lambda answer: None
        found = ask(model, b, prompt, keep=False)
        assert (found.tokens, found.source, found.reason) == (len(prompt) - 1, "object", None)
        assert objects(bucket) == there
        b.close()


def test_one_object_that_is_refused_does_not_hold_up_the_others(server, bucket, machine, monkeypatch):
    model, refused = MODELS["recurrent"], []

    def refuse(method: str, path: str) -> bool:
        if method == "PUT" and not refused:
            refused.append(path)
        return method == "PUT" and path in refused

    with faulty_server(server, monkeypatch) as faulty:
        faulty.refuse = refuse
        a = machine(model, "a", bucket)
        for prompt in prompts():
            ask(model, a, prompt)
        a.writer.write_tips()
        assert a.writer.flush(20) and a.shared is not None
        until = time.monotonic() + 30
        while a.shared.status().waiting > 1 and time.monotonic() < until:
            time.sleep(0.05)
        status = a.shared.status()
        assert status.waiting == 1 and status.uploaded_records == len(objects(bucket)) > 10
        assert status.upload_faults >= 1
        a.close()


def test_uploads_that_hang_leave_look_ups_their_turn(server, bucket, machine, monkeypatch):
    """A slow line up: more uploads wait than there are turns; a look-up is answered meanwhile."""
    model, prompt, over = MODELS["mixed"], prompts()[0], threading.Event()
    a = machine(model, "a", bucket)
    ask(model, a, prompt)
    sent(a)
    with faulty_server(server, monkeypatch) as faulty:
        b = machine(model, "b", bucket, seconds=10.0)
        faulty.refuse = lambda method, path: method == "PUT" and over.wait(60)
        assert b.shared is not None
        tier = b.shared.tier
        puts = [tier.loop.begin(tier.place.put(f"v1/x/{i}", b"x", 60.0)) for i in range(40)]
        found = ask(model, b, prompt, keep=False)
        over.set()
        assert (found.tokens, found.source, found.reason) == (len(prompt) - 1, "object", None)
        for each in puts:
            each.cancel()
        b.close()


def test_a_look_up_of_much_is_no_outage(machine, tmp_path, monkeypatch):
    """A store that answers each listing, but not as many as a long prompt needs in its time: cold, and not left
    alone."""
    model, url = MODELS["recurrent"], f"file://{tmp_path}/shared"
    prompt = [i % 50 for i in range(400)]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    b = machine(model, "b", url, seconds=0.5)
    assert b.shared is not None
    place = b.shared.tier.place
    names = place.names

    async def slowly(where, within):
        import asyncio

        await asyncio.sleep(0.2)
        return await names(where, within)

    monkeypatch.setattr(place, "names", slowly)
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.reason) == (0, "io_error")
    status = b.shared.status()
    assert status.answers and not b.shared.tier.outage.resting


def test_foreign_objects_are_not_seen(machine, tmp_path):
    """Names that are almost ours, folders within a place, cuts that cannot be: none of them hides what is there."""
    model, url, prompt = MODELS["mixed"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    for path in objects(url):
        place, _, name = path.rpartition("/")
        put(url, f"{place}/more/{name}", b"another size")
        put(url, f"{place}/README", b"?")
        entry, kind, cut = parse(name) or pytest.fail(name)
        if kind != "state":
            for other in (f"0{cut}", "99999", "8", "-1"):
                put(url, f"{place}/{entry}.{other}.{kind}", b"x")
        put(url, f"{place}/{'f' * 64}.state", b"x")
    b = machine(model, "b", url)
    found = ask(model, b, prompt, keep=False)
    assert (found.tokens, found.source, found.reason) == (len(prompt) - 1, "object", None) and not b.faults


def test_what_was_downloaded_is_counted_whatever_it_was(machine, tmp_path, monkeypatch):
    model, url, prompt = MODELS["mixed"], f"file://{tmp_path}/shared", prompts()[0]
    a = machine(model, "a", url)
    ask(model, a, prompt)
    sent(a)
    for path, data in objects(url).items():
        put(url, path, data[:-1] + b"?")
    b = machine(model, "b", url)
    assert b.shared is not None
    get, got = b.shared.tier.place.get, []

    async def noted(path, *more):
        got.append(await get(path, *more))
        return got[-1]

    monkeypatch.setattr(b.shared.tier.place, "get", noted)
    assert ask(model, b, prompt, keep=False).reason == "corrupt"
    status = b.shared.status()
    assert (status.downloaded_records, status.downloaded_bytes) == (len(got), sum(map(len, got))) != (0, 0)


@pytest.mark.parametrize("name", ["with space/x", "with%20space/y", "not/there/yet", "ünï", "50%", "a/../b"])
def test_folders_of_any_name(name, tmp_path):
    found = probe(f"file://{tmp_path}/{name}", None, 5.0)
    assert found.status == "ok", found.detail
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_schemes_case_does_not_matter(tmp_path):
    assert probe(f"FILE://{tmp_path}/new", None, 5.0).status == "ok"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:folder", "names no folder"),
        ("file://folder/x", "names no folder"),
        ("file:///a#b", "# in it"),
        ("file:///a?b", "? or #"),
        ("s3://user:word@bucket", "credentials"),
        ("http://host/bucket", "no kind"),
        ("/folder", "no kind"),
        ("s3:///prefix", "no bucket"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused(url, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_url(url)


def test_a_file_where_the_folder_should_be_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    found = probe(f"file://{tmp_path}/file", None, 5.0)
    assert found.status == "fail" and str(tmp_path) in found.detail


def test_a_probe_that_cannot_be_read_is_not_left_behind(server, bucket, monkeypatch):
    with faulty_server(server, monkeypatch) as faulty:
        faulty.bend = lambda answer: _error(answer) if answer.method == "GET" and not answer.lists else None
        assert probe(bucket, None, 10.0).status == "fail"
        faulty.bend = lambda answer: None
        assert objects(bucket) == {}
