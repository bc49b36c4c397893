"""What is pinned in RAM is counted as records come, are replaced, let go of and dropped: never by a look at all."""

from __future__ import annotations

import random

from mlxkv.cache.ram import Ram
from tests.cache import drafts


def test_pinned_is_what_the_pinned_records_weigh(tmp_path):
    store = drafts.open_store(tmp_path / "c", ram_budget=0)
    made = drafts.chain(store, drafts.tokens(1, 8 * drafts.BLOCK))
    store.close()
    for seed in range(40):
        rng = random.Random(seed)
        ram = Ram(sum(d.nbytes for d in made))
        for _ in range(60):
            draft = rng.choice(made)
            match rng.randrange(6):
                case 0 | 1:
                    ram.put(draft, pin=rng.random() < 0.6)
                case 2:
                    ram.unpin([draft.meta.key, rng.choice(made).meta.key])
                case 3:
                    ram.drop(draft.meta.key, rng.choice(sorted(draft.bodies)))
                case 4:
                    ram.lend(rng.randrange(ram.most))
                case 5:
                    ram.touch([draft.meta.key])
            assert ram.pinned == sum(size for (key, _), size in ram._recent.items() if ram._held[key].pins)
            assert ram.nbytes == sum(ram._recent.values())
            assert ram.nbytes <= ram.budget or ram.nbytes == ram.pinned
        for draft in made:
            for _ in range(60):
                ram.unpin([draft.meta.key])
        assert ram.pinned == 0
