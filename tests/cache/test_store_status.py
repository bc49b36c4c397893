"""The store's own account: bytes that were written, read by tier, and given up."""

from __future__ import annotations

from mlxkv.cache.status import StoreStatus
from tests.cache.stores import prompt, records, reopened
from tests.probe import run, runtime


def test_bytes_are_counted_by_what_became_of_them(tiny_model, tmp_path):
    tokens, folder = prompt(), tmp_path / "cache"
    rt = runtime(tiny_model("qwen3_5"), folder)
    assert rt.store is not None
    run(rt, tokens)
    rt.store.writer.flush()
    now = StoreStatus.of(rt.store)
    files = sum(f.stat().st_size for f in (folder / "records").rglob("*.safetensors"))
    assert now.written_bytes == files > 0 and now.written_records > 0
    assert (dict(now.read_bytes), now.evicted_bytes, now.stopped, dict(now.faults)) == (
        {"ram": 0, "ssd": 0},
        0,
        None,
        {},
    )
    rt.store.close()

    rt = reopened(rt, folder, ram_budget=1 << 20)
    assert rt.store is not None
    run(rt, tokens)
    first = StoreStatus.of(rt.store)
    assert 0 < first.read_bytes["ssd"] <= files and first.read_bytes["ram"] == 0
    assert first.ram_bytes > 0 and first.ram_budget == 1 << 20
    run(rt, tokens)
    again = StoreStatus.of(rt.store)
    assert again.read_bytes["ssd"] == first.read_bytes["ssd"] and again.read_bytes["ram"] > 0
    rt.store.close()

    for file in records(folder, "state"):
        file.write_bytes(file.read_bytes()[:-1])
    rt = reopened(rt, folder)
    assert rt.store is not None
    run(rt, tokens)
    now = StoreStatus.of(rt.store)
    assert now.faults["corrupt"] > 0
    rt.store.close()


def test_what_is_given_up_to_make_room_is_counted(tiny_model, tmp_path):
    rt = runtime(tiny_model("qwen3_5"), tmp_path / "cache")
    assert rt.store is not None
    run(rt, prompt())
    rt.store.close()
    size = rt.store.folder.size()
    rt = reopened(rt, tmp_path / "cache", budget=None)
    assert rt.store is not None
    least = rt.store._least
    rt.store.close()
    rt = reopened(rt, tmp_path / "cache", budget=max(size, least) + least // 4)
    assert rt.store is not None
    for seed in range(2, 40):
        run(rt, prompt(seed, 60))
        rt.store.writer.flush()
        if StoreStatus.of(rt.store).evicted_bytes:
            break
    now = StoreStatus.of(rt.store)
    assert now.evicted_bytes > 0 and now.evicted_records > 0
    rt.store.close()
