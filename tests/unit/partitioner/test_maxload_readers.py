"""Readers and cost by hand, on graphs of a few nodes."""

from math import inf

import pytest

from partita.partitioner import PartitionProblem, solve
from partita.partitioner.maxload import evaluate
from partita.partitioner.maxload.replicated import ReplicatedStage, evaluate_replicated


def _node(number, *, time=2.0, backward=0, colour=None, size=1.5, supported=1):
    node = {"id": number, "supportedOnFpga": supported, "cpuLatency": 10 * time, "fpgaLatency": time}
    node |= {"isBackwardNode": backward, "size": size}
    return node if colour is None else node | {"colorClass": colour}


def _graph(nodes, edges, **limits):
    settings = {"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1} | limits
    listed = [{"sourceId": a, "destId": b, "cost": c} for a, b, c in edges]
    return settings | {"nodes": nodes, "edges": listed}


def test_a_net_is_paid_once_by_the_sender_and_by_every_reader():
    problem = PartitionProblem.from_json(
        _graph([_node(1), _node(2), _node(3), _node(4)], [(1, 2, 0.5), (1, 3, 0.5), (1, 4, 0.5)], maxFPGAs=3)
    )
    assert evaluate(problem, (0, 1, 1, 2), contiguous=True).loads == (2.5, 4.5, 2.5, 0.0)


def test_a_processor_takes_its_own_time_and_pays_no_traffic_and_no_memory():
    problem = PartitionProblem.from_json(_graph([_node(1), _node(2)], [(1, 2, 0.5)], maxSizePerFPGA=2.0))
    result = evaluate(problem, (0, 2), contiguous=True)
    assert result.loads == (2.5, 0.0, 20.0)
    assert result.used_bytes == (2, 0, 2)
    assert evaluate(problem, (0, 0), contiguous=True).objective == inf


def test_a_node_without_support_needs_the_processor():
    problem = PartitionProblem.from_json(_graph([_node(1, supported=0), _node(2)], [(1, 2, 0.0)]))
    assert solve(problem, workers=1).objective == 20.0


def test_the_backward_pass_follows_its_colour_and_an_orphan_goes_down_the_line():
    nodes = [_node(1, colour=7), _node(2, colour=8), _node(3, backward=1, colour=8), _node(4, backward=1, colour=7)]
    nodes.append(_node(5, backward=1))
    problem = PartitionProblem.from_json(_graph(nodes, [(1, 2, 0.0), (3, 4, 0.0), (3, 5, 0.0), (5, 4, 0.0)]))
    assert problem.colocated == ((0, 3), (1, 2))
    assert set(problem.order) == {(0, 1), (4, 2), (3, 4)}
    assert evaluate(problem, (0, 1, 1, 0, 0), contiguous=True).objective == 6.0
    assert evaluate(problem, (0, 1, 1, 1, 0), contiguous=True).objective == inf


def test_one_node_sends_at_one_cost():
    with pytest.raises(ValueError, match="sends at cost"):
        PartitionProblem.from_json(_graph([_node(1), _node(2), _node(3)], [(1, 2, 0.5), (1, 3, 0.25)]))
    with pytest.raises(ValueError, match="fpgaLatency"):
        PartitionProblem.from_json(_graph([{"id": 1, "isBackwardNode": 0, "supportedOnFpga": 1}], []))


def test_a_pipedream_profile_sends_both_ways_and_loads_no_data(tmp_path):
    fields = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
    text = "node1 -- Input0 -- " + fields.format(500, 0, "8.0", 0.0)
    text += "\nnode2 -- LSTM(4, 4) -- " + fields.format(1.5, 2.5, "[6000.0; 3000.0; 3000.0]", 100.0)
    text += "\nnode3 -- Linear(in=4, out=4) -- " + fields.format(1, 2, "1.0", 0.0)
    path = tmp_path / "graph.txt"
    path.write_text(text + "\n\tnode1 -- node2\n\tnode2 -- node3\n")
    problem = PartitionProblem.from_pipedream(path, accelerators=2, bandwidth_bytes_per_s=12e6, memory_bytes=13000)
    assert problem.classes[0].times == (0.0, 4.0, 3.0)
    assert problem.sizes == (8, 12300, 1)
    assert problem.costs[1] == pytest.approx(2.0)
    assert problem.edges == ((0, 1), (1, 2))
    path.write_text("node1 Input0\n")
    with pytest.raises(ValueError, match="line 1"):
        PartitionProblem.from_pipedream(path, accelerators=2, bandwidth_bytes_per_s=1.0, memory_bytes=1)


def _piper(**limits):
    def rows(time, other):
        fast = {"id": "vanilla", "timePerSample": time, "parameterSize": 8.0, "memoryUsageA": 4.0, "memoryUsageB": 1.0}
        slow = fast | {"id": "activation recomp", "timePerSample": time * 1.5, "memoryUsageA": 1.0}
        sync = {"syncTimeFw": {other: 1.0}, "syncTimeBw": {}}
        return {"1": [fast | sync, slow | sync]}

    nodes = [{"id": 5, "TMPCs": rows(4.0, "6")}, {"id": 6, "TMPCs": rows(4.0, "5")}]
    data = {"nodes": nodes, "edges": [{"sourceId": 5, "destId": 6, "communicationCost": 3.0}]}
    settings = {"devices": 2, "memory_bytes": 100, "bandwidth_bytes_per_s": 8.0, "microbatches": 4} | limits
    return PartitionProblem.from_piper(data, **settings)


def test_piper_cost_by_hand():
    problem = _piper()
    apart = tuple(ReplicatedStage(nodes=(v,), replicas=1, degree=1, options=(0,)) for v in (0, 1))
    assert evaluate_replicated(problem, apart) == 4.0 + 2 * (3.0 + 1.0) / 8.0
    both = (ReplicatedStage(nodes=(0, 1), replicas=2, degree=1, options=(0, 0)),)
    assert evaluate_replicated(problem, both) == 8.0 / 2 + 4 * (1 / 2) * 16.0 / 4 / 8.0
    assert solve(problem).objective == pytest.approx(5.0)


def test_piper_memory_counts_the_microbatches_in_flight_and_recomputes_where_it_must():
    # The first stage holds two microbatches: 2 * 4 + 1 = 9 bytes, or 2 * 1 + 1 = 3 with recompute.
    assert solve(_piper(memory_bytes=5)).objective == pytest.approx(4.0 * 1.5 + 1.0)
    assert solve(_piper(memory_bytes=2)).status == "INFEASIBLE"
