"""Rules of plans: who runs what."""

from __future__ import annotations

from collections.abc import Iterator

from partita.ir.plan import Plan
from partita.ir.rules import Findings, Rule
from partita.ir.rules import plan_figures as figures
from partita.ir.schedule import Action


def _block_ids_are_positions(plan: Plan) -> Findings:
    for index, block in enumerate(plan.blocks):
        if block.id != index:
            yield f"blocks[{index}].id", f"is {block.id}"


def _stage_indices_are_positions(plan: Plan) -> Findings:
    for index, stage in enumerate(plan.stages):
        if stage.index != index:
            yield f"stages[{index}].index", f"is {stage.index}"


def _ranks_exist(plan: Plan) -> Findings:
    for stage in plan.stages:
        place = f"stages[{stage.index}].ranks"
        if not stage.ranks:
            yield place, "is empty"
        if len(set(stage.ranks)) != len(stage.ranks):
            yield place, f"{list(stage.ranks)} names a rank twice"
        for rank in stage.ranks:
            if not 0 <= rank < plan.num_ranks:
                yield place, f"rank {rank} is outside the cluster's 0..{plan.num_ranks - 1}"


def _lists_by_rank(plan: Plan) -> Findings:
    if len(plan.memory_limits) != plan.num_ranks:
        yield "memory_limits", f"has {len(plan.memory_limits)} entries for {plan.num_ranks} ranks"
    if len(plan.predicted.peak_bytes) != plan.num_ranks:
        yield "predicted.peak_bytes", f"has {len(plan.predicted.peak_bytes)} entries for {plan.num_ranks} ranks"


def _blocks_of_stages_exist(plan: Plan) -> Findings:
    for stage in plan.stages:
        for block in stage.blocks:
            if not 0 <= block < len(plan.blocks):
                yield f"stages[{stage.index}].blocks", f"there is no block {block}"


def _schedule_has_the_stages(plan: Plan) -> Findings:
    if plan.schedule.num_stages != len(plan.stages):
        yield "schedule.num_stages", f"is {plan.schedule.num_stages}, the plan has {len(plan.stages)} stages"


def _stages_named_exist(plan: Plan) -> Findings:
    stages = range(len(plan.stages))
    for index, edge in enumerate(plan.edges):
        if edge.source not in stages or edge.target not in stages:
            yield f"edges[{index}]", f"{edge.source} -> {edge.target} with stages 0..{len(stages) - 1}"
    for index, parameter in enumerate(plan.parameter_plans):
        for stage in parameter.stages:
            if stage not in stages:
                yield f"parameter_plans[{index}].stages", f"there is no stage {stage}"


def _blocks_partitioned(plan: Plan) -> Findings:
    homes: dict[int, list[int]] = {block.id: [] for block in plan.blocks}
    for stage in plan.stages:
        for block in stage.blocks:
            homes[block].append(stage.index)
        if list(stage.blocks) != sorted(stage.blocks):
            yield f"stages[{stage.index}].blocks", f"{list(stage.blocks)} is not ascending"
    for block, stages in homes.items():
        if len(stages) != 1:
            yield f"blocks[{block}]", f"is in the stages {stages}" if stages else "is in no stage"


def _items_in_one_block(plan: Plan) -> Findings:
    seen: dict[int, int] = {}
    for block in plan.blocks:
        for item in block.items:
            if seen.setdefault(item, block.id) != block.id or block.items.count(item) > 1:
                yield f"blocks[{block.id}].items", f"item {item} is in block {seen[item]} too"


def _stage_runs_its_blocks(plan: Plan) -> Findings:
    block_of = {item: block.id for block in plan.blocks for item in block.items}
    for stage in plan.stages:
        place, mine = f"stages[{stage.index}].items", set(stage.items)
        if list(stage.items) != sorted(mine):
            yield place, "is not ascending, each item once"
        for block in stage.blocks:
            missing = sorted(set(plan.blocks[block].items) - mine)
            if missing:
                yield place, f"misses item {missing[0]} of its block {block}"
        for item in stage.items:
            if item in block_of and block_of[item] not in stage.blocks:
                yield place, f"item {item} belongs to block {block_of[item]} of another stage"


def _repeats_point_back(plan: Plan) -> Findings:
    for block in plan.blocks:
        first = block.repeat_of
        if first is not None and not (0 <= first < block.id and plan.blocks[first].repeat_of is None):
            yield f"blocks[{block.id}].repeat_of", f"{first} is no earlier block that repeats none"


def _one_stage_per_rank(plan: Plan) -> Findings:
    homes: dict[int, int] = {}
    for stage in plan.stages:
        for rank in stage.ranks:
            if homes.setdefault(rank, stage.index) != stage.index:
                yield f"stages[{stage.index}].ranks", f"rank {rank} runs stage {homes[rank]} too"


def _degrees_fit(plan: Plan) -> Findings:
    if plan.data_degree < 1:
        yield "data_degree", f"{plan.data_degree} is not positive"
    for stage in plan.stages:
        expected = plan.data_degree * stage.tensor_degree
        if len(stage.ranks) != expected:
            text = f"{len(stage.ranks)} ranks for {plan.data_degree} replicas of {stage.tensor_degree}"
            yield f"stages[{stage.index}].ranks", text


def _edges_forward(plan: Plan) -> Findings:
    seen: set[tuple[int, int]] = set()
    for index, edge in enumerate(plan.edges):
        if edge.source >= edge.target:
            yield f"edges[{index}]", f"{edge.source} -> {edge.target} does not go forward"
        if (edge.source, edge.target) in seen:
            yield f"edges[{index}]", f"{edge.source} -> {edge.target} occurs twice"
        seen.add((edge.source, edge.target))
        if not edge.tensors or len(set(edge.tensors)) != len(edge.tensors):
            yield f"edges[{index}].tensors", f"{list(edge.tensors)} is empty or names a tensor twice"


def _positions_match(plan: Plan) -> Findings:
    positions = plan.schedule.position_of_stage()
    for stage in plan.stages:
        if positions.get(stage.index) != stage.schedule_position:
            text = f"is {stage.schedule_position}, the schedule runs the stage on {positions.get(stage.index)}"
            yield f"stages[{stage.index}].schedule_position", text


def _messages(plan: Plan) -> Iterator[Action]:
    for edge in plan.edges:
        for microbatch in range(plan.num_microbatches):
            yield Action(stage=edge.source, kind="SEND_F", microbatch=microbatch, peer=edge.target)
            if edge.backward_bytes:
                yield Action(stage=edge.target, kind="SEND_B", microbatch=microbatch, peer=edge.source)


def _schedule_sends_the_edges(plan: Plan) -> Findings:
    kinds = {"SEND_F", "SEND_B"}
    sent = {action for actions in plan.schedule.ranks for action in actions if action.kind in kinds}
    needed = set(_messages(plan))
    for action in sorted(needed - sent, key=str):
        yield "schedule.ranks", f"{action} of an edge is missing"
    for action in sorted(sent - needed, key=str):
        yield "schedule.ranks", f"{action} belongs to no edge"


STRUCTURE = (
    Rule("P001", "a block's id is its position", _block_ids_are_positions),
    Rule("P002", "a stage's index is its position", _stage_indices_are_positions),
    Rule("P003", "a stage's ranks are different ranks of the cluster", _ranks_exist),
    Rule("P004", "limits and peaks have one entry per rank of the cluster", _lists_by_rank),
    Rule("P005", "a stage's blocks exist", _blocks_of_stages_exist),
    Rule("P006", "the schedule is for the plan's number of stages", _schedule_has_the_stages),
    Rule("P007", "edges and parameters name stages that exist", _stages_named_exist),
)
MEANING = (
    Rule("P008", "every block is in exactly one stage", _blocks_partitioned),
    Rule("P009", "an item is in at most one block", _items_in_one_block),
    Rule("P010", "a stage runs the items of its blocks, and others only if no block has them", _stage_runs_its_blocks),
    Rule("P011", "a repeated block names the first of its kind", _repeats_point_back),
    Rule("P012", "a rank runs one stage", _one_stage_per_rank),
    Rule("P013", "a stage has one rank per replica and tensor part", _degrees_fit),
    Rule("P014", "edges go forward, one for each pair of stages, with tensors", _edges_forward),
    Rule("P015", "a stage runs at its position of the schedule", _positions_match),
    Rule("P016", "the schedule sends what the edges say and nothing else", _schedule_sends_the_edges),
    *figures.RULES,
)
