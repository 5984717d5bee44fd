"""The schedule as a grid: one row per pipeline position, one column per step, every compute action one step long.

The grid shows order and waiting, not time: an action takes the first step after the one before it on its position and
after the actions it depends on.  What cannot run, because it waits for itself, is marked with ``!``.
"""

from __future__ import annotations

from partita.ir.frozen import dataclass
from partita.ir.plan import Plan
from partita.ir.schedule import COMPUTE_KINDS, Action, Schedule
from partita.report.text import paint, ranges

IDLE = "·"
"""What an idle step shows."""
KIND_COLOURS = {"F": "blue", "B": "green", "I": "green", "W": "cyan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A schedule by steps.

    Attributes:
        rows: For each position the action of each step, None where it is idle; all of the same length.
        stuck: For each position the actions that can never run, in order.
    """

    rows: tuple[tuple[Action | None, ...], ...]
    stuck: tuple[tuple[Action, ...], ...]

    @property
    def num_steps(self) -> int:
        """Steps until the last action is done."""
        return len(self.rows[0]) if self.rows else 0


def lay_out(schedule: Schedule) -> Grid:
    """Give every compute action its step.

    Complexity: Linear in the number of actions times the number of positions that wait.
    """
    work = [[action for action in actions if action.kind in COMPUTE_KINDS] for actions in schedule.ranks]
    sources = _sources(schedule)
    done: dict[tuple[int, str, int | None], int] = {}
    rows: list[list[Action | None]] = [[] for _ in work]
    at = [0] * len(work)
    moved = True
    while moved:
        moved = False
        for position, actions in enumerate(work):
            while at[position] < len(actions):
                action = actions[at[position]]
                waits = [done.get(key) for key in _needs(action, sources)]
                if None in waits:
                    break
                step = max([len(rows[position]), *(wait + 1 for wait in waits if wait is not None)])
                rows[position] += [None] * (step - len(rows[position])) + [action]
                done[action.stage, "B" if action.kind == "I" else action.kind, action.microbatch] = step
                at[position] += 1
                moved = True
    longest = max(map(len, rows), default=0)
    full = tuple(tuple(row) + (None,) * (longest - len(row)) for row in rows)
    return Grid(rows=full, stuck=tuple(tuple(actions[start:]) for actions, start in zip(work, at, strict=True)))


def _sources(schedule: Schedule) -> dict[tuple[int, str], set[int]]:
    """Return which stages' work a stage's work reads, by the schedule's messages; neighbours if it has none."""
    sources: dict[tuple[int, str], set[int]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind in {"RECV_F", "RECV_B"} and action.peer is not None:
                sources.setdefault((action.stage, action.kind[-1]), set()).add(action.peer)
    if not sources:
        for stage in range(1, schedule.num_stages):
            sources[stage, "F"] = {stage - 1}
            sources[stage - 1, "B"] = {stage}
    return sources


def _needs(action: Action, sources: dict[tuple[int, str], set[int]]) -> list[tuple[int, str, int | None]]:
    if action.kind == "W":
        return [(action.stage, "B", action.microbatch)]
    kind = "F" if action.kind == "F" else "B"
    needs: list[tuple[int, str, int | None]] = [
        (stage, kind, action.microbatch) for stage in sorted(sources.get((action.stage, kind), ()))
    ]
    return needs if kind == "F" else [*needs, (action.stage, "F", action.microbatch)]


def schedule_grid(plan: Plan | Schedule, *, width: int = 120, height: int = 32, colour: bool = False) -> str:
    """Return the step x position grid of a plan's schedule, or of a bare schedule.

    Args:
        plan: A plan or a schedule.
        width: Characters of the longest line; later steps are left out with a note.
        height: Positions shown; later ones are left out with a note.
        colour: Colour forwards and backwards.

    Returns:
        Lines without a line break at the end.
    """
    schedule = plan.schedule if isinstance(plan, Plan) else plan
    grid = lay_out(schedule)
    labels = row_labels(plan)
    named = any(len({action.stage for action in row if action}) > 1 for row in grid.rows)
    texts = [[cell_text(action, named=named) for action in row] for row in grid.rows]
    stuck = [[f"!{action}" for action in actions] for actions in grid.stuck]
    cell = max((len(text) for row in texts for text in row), default=1)
    cell = max(cell, len(str(max(0, grid.num_steps - 1))))
    margin = max([len("step"), *map(len, labels)])
    shown = max(1, min(grid.num_steps, (width - margin) // (cell + 1)))
    head = " ".join(str(step).ljust(cell) if step % 5 == 0 else " " * cell for step in range(shown))
    lines = [f"{'step'.ljust(margin)} {head}".rstrip()]
    for label, row, actions, waiting in list(zip(labels, texts, grid.rows, stuck, strict=True))[:height]:
        cells = [_painted(text.ljust(cell), action, colour) for text, action in zip(row, actions, strict=True)]
        line = f"{label.ljust(margin)} {' '.join(cells[:shown])}".rstrip()
        lines.append(line + (f"  {' '.join(waiting[:3])} waits forever" if waiting else ""))
    lines += _notes(shown, grid.num_steps, height, len(labels))
    return "\n".join(lines)


def _notes(shown: int, steps: int, height: int, positions: int) -> list[str]:
    notes = [f"… {shown} of {steps} steps shown"] if shown < steps else []
    return notes + ([f"… {height} of {positions} positions shown"] if height < positions else [])


def row_labels(plan: Plan | Schedule) -> list[str]:
    """Return what stands before each row: stages, and the ranks of a plan."""
    schedule = plan.schedule if isinstance(plan, Plan) else plan
    labels = []
    for position, actions in enumerate(schedule.ranks):
        stages = sorted({action.stage for action in actions})
        label = f"stage {ranges(stages)}" if stages else f"position {position}"
        if isinstance(plan, Plan) and stages:
            label += f" (rank {ranges(sorted(plan.stages[stages[0]].ranks))})"
        labels.append(label)
    return labels


def cell_text(action: Action | None, *, named: bool) -> str:
    """Return e.g. ``F0``, with the stage in front if a position runs several."""
    if action is None:
        return IDLE
    return str(action) if named else f"{action.kind}{action.microbatch}"


def _painted(text: str, action: Action | None, wanted: bool) -> str:  # noqa: FBT001  (private)
    return paint(text, "dim" if action is None else KIND_COLOURS[action.kind], wanted=wanted)
