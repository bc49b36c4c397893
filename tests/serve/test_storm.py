"""Clients that leave at random moments, over all routes, with a real engine behind a real server."""

from __future__ import annotations

import random

from tests.serve.storm import storm


def test_clients_that_leave(server):
    """Rows, queue and reservations are free soon, and who comes again finds what was read; scripts/soak has 200 at a
    time."""
    found = storm(server, "llama", random.Random(9), 60, retries=6)
    assert not found.wrong and found.free_s < 10
    assert found.hits >= 6
