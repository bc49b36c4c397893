from __future__ import annotations

import random

from tests.cache.objects.conversations import conversations


def test_random_conversations(machine, tmp_path):
    """More of them: ``scripts/soak --part objects``."""
    conversations(random.Random(0), machine, tmp_path)
