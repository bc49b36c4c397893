"""A process that fills a folder, for tests and soaks: ``python -m tests.cache.filler FOLDER SEED BUDGET HOW``.

Prints "ready", then after each group how many record bytes it has written. Where HOW is "hang", it stops for ever after
the first of a group's files has been renamed, and says so. Where it is "stop", it stops itself (SIGSTOP) after each
reservation.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from mlxkv.cache.ledger import Ledger
from tests.cache.drafts import BLOCK, chain, open_store, tokens


def main(folder: Path, seed: int, budget: int, how: str) -> None:
    store = open_store(folder, model=f"model {seed % 2}", budget=budget)
    rng = random.Random(seed)
    print("ready", flush=True)
    if how == "hang":
        replace = os.replace

        def hang(*args):
            replace(*args)
            print("renamed", flush=True)
            time.sleep(3600)

        os.replace = hang
    elif how == "stop":
        reserve = Ledger.reserve

        def stop(*args):
            reserved = reserve(*args)
            os.kill(os.getpid(), signal.SIGSTOP)
            return reserved

        Ledger.reserve = stop
    while True:
        blocks, weight = rng.choice((1, 1, 2, 5)), rng.choice((100, 1 << 16, 1 << 17))
        if how == "hang":
            blocks, weight = 2, 1 << 16
        elif how == "stop":  # up to what is reserved at once, an eighth of the budget
            weight = rng.choice((100, budget // 256, budget // 80))
        drafts = chain(store, tokens(rng.randrange(10**6), blocks * BLOCK), weight=weight)
        store.writer.submit(drafts)
        store.writer.flush()
        print(store.writer.counters.written_bytes, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
