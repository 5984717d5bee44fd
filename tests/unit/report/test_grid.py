"""The grid of a schedule."""

import pytest
from hypothesis import given

from partita.ir.schedule import COMPUTE_KINDS, Schedule, parse_actions
from partita.report.grid import lay_out, schedule_grid
from partita.schedules.makers import make_schedule
from partita.schedules.passes import add_communication, add_reduction
from tests.plans import make_plan
from tests.property.strategies import schedules


def bare(*lines, stages=2, microbatches=2):
    ranks = tuple(parse_actions(line) for line in lines)
    return Schedule(name="x", num_stages=stages, num_microbatches=microbatches, ranks=ranks)


def test_one_f_one_b():
    assert schedule_grid(add_communication(make_schedule("1f1b", 3, 4), [(0, 1, True), (1, 2, True)])) == (
        "step    0              5              10\n"
        "stage 0 F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3\n"
        "stage 1 ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3 ·\n"
        "stage 2 ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 ·  ·"
    )


def test_without_messages_stages_follow_each_other():
    plain = make_schedule("1f1b", 3, 4)
    told = add_communication(plain, [(0, 1, True), (1, 2, True)])
    assert schedule_grid(plain) == schedule_grid(told)


def test_a_skip_without_gradient_is_waited_for_on_the_way_there_only():
    schedule = add_communication(make_schedule("gpipe", 3, 1), [(0, 2, False), (1, 2, True)])
    assert schedule_grid(schedule) == (
        "step    0        3\n".replace("0        3", "0")
        + "stage 0 F0 B0 ·  ·\nstage 1 F0 ·  ·  B0\nstage 2 ·  F0 B0 ·"
    )


def test_split_backwards():
    grid = schedule_grid(bare("0F0 0I0 0W0", "1F0 1I0 1W0", microbatches=1))
    assert grid.splitlines()[1:] == ["stage 0 F0 ·  ·  I0 W0", "stage 1 ·  F0 I0 W0 ·"]


def test_a_position_with_several_stages_names_them():
    grid = schedule_grid(bare("0F0 2F0", "1F0", stages=3, microbatches=1))
    assert grid.splitlines()[1:] == ["stage 0 2 0F0 ·   2F0", "stage 1   ·   1F0 ·"]


def test_what_can_never_run_is_marked():
    grid = schedule_grid(bare("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"))
    assert grid.splitlines()[1:] == [
        "stage 0 F0  !0B0 !0F1 !0B1 waits forever",
        "stage 1 ·  !1F1 !1F0 !1B0 waits forever",
    ]


def test_wide_and_high_grids_are_cut_with_a_note():
    schedule = make_schedule("1f1b", 40, 100)
    lines = schedule_grid(schedule, width=80, height=10).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("… ")
    assert lines[-2].endswith(" of 278 steps shown")
    assert lines[-1] == "… 10 of 40 positions shown"
    assert len(lines) == 1 + 10 + 2


def test_a_plan_names_its_ranks():
    assert "stage 1 (rank 2-3) ·  F0 B0 F1 B1 ·" in schedule_grid(make_plan())


def test_colour_changes_nothing_but_colour():
    coloured = schedule_grid(make_plan(), colour=True)
    assert "\x1b[34mF0\x1b[0m" in coloured
    for code in ("\x1b[34m", "\x1b[32m", "\x1b[2m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert [line.rstrip() for line in coloured.splitlines()] == schedule_grid(make_plan()).splitlines()


@given(schedules())
def test_every_action_gets_one_step(schedule):
    grid = lay_out(schedule)
    assert not any(grid.stuck)
    for row, actions in zip(grid.rows, schedule.ranks, strict=True):
        assert len(row) == grid.num_steps
        assert [action for action in row if action] == [action for action in actions if action.kind in COMPUTE_KINDS]
    assert any(row[-1] for row in grid.rows)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 8), (8, 8)])
def test_the_length_is_the_closed_form(stages, microbatches):
    chain = [(stage, stage + 1, True) for stage in range(stages - 1)]
    for name in ("1f1b", "gpipe"):
        schedule = add_reduction(add_communication(make_schedule(name, stages, microbatches), chain))
        assert lay_out(schedule).num_steps == 2 * (microbatches + stages - 1)
