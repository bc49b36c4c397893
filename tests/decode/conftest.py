"""What several files of these tests begin with."""

from __future__ import annotations

import pytest

from tests import headed
from tests.decode.many import Alone


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a prediction head."""
    return headed.make(tmp_path_factory.mktemp("headed") / "model")


@pytest.fixture(scope="module")
def alone(model):
    """What each request gets on an engine of its own, without drafts."""
    made = Alone(model, draft="off")
    yield made
    made.close()
