from dataclasses import replace
from math import inf

import pytest

from partita.partitioner import PARTITIONERS
from partita.partitioner.bounds import work_bound
from partita.partitioner.problem import Net, ParameterGroup, PipelineProblem, evaluate

CHAIN = PipelineProblem(
    num_stages=2,
    num_microbatches=3,
    schedule="1f1b",
    capacities=(1000, 1000),
    forward_s=(1.0, 2.0, 3.0),
    backward_s=(2.0, 4.0, 6.0),
    saved_bytes=(10, 20, 30),
    transient_bytes=(5, 7, 1),
    edges=((0, 1), (1, 2), (0, 2)),
    nets=(
        Net(producer=0, readers=(1, 2), bytes=4, gradient_bytes=4, seconds=0.5, savers=(0, 2)),
        Net(producer=1, readers=(2,), bytes=8, seconds=0.25),
    ),
    parameters=(
        ParameterGroup(readers=(0, 2), bytes=100, seconds=1.0, split_s=2.0, update_bytes=9),
        ParameterGroup(readers=(1,), bytes=50, seconds=3.0),
    ),
    base_bytes=11,
    stage_s=0.125,
)


def test_the_equations_by_hand():
    evaluation = evaluate(CHAIN, (0, 0, 1))
    first, second = evaluation.stages
    # Both nets are cut: block 2 reads both.
    assert (first.time_s, second.time_s) == (3 + 6 + 0.75, 9 + 0.75)
    assert (first.once_s, second.once_s) == (0.125 + 1 + 2 + 3, 0.125 + 1 + 2)
    assert first.bottleneck_s == 2 * 9.75 + 6.125
    assert evaluation.objective == 9.75 + 9.75 + 2 * 9.75 + 6.125
    # static 100 + 50 + 11; two in flight of 10 + 20 and the saved net of 4; messages 4 + 4 + 8; transient 7
    assert first.memory_bytes == 161 + 2 * 34 + 16 + 7
    # static 100; one in flight of 30 and 12 received; messages 16; with a transient of 1 that is above the update
    assert second.memory_bytes == 100 + 42 + 16 + 1


def test_uncut_nets_cost_no_time_and_a_whole_group_no_split():
    evaluation = evaluate(replace(CHAIN, num_stages=1, capacities=(1000,)), (0, 0, 0))
    assert evaluation.stages[0].communication_s == 0
    assert evaluation.stages[0].once_s == 0.125 + 4
    assert evaluation.stages[0].received_bytes == 0


def test_the_update_counts_when_it_is_larger_than_the_activations():
    heavy = replace(CHAIN, parameters=(ParameterGroup(readers=(2,), bytes=0, update_bytes=500),) * 2)
    assert evaluate(heavy, (0, 0, 1)).stages[1].memory_bytes == 16 + 500
    assert evaluate(replace(heavy, update_in_turn=False), (0, 0, 1)).stages[1].memory_bytes == 16 + 1000


def test_fill_drain_keeps_all_microbatches():
    assert evaluate(replace(CHAIN, schedule="gpipe"), (0, 0, 1)).stages[1].memory_bytes == 100 + 3 * 42 + 16 + 1


@pytest.mark.parametrize("assignment", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (0, 2, 1), (0, 0)])
def test_assignments_that_break_the_order_are_not_feasible(assignment):
    evaluation = evaluate(CHAIN, assignment)
    assert (evaluation.feasible, evaluation.objective, evaluation.stages) == (False, inf, ())


def test_pins_and_capacities_are_kept():
    assert not evaluate(replace(CHAIN, pins=(None, 1, None)), (0, 0, 1)).feasible
    assert evaluate(replace(CHAIN, pins=(None, 1, None)), (0, 1, 1)).feasible
    tight = evaluate(replace(CHAIN, capacities=(100, 1000)), (0, 0, 1))
    assert (tight.feasible, tight.objective, len(tight.stages)) == (False, inf, 2)


@pytest.mark.parametrize(
    "change",
    [{"backward_s": ()}, {"capacities": (1,)}, {"pins": (0,)}, {"edges": ((1, 0),)}],
)
def test_a_malformed_problem_is_refused(change):
    with pytest.raises(ValueError, match=r"must|capacities|pins"):
        replace(CHAIN, **change)


def test_the_bound_sees_that_nothing_fits():
    assert work_bound(replace(CHAIN, capacities=(100, 50))) == inf
    assert work_bound(CHAIN) <= evaluate(CHAIN, (0, 0, 1)).objective


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_every_partitioner_keeps_the_protocol(name):
    answer = PARTITIONERS[name](CHAIN, seed=1)
    assert answer.status in {"optimal", "feasible"}
    assert answer.objective == evaluate(CHAIN, answer.assignment).objective
    assert answer.bound <= answer.objective
    assert PARTITIONERS[name](CHAIN, seed=1) == answer


@pytest.mark.parametrize("name", ["uniform", "greedy"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
def test_baselines_use_every_stage(name, stages):
    skewed = PipelineProblem(
        num_stages=stages,
        num_microbatches=2,
        schedule="gpipe",
        capacities=(10,) * stages,
        forward_s=(100.0, 1.0, 1.0, 0.0, 0.0, 1.0, 50.0),
        backward_s=(0.0,) * 7,
        saved_bytes=(0,) * 7,
        transient_bytes=(0,) * 7,
        edges=tuple((v, v + 1) for v in range(6)),
    )
    assert PARTITIONERS[name](skewed).status == "feasible"
