"""Damage in every place of a small folder. The soak does all of it at the level of requests; here that is sampled."""

from __future__ import annotations

import random

import pytest

from tests.cache.machine import scratch
from tests.cache.sweeps import Sample


@pytest.fixture(scope="module")
def sample():
    with scratch() as folder:
        yield Sample(folder)


def test_truncated_everywhere(sample):
    assert sample.truncated_everywhere() > 10_000


def test_flipped_everywhere(sample):
    assert sample.flipped_everywhere(step=5) > 1500


def test_truncated_records_are_misses(sample):
    sample.truncations(random.Random(1), 30)


def test_swapped_records_are_misses(sample):
    sample.swaps(random.Random(2), 40)


def test_a_flipped_byte_of_the_index_or_its_wal(sample):
    assert sample.index_flips(random.Random(3), 500) > 400  # nearly always all is found: the files are the truth
