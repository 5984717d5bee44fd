"""Rules of a schedule's structure.  That it runs to its end is `partita.schedules.validate`'s to show."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from partita.ir.rules import Findings, Rule
from partita.ir.schedule import COMPUTE_KINDS, Action, Schedule

PARTNERS = {"SEND_F": "RECV_F", "SEND_B": "RECV_B", "RECV_F": "SEND_F", "RECV_B": "SEND_B"}
"""The kind of the other end of a message."""


def _actions(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for position, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            yield position, index, action


def _counts_positive(schedule: Schedule) -> Findings:
    for name, count in (("num_stages", schedule.num_stages), ("num_microbatches", schedule.num_microbatches)):
        if count < 1:
            yield name, f"{count} is not positive"


def _stages_exist(schedule: Schedule) -> Findings:
    for position, index, action in _actions(schedule):
        if not 0 <= action.stage < schedule.num_stages:
            yield f"ranks[{position}][{index}]", f"{action} acts for a stage outside 0..{schedule.num_stages - 1}"


def _microbatches_exist(schedule: Schedule) -> Findings:
    for position, index, action in _actions(schedule):
        if action.kind == "REDUCE_GRAD":
            if action.microbatch is not None:
                yield f"ranks[{position}][{index}]", "a reduction belongs to no microbatch"
        elif action.microbatch is None or not 0 <= action.microbatch < schedule.num_microbatches:
            last = schedule.num_microbatches - 1
            yield f"ranks[{position}][{index}]", f"{action} is for a microbatch outside 0..{last}"


def _peers_exist(schedule: Schedule) -> Findings:
    for position, index, action in _actions(schedule):
        place = f"ranks[{position}][{index}]"
        if action.kind not in PARTNERS:
            if action.peer is not None:
                yield place, f"{action.kind} has no other end"
        elif action.peer is None or not 0 <= action.peer < schedule.num_stages or action.peer == action.stage:
            yield place, f"{action} has no other stage among 0..{schedule.num_stages - 1} as its other end"


def _one_position_per_stage(schedule: Schedule) -> Findings:
    homes: dict[int, int] = {}
    for position, index, action in _actions(schedule):
        home = homes.setdefault(action.stage, position)
        if home != position:
            yield f"ranks[{position}][{index}]", f"stage {action.stage} runs on positions {home} and {position}"


def _nothing_twice(schedule: Schedule) -> Findings:
    counts = Counter(action for _, _, action in _actions(schedule))
    for action, count in counts.items():
        if count > 1:
            yield "ranks", f"{action} occurs {count} times"


def _kinds_by_task(schedule: Schedule) -> dict[tuple[int, int], set[str]]:
    kinds: dict[tuple[int, int], set[str]] = defaultdict(set)
    for _, _, action in _actions(schedule):
        if action.kind in COMPUTE_KINDS and action.microbatch is not None:
            kinds[action.stage, action.microbatch].add(action.kind)
    return kinds


def _work_complete(schedule: Schedule) -> Findings:
    kinds = _kinds_by_task(schedule)
    trains = any(found - {"F"} for found in kinds.values())
    allowed = ({"F", "B"}, {"F", "I", "W"}) if trains else ({"F"},)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = kinds.get((stage, microbatch), set())
            if found not in allowed:
                has = ", ".join(sorted(found)) or "nothing"
                yield "ranks", f"stage {stage}, microbatch {microbatch} has {has}"


def _work_in_order(schedule: Schedule) -> Findings:
    before = {"B": "F", "I": "F", "W": "I", "SEND_F": "F", "SEND_B": ""}
    after = {"RECV_F": "F", "RECV_B": ""}
    at = {action: index for _, index, action in _actions(schedule)}

    def index_of(action: Action, kind: str) -> int | None:
        kinds = (kind,) if kind else ("B", "I")
        found = [at.get(Action(stage=action.stage, kind=k, microbatch=action.microbatch)) for k in kinds]  # type: ignore[arg-type]
        return next((index for index in found if index is not None), None)

    for position, index, action in _actions(schedule):
        if action.kind in before:
            other = index_of(action, before[action.kind])
            wrong = other is not None and other > index
        elif action.kind in after:
            other = index_of(action, after[action.kind])
            wrong = other is not None and other < index
        else:
            continue
        if wrong:
            order = "after" if action.kind in after else "before"
            yield f"ranks[{position}][{index}]", f"{action} stands {order} the work it belongs to"


def _messages_paired(schedule: Schedule) -> Findings:
    actions = {action for _, _, action in _actions(schedule)}
    for position, index, action in _actions(schedule):
        if action.kind in PARTNERS and action.peer is not None:
            kind = PARTNERS[action.kind]
            other = Action(stage=action.peer, kind=kind, microbatch=action.microbatch, peer=action.stage)  # type: ignore[arg-type]
            if other not in actions:
                yield f"ranks[{position}][{index}]", f"{action} has no {other}"


def _reduction_last(schedule: Schedule) -> Findings:
    for position, actions in enumerate(schedule.ranks):
        done: dict[int, int] = {
            action.stage: index for index, action in enumerate(actions) if action.kind in {"B", "W"}
        }
        for index, action in enumerate(actions):
            if action.kind == "REDUCE_GRAD" and index < done.get(action.stage, -1):
                yield f"ranks[{position}][{index}]", f"{action} stands before {actions[done[action.stage]]}"


STRUCTURE = (
    Rule("S001", "a schedule has stages and microbatches", _counts_positive),
    Rule("S002", "an action acts for a stage that exists", _stages_exist),
    Rule("S003", "an action is for a microbatch that exists, a reduction for none", _microbatches_exist),
    Rule("S004", "a message has another stage as its other end, other actions have none", _peers_exist),
)
MEANING = (
    Rule("S005", "a stage runs on one position", _one_position_per_stage),
    Rule("S006", "no action occurs twice", _nothing_twice),
    Rule(
        "S007", "every stage does F, and B or both I and W, for every microbatch (or F only, for all)", _work_complete
    ),
    Rule("S008", "backward work follows its forward, receives precede their work, and sends follow it", _work_in_order),
    Rule("S009", "every send has its receive, and every receive its send", _messages_paired),
    Rule("S010", "a stage reduces its gradients after its last backward", _reduction_last),
)
