"""Every damaged file is refused with its own reason; nothing wrong is served, nothing of its folder is touched."""

from __future__ import annotations

import pytest

from . import damaged_blocks, damaged_files
from .damage import ALL, Damage
from .harness import refused

assert damaged_blocks and damaged_files  # they fill ALL


@pytest.mark.parametrize("damage", ALL, ids=[d.name for d in ALL])
def test_refused(damage: Damage):
    refused(damage)
