"""Damage in every place of a small folder. What takes too long to be done everywhere is sampled; the soak does all."""

from __future__ import annotations

import random

import pytest

from tests.cache.flips import Indexed
from tests.cache.machine import scratch
from tests.cache.sweeps import OWNERS, Sample


@pytest.fixture(scope="module")
def sample():
    with scratch() as folder:
        yield Sample(folder)


def test_every_truncation_is_refused(sample):
    assert sample.refused_truncations() == sum(len(sample.sound[path]) for path in sample.records) > 30_000


def test_flipped_bytes_are_refused(sample):
    assert sample.refused_flips(random.Random(5), 0.1) > 3000


def test_truncated_and_flipped_records_are_misses(sample):
    rng = random.Random(1)
    for path, at in rng.sample(sample.places, 40):
        sample.hurt(*sample.truncation(path, at))
    for path, at in rng.sample(sample.places, 40):
        sample.hurt(*sample.flip(path, at, rng.randrange(8)))


def test_every_pair_of_swapped_records_is_a_miss():
    """Of other spans, kinds and models: twins have records of the same sizes and shapes."""
    with scratch() as folder:
        sample = Sample(folder, OWNERS[:2], prompts=1)
        pairs = list(sample.swaps())
        assert len({path.name.split(".")[1] for path in sample.records}) == 3 and len(pairs) > 300
        for damage in pairs:
            sample.hurt(*damage)


@pytest.mark.parametrize(("page", "log", "count"), [(None, False, 600), (512, False, 800), (512, True, 600)])
def test_a_flipped_byte_of_the_index_or_its_wal(page, log, count):
    """Two thousand: in an index as it is made, in one of small pages, which has many, and in one with a WAL."""
    rng = random.Random(3)
    with scratch() as folder:
        indexed = Indexed(folder, page, log=log)
        full = indexed.flip(rng.sample(indexed.places, count), lambda at: rng.randrange(8), both=False)
    assert full > 0.9 * count  # nearly always all is found: the files are the truth


def test_tokens_in_the_index_that_flip_into_those_that_are_asked_for():
    """The likeliest way to a wrong hit: what lies in the index is, by one bit, just what the prompt says."""
    with scratch() as folder:
        indexed = Indexed(folder, 512, log=False)
        places = indexed.likenesses()
        assert len(places) > 100
        indexed.flip_likenesses(random.Random(4).sample(places, 100))
