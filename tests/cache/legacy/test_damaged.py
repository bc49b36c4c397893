"""Every damaged file is refused with its own reason; nothing wrong is served, nothing of its folder is touched."""

from __future__ import annotations

import pytest

from tests.cache.machine import scratch
from tests.cache.synthetic import ask, verify

from . import damaged_blocks, damaged_files
from .damage import ALL, CHAIN, LAYOUTS, TOKENS, Damage
from .harness import codes, fingerprint, taken_in

assert damaged_blocks and damaged_files  # they fill ALL


@pytest.mark.parametrize("damage", ALL, ids=[d.name for d in ALL])
def test_refused(damage: Damage):
    model = LAYOUTS[damage.layout]
    with scratch() as base, scratch() as cache:
        folder = base / "omlx"
        folder.mkdir()
        path = damage.write(folder)
        before = fingerprint(base)
        store = model.open(cache / "c")
        report = taken_in(model, folder, store)
        found = codes(report)
        for n in range(2, CHAIN + 2):
            ask(model, store, TOKENS[:n], keep=False)  # raises WrongHit
        verify(cache / "c", store)
        store.close()
        if path is None:
            assert set(damage.codes) & set(found.values()), found
        else:
            assert found.get(str(path.relative_to(folder))) in damage.codes, (found, report)
        assert not report.why and not report.unstored.files
        assert fingerprint(base) == before
