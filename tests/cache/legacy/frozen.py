"""Asks copies of the frozen folders, in a process of its own: they were made in ``fast``.

``python -m tests.cache.legacy.frozen FOLDER`` prints one JSON object: for each frozen folder what today's code finds
in it, next to what a cold run computes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import mlx.core as mx  # isort: skip

from mlxkv.cache.legacy.own import survey, upgrade
from mlxkv.cache.verify import verify
from tests import tiny
from tests.cache.legacy import fixture_model
from tests.cache.stores import records
from tests.probe import run, runtime

FOLDERS = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FOLDERS.iterdir() if path.is_dir())


def expected(name: str) -> dict:
    """What the version that made a folder computed itself."""
    return json.loads((FOLDERS / name / "expected.json").read_text())


def ask(model: Path, cache: Path, options: dict) -> dict:
    tokens = fixture_model.tokens()
    files = [path.name for path in records(cache)]
    out = {"outdated": vars(survey(cache)), "files": len(files)}
    rt = runtime(model, cache, **options)
    logits, done = run(rt, tokens, keep=False, max_tokens=4)
    cold, plain = run(rt, tokens, use_cache=False, max_tokens=4)
    out |= {"logits": logits.tolist(), "cold": cold.tolist(), "sampled": done.token_ids, "plain": plain.token_ids}
    out |= {"cached": done.usage.cached_tokens, "source": done.cache.source, "reason": done.cache.miss_reason}
    out["answer"] = rt.store.answer_ids(tokens, done.text)
    rt.store.close()
    out["kept"] = [path.name for path in records(cache)] == files
    out["findings"] = [finding.to_json() for finding in verify(cache).findings]
    out["after"] = vars(survey(cache))
    return out


def main(folder: Path) -> dict:
    mx.set_default_device(mx.cpu)
    model = fixture_model.make(folder / "model")
    tiny.write_tokenizer(model)
    out = {}
    for name in NAMES:
        options = expected(name)["options"]
        lazy, eager = folder / name / "lazy", folder / name / "eager"
        for cache in (lazy, eager):
            shutil.copytree(FOLDERS / name / "cache", cache)
        out[name] = {"lazy": ask(model, lazy, options)}
        done = upgrade(eager)
        assert done is not None
        out[name]["upgraded"] = {"before": vars(done.before), "after": vars(done.after), "records": done.records}
        out[name]["eager"] = ask(model, eager, options)
    return out


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
