"""Self-test: whether this machine, MLX and disk keep the promises that the store is built on. Under three seconds.

A Mac checks by itself what could not be run where mlxkv is developed (``mlxkv doctor --selftest``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import numerics

numerics.prepare()  # before mlx is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_map_with_path  # noqa: E402
from mlx_lm.models import qwen3_5  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402
from mlx_lm.models.gated_delta import gated_delta_update  # noqa: E402

from .cache.durable import sync_folder, sync_group  # noqa: E402
from .cache.host import Destination, private_copy  # noqa: E402
from .cache.keys import Identity  # noqa: E402
from .cache.layout import probe  # noqa: E402
from .cache.state import SequenceState  # noqa: E402
from .cache.store import PrefixStore  # noqa: E402
from .models.gated_delta import chunked_gated_delta, log_decay  # noqa: E402


@dataclass(frozen=True)
class Check:
    """One result; ``cure`` says what to do if it is not ok."""

    name: str
    ok: bool
    detail: str
    cure: str = ""


def run(folder: Path | None = None) -> list[Check]:
    """All checks, in ``folder`` (a temporary sub-folder of it is used and removed) or the system's temporary folder."""
    checks: list[tuple[str, Callable[[Path], str], str]] = [
        ("fill arrays in place", _fill, "Report this with the output of mlxkv doctor; run with --no-cache."),
        ("private copies", _private, "Report this with the output of mlxkv doctor; run with --no-cache."),
        ("no second cache in a step", _donation, "Answers are right, but decoding long contexts is slow; report this."),
        ("recurrent kernel", _kernel, "Do not trust answers of hybrid models on this machine; report this."),
        ("capture, write, restore, compare", _round_trip, "Run with --no-cache and report this."),
        ("durable writes", _durable, "Choose a --cache-dir on a local disk."),
    ]
    results = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="selftest-", dir=folder) as name:
        where = Path(name)
        for title, check, cure in checks:
            started = time.monotonic()
            try:
                detail, ok = check(where), True
            except Exception as e:
                detail, ok = f"{type(e).__name__}: {e}", False
            results.append(Check(title, ok, f"{detail} ({time.monotonic() - started:.2f} s)", "" if ok else cure))
    return results


def _require(ok: bool, otherwise: str) -> None:
    if not ok:
        raise RuntimeError(otherwise)


def _fill(_: Path) -> str:
    for dtype in ("F32", "F16", "BF16"):
        into = Destination((1, 2, 8, 4), dtype)
        for a, b in ((0, 3), (3, 8)):
            for view in into.row_views(a, b):
                view[:] = np.ones(len(view) // 2, "<u2").view(np.uint8).data
        array = into.release()
        mx.eval(array + 1)
        _require(
            bool((array.view(mx.uint16) == 1).all().item()), f"a {dtype} array does not hold what was read into it"
        )
    return "float32, float16, bfloat16"


def _private(_: Path) -> str:
    array = mx.zeros((1, 2, 8, 4))
    mx.eval(array)
    copy = private_copy(array)[1]
    array[..., 0:4, :] = mx.ones((1, 2, 4, 4))
    mx.eval(array)
    _require(not copy.any(), "a copy changed with its array")
    return "later assignments do not reach a copy"


def _donation(_: Path) -> str:
    cache, rows = KVCache(), 32768
    cache.step = rows
    one = mx.ones((1, 4, 1, 32))
    cache.update_and_fetch(mx.ones((1, 4, 4, 32)), mx.ones((1, 4, 4, 32)))
    state = SequenceState.new([cache])
    mx.eval(state.live())
    held = sum(a.nbytes for a in state.live())
    mx.clear_cache()
    before = mx.get_active_memory()  # all of this process, which may have other models open
    mx.reset_peak_memory()
    for _step in range(4):
        handle = state.hold()
        out = mx.sum(cache.update_and_fetch(one, one)[0])  # type: ignore[arg-type]
        del handle
        mx.async_eval(out, *state.live())
        out.item()
    extra = mx.get_peak_memory() - before
    _require(extra < held // 2, f"a step over {held >> 20} MB of state took {extra >> 20} MB more")
    return f"{held >> 20} MB of state, {max(0, extra) >> 20} MB more in a step"


def _kernel(_: Path) -> str:
    b, t, h, d = 1, 16, 2, 32
    keys = mx.random.split(mx.random.key(7), 6)
    q, k, v = (mx.random.normal((b, t, h, d), key=keys[i]) * d**-0.5 for i in range(3))
    a, beta = (mx.random.normal((b, t, h), key=keys[i]) for i in (3, 4))
    log, bias = mx.zeros((h,)), mx.zeros((h,))
    plain = gated_delta_update(q, k, v, a, beta, log, bias, use_kernel=False)
    if numerics.current().device == "gpu":
        fast = gated_delta_update(q, k, v, a, beta, log, bias)
    else:  # what a CPU uses instead of a kernel
        fast = chunked_gated_delta(q, k, v, log_decay(a, log, bias), mx.sigmoid(beta), chunk=4)
    worst = max(mx.abs(x - y).max().item() for x, y in zip(fast, plain, strict=True))  # type: ignore[type-var]
    _require(worst < 1e-4, f"fast and plain forms differ by {worst:.1e}")  # type: ignore[operator]
    return f"fast and plain forms agree to {worst:.0e}"


def _model() -> Any:
    config = {
        "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64,
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": config}))
    keys = iter(mx.random.split(mx.random.key(3), 200))

    def weight(_: str, old: mx.array) -> mx.array:
        return mx.random.normal(old.shape, key=next(keys)) * 0.1 if old.ndim > 1 else mx.ones(old.shape) * 0.5

    model.update(tree_map_with_path(weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _round_trip(where: Path) -> str:
    model, tokens = _model(), [(7 * i) % 64 for i in range(41)]
    layout = probe(model, model.make_cache)
    identity = Identity(b"selftest", (("numerics", numerics.current().mode),), layout.digest, "selftest")

    def step(state: SequenceState, upto: int) -> mx.array:
        logits = model(mx.array(tokens[state.position : upto])[None], cache=state.caches)
        state.advance(upto - state.position)
        mx.eval(logits, state.live())
        return logits[0, -1]

    def fresh() -> SequenceState:
        return SequenceState.new(model.make_cache())

    store = PrefixStore(where / "store", identity, layout, block=16, disk_floor=0)
    try:
        plan = store.lookup(tokens)
        state = fresh()
        recorder = store.recorder(state, tokens, plan, mx.synchronize)
        step(state, 40)
        recorder.boundary()
        recorder.commit(everything=True)
        expected = step(state, 41)
        _require(store.writer.flush(30), "nothing became durable within 30 s")
    finally:
        store.close()
    store = PrefixStore(where / "store", identity, layout, block=16, disk_floor=0)
    try:
        restored, lookup, _ = store.restore(store.lookup(tokens), tokens, fresh, 64)
    finally:
        store.close()
    _require(lookup.tokens == 40, f"{lookup.tokens} of 40 tokens were restored ({lookup.reason})")
    _require(bool((step(restored, 41) == expected).all().item()), "the restored state gives other logits")
    return "a hybrid's state comes back bit for bit"


def _durable(where: Path) -> str:
    paths = [where / f"durable-{i}" for i in range(3)]
    for path in paths:
        path.write_bytes(b"x" * 65536)
    sync_group(paths)
    sync_folder(where)
    return "files and their folder can be synchronised"
