"""Random requests, loss, damage and restarts over every state kind: a miss is allowed, a wrong hit never."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from mlxkv.cache import opening
from mlxkv.cache.state import SequenceState
from tests.cache.machine import StoreMachine
from tests.cache.synthetic import MODELS, twin


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_sees_one_wrong_token(name):
    """Otherwise the tests below would prove nothing."""
    model, tokens = MODELS[name], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    state = SequenceState.new(model.make_cache())
    for n in (4, 3, 1, 3):
        model.feed(state, tokens, n)
    state.catch_up()
    mx.eval(state.live())
    state.settle()
    assert not model.wrong(state, tokens)
    assert model.wrong(state, tokens[:-1]) and model.wrong(state, [*tokens, 1]) and twin(model).wrong(state, tokens)
    for i in (8, 9, 10) if name == "head" else range(11):
        assert model.wrong(state, [*tokens[:i], 99, *tokens[i + 1 :]]), i


def test_never_a_wrong_hit():
    """The soak runs many more, from a seed of its own; these are the same in every run. Whoever finds a damaged index
    that another store has open waits less long here until it is alone."""
    with mock.patch.object(opening, "_WAIT", 0.1):
        run_state_machine_as_test(
            StoreMachine,
            settings=settings(
                max_examples=15,
                stateful_step_count=16,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
