"""The promise for every architecture: what is restored is what a run that remembered has, and what a cold one says."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import tiny
from tests.architectures import MORE_INEXACT
from tests.cache.equality import measure, wrong_with
from tests.cache.test_equality import INEXACT as SUITE_INEXACT

ARCHS = (*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS)
INEXACT = SUITE_INEXACT | MORE_INEXACT


@dataclass
class Equality:
    """``restored``: prompts that were asked for, by architecture; ``wrong`` must stay empty."""

    restored: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def equality(folder: Path, rng: random.Random, seconds: float) -> Equality:
    """Architectures in random order, for as long as the time goes; all of them if it is more than a few minutes."""
    result, until = Equality(), time.monotonic() + seconds
    for arch in rng.sample(ARCHS, len(ARCHS)):
        report: dict[str, Any] = measure(folder / arch, "exact", [arch])[arch]
        result.wrong += [f"{arch}: {what}" for what in wrong_with(report, INEXACT.get(arch, (0.0, ""))[0])]
        result.restored[arch] = len(report["restored"]) + len(report["first"]["ram"])
        result.worst[arch] = report["promise"] / report["scale"]
        if time.monotonic() > until:
            break
    return result
