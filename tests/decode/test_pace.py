"""What the engine learns about its own speed: from few chunks, in spite of a slow one, and anew when things change."""

from __future__ import annotations

import pytest

from mlxkv.decode.pace import Ladder, Pace
from mlxkv.decode.reading import Patience
from mlxkv.decode.scheduler import max_gap, next_chunk
from tests.decode.clockwork import Machine

LADDER = Ladder.up_to(2048)
GPU = Machine(a=0.012, b=0.0004, c=4e-9, step=0.014)


def chosen(pace: Pace, position: int = 0, gap: float = 0.25) -> int:
    return next_chunk(LADDER, pace, gap, position, prefilling=1, groups=[(4, 256)])


def shown(*chunks: tuple[int, int], machine: Machine = GPU) -> Pace:
    pace = Pace()
    for tokens, position in chunks:
        pace.chunk_took(tokens, position, machine.reading(tokens, position))
    return pace


def test_the_ladder_is_fixed():
    assert LADDER.rungs == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    assert Ladder.up_to(500).rungs == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 500)
    assert Ladder.up_to(12).rungs == (12,) and Ladder.up_to(16).rungs == (16,) and Ladder.up_to(1).rungs == (1,)


def test_the_gap_follows_the_device_where_nobody_sets_it():
    assert (max_gap(None, "cpu"), max_gap(None, "gpu"), max_gap(80, "cpu")) == (0.5, 0.25, 0.08)


def test_three_numbers_are_learned_from_chunks():
    pace = shown(*((n, p) for p in (0, 3000, 12000) for n in (16, 128, 1024)))
    for tokens, position in ((64, 0), (512, 6000), (2048, 20000)):
        assert pace.chunk(tokens, position) == pytest.approx(GPU.reading(tokens, position), rel=0.1)


def test_attention_is_foreseen_from_chunks_of_one_length():
    pace = shown(*((2048, p) for p in range(0, 32768, 2048)))
    assert pace.chunk(2048, 40960) == pytest.approx(GPU.reading(2048, 40960), rel=0.1)


def test_nothing_is_known_at_first_and_the_smallest_chunk_is_tried():
    pace = Pace()
    assert pace.chunk(16, 0) is None and pace.step(4, 256) == 0.0
    assert chosen(pace) == 16


def test_a_burst_shares_the_gap():
    """Six first chunks before one step: the next one has its share of what those before it left."""
    pace = shown(*((n, p) for p in (0, 3000, 12000) for n in (16, 128, 1024)))
    pace.step_took(4, 256, GPU.step)
    for count in range(1, 7):
        spent, rungs = 0.0, []
        for i in range(count):
            rungs.append(
                next_chunk(LADDER, pace, 0.25, 0, prefilling=count, groups=[(4, 256)], among=count - i, spent=spent)
            )
            spent += GPU.reading(rungs[-1])
        assert spent + GPU.step <= 0.25 and min(rungs) >= 16
        assert spent >= 0.5 * (0.85 * 0.25 - GPU.step) and max(rungs) <= 3 * min(rungs)
    # however late it is, the smallest is read
    assert next_chunk(LADDER, pace, 0.25, 0, prefilling=1, groups=[(4, 256)], among=3, spent=9.0) == 16


def test_chunks_grow_to_what_fits_within_a_few():
    pace, position, rungs = Pace(), 0, []
    for _ in range(5):
        rungs.append(rung := chosen(pace, position))
        pace.chunk_took(rung, position, GPU.reading(rung, position))
        pace.step_took(4, 256, GPU.step)
        position += rung
    assert rungs == sorted(rungs) and all(b <= 4 * a for a, b in zip(rungs, rungs[1:], strict=False))
    assert rungs[-1] == 384  # 0.166 s and a step; the next rung, 512, would be past 0.85 × 0.25


def test_one_slow_chunk_is_forgotten():
    pace = shown(*((384, p) for p in range(0, 4000, 384)))
    pace.step_took(4, 256, GPU.step)
    assert chosen(pace, 4000) == 384
    pace.chunk_took(384, 4000, 20 * GPU.reading(384, 4000))
    assert 128 <= chosen(pace, 4384) < 384  # careful, not frightened
    pace.chunk_took(128, 4384, GPU.reading(128, 4384))
    assert chosen(pace, 4512) == 384


def test_the_first_chunk_of_all_may_be_slow():
    """Kernels are built then. What it says is overruled by the chunks after it."""
    pace, position, rungs = Pace(), 0, []
    for i in range(8):
        rungs.append(rung := chosen(pace, position))
        pace.chunk_took(rung, position, GPU.reading(rung, position) + (1.0 if i == 0 else 0.0))
        pace.step_took(4, 256, GPU.step)
        position += rung
    assert rungs[:2] == [16, 16] and rungs[-1] == 384


@pytest.mark.parametrize("slower", [2, 4, 10])
def test_a_belief_that_is_too_good_holds_for_two_chunks(slower):
    pace = shown(*((384, p) for p in range(0, 8000, 384)))
    pace.step_took(4, 256, GPU.step)
    position, late = 8000, []
    for _ in range(12):
        rung = chosen(pace, position)
        seconds = slower * GPU.reading(rung, position)
        late.append(seconds + GPU.step > 1.25 * 0.25 and rung > 16)
        pace.chunk_took(rung, position, seconds)
        position += rung
    assert sum(late) <= 2 and not any(late[2:])


def test_a_belief_that_is_too_bad_does_not_last():
    pace = shown(*((32, p) for p in range(0, 640, 32)), machine=Machine(a=0.12, b=0.004, c=4e-8, step=0.1))
    pace.step_took(4, 256, GPU.step)
    position, rungs = 640, []
    for _ in range(6):
        rungs.append(rung := chosen(pace, position))
        pace.chunk_took(rung, position, GPU.reading(rung, position))
        position += rung
    assert rungs[-1] == 384


def test_a_step_says_what_is_not_known_of_short_chunks():
    """After large chunks alone nobody could tell weights from tokens; a step reads the weights too."""
    machine = Machine(a=0.2, b=0.0004, c=0, step=0.2)
    pace = shown((2048, 0), (2048, 2048), machine=machine)
    for _ in range(3):
        pace.step_took(1, 256, machine.step)
    assert pace.chunk(128, 4096) == pytest.approx(machine.reading(128, 4096), rel=0.25)


def test_steps_are_known_by_their_shape():
    pace = Pace()
    for slots, columns, seconds in ((2, 256, 0.02), (4, 256, 0.03), (4, 8192, 0.09)):
        for noise in (1.0, 9.0, 1.0):
            pace.step_took(slots, columns, seconds * noise)
    assert pace.step(4, 300) == 0.03 and pace.step(4, 6000) == 0.09 and pace.step(2, 256) == 0.02
    assert pace.step(8, 300) == pytest.approx(0.18) and pace.step(3, 256) == pytest.approx(0.03)  # in proportion
    assert pace.step(1, 256) == 0.02  # no faster than what is known


def test_alone_a_prompt_is_read_in_the_largest_chunks():
    slow = shown((16, 0), machine=Machine(a=1, b=1, c=0, step=1))
    assert next_chunk(LADDER, slow, 0.25, 0, prefilling=1, groups=[]) == 2048
    assert next_chunk(LADDER, Pace(), 0.25, 0, prefilling=1, groups=[]) == 2048


def test_beside_other_prompts_a_turn_is_short_too():
    pace = shown(*((2048, p) for p in range(0, 8192, 2048)))
    assert next_chunk(LADDER, pace, 0.25, 8192, prefilling=2, groups=[]) == 384
    assert next_chunk(LADDER, pace, 10.0, 8192, prefilling=2, groups=[]) == 2048


def test_steps_that_take_the_whole_gap_leave_a_prompt_a_share():
    pace = shown(*((2048, p) for p in range(0, 8192, 2048)))
    pace.chunk_took(64, 0, GPU.reading(64))
    for _ in range(3):
        pace.step_took(4, 256, 0.5)
    rung = next_chunk(LADDER, pace, 0.25, 0, prefilling=1, groups=[(4, 256)] * 2)
    assert 0.1 < GPU.reading(rung) <= 0.2


def test_the_steps_of_a_turn_are_counted():
    pace = shown(*((384, p) for p in range(0, 4000, 384)), (16, 4000))
    for _ in range(3):
        pace.step_took(4, 256, 0.15)
    assert chosen(pace) == 96  # 0.05 s beside 0.15; the next rung, 128, would be past 0.85 × 0.25
    assert next_chunk(LADDER, pace, 0.5, 0, prefilling=1, groups=[(4, 256)] * 2) == 256  # 0.114 s beside 0.3


@pytest.mark.parametrize("cycle", [1.0, 2.5, 3.7, 40.0])
def test_cycles_between_chunks_take_no_more_than_plain_steps_would(cycle):
    """And no less, but for what is saved up."""
    patience, chunks = Patience(), 200
    made = sum(not patience.waits(1.0, cycle) for _ in range(chunks))
    assert chunks - cycle < made * cycle <= chunks
