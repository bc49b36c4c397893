"""Sixteen at once, each with a code word of its own, while records are evicted and read from disk."""

from __future__ import annotations

import random

from tests.decode.words import BUDGET, measure


def test_no_answer_holds_anothers_word(tmp_path):
    report = measure(tmp_path, random.Random(7))
    assert not report.wrong, "\n".join(report.wrong)
    assert report.answers == 32
    assert report.written > BUDGET >= report.kept and report.lost > 0  # some was evicted
    assert report.from_disk > 0 and report.whole > 0
