"""The writer of legacy folders itself, against the published vectors and the numbers that were observed."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open

from tests.cache.synthetic import MODELS

from .omlx_writer import Style, block_hash, blocks, save
from .stories import hashed

VECTORS = (
    "5f7ab17bc912c693acad1ca8d334a177c0e058be703f98a1e0c1df0a37b3002c",
    "64d32a0aa8633ce6ecf30c40bbda96fda0c0060b875bbe8e57445dfd49049ba4",
    "42a4af1927a740e43b39d7097aa4d3bcd4b417d5739bfed1ab15f944aa7054a0",
)
TOKENS = list(range(14))


@pytest.fixture(scope="module")
def told():
    return hashed(MODELS["list"], TOKENS, (4, 8, 12, 14))


def test_hashes_are_those_of_the_published_vectors():
    parent, found = None, []
    for i in range(3):
        parent = block_hash("test-model", parent, TOKENS[4 * i : 4 * i + 4])
        found.append(parent.hex())
    assert tuple(found) == VECTORS
    first = bytes.fromhex(VECTORS[0])
    others = (
        block_hash("test-model", None, TOKENS[:4], ("abc",)),
        block_hash("", None, TOKENS[:4]),
        block_hash("test-model", first, [4, 5], ("specprefill-static-exact-v1",)),
    )
    assert tuple(h.hex() for h in others) == (
        "1bc8d95460c657a6fb7a72c5e689fdc6310d597d9a66bc772db747807049b146",
        "e219974c82b8f6e9363966575d84da0500c94a0679de45b91c36009f2e125071",
        "5702f835fe558086bd78a11512bc4b2c8f136d48357b58f8d46d29dbf58fed77",
    )


@pytest.mark.parametrize(
    ("style", "rows"),
    [
        (Style(), [4, 8, 12]),
        (Style(live=14), [4, 8, 12]),
        (Style(snapshots=frozenset()), [1, 1, 12]),
        (Style(snapshots=frozenset(), live=14), [1, 1, 14]),
        (Style(composite="pm"), [4, 4, 4]),
        (Style(composite="pm", snapshots=frozenset({4})), [4]),
    ],
    ids=["L1", "L4", "L2", "L3", "pm", "pm cut short"],
)
def test_rows_a_block_are_those_observed(told, style, rows):
    found = []
    for block in blocks(told, style):
        composite = block.tensors.get("layer_1_sub_1_state_0", block.tensors.get("layer_1_state_0"))
        found.append(composite.shape[2] if composite.ndim == 4 else composite.shape[0])
    assert found == rows


def test_files_are_read_by_the_safetensors_library(told, tmp_path):
    for path, block in zip(save(tmp_path, told, Style()), blocks(told, Style()), strict=True):
        with safe_open(path, "numpy") as file:
            assert file.metadata() == block.metadata
            assert list(file.keys()) == sorted(block.tensors)
            for name, array in block.tensors.items():
                assert np.array_equal(file.get_tensor(name), array)
