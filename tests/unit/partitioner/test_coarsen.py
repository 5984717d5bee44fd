from dataclasses import replace

import networkx as nx
import pytest

from partita.partitioner.blockgraph import BlockGraph
from partita.partitioner.coarsen import Reads, coarsen
from partita.partitioner.contraction import Contraction, merge_overlapping
from tests.unit.partitioner.model_graphs import Builder, branches_graph, chain_graph, transformer_graph


def items_of(blocks):
    return sorted(item for block in blocks for item in block.items)


@pytest.mark.parametrize("graph", [transformer_graph(), branches_graph(), chain_graph([8] * 6)])
@pytest.mark.parametrize("most", [1_000, 3])
def test_every_ordinary_item_is_in_one_block_and_blocks_are_in_order(graph, most):
    blocks = coarsen(graph, max_blocks=most)
    assert items_of(blocks) == list(Reads(graph).ordinary)
    assert [block.id for block in blocks] == list(range(len(blocks)))
    assert len(blocks) <= max(most, 3)
    assert all(a < b for a, b in BlockGraph(graph, blocks).edges)


def test_glue_joins_the_branch_that_it_ends():
    labels = [block.items for block in coarsen(transformer_graph(layers=2))]
    assert labels == [(1,), (2, 3), (4, 5), (6, 7), (8, 9), (10,)]


def test_a_replicable_item_is_in_no_block_but_what_it_reads_is_needed():
    graph = transformer_graph(layers=1)
    blocks = BlockGraph(graph, coarsen(graph))
    assert 0 not in items_of(blocks.blocks)
    assert blocks.items_of((1,)) == (0, 2, 3)
    assert blocks.items_of((0,)) == (1,)


def test_a_replicable_item_between_blocks_passes_the_dependency_on():
    b = Builder()
    x = b.tensor("x", (8, 4), "input", batch=True, grad=False)
    first = b.item("first", (x, b.parameter("w", 4, 4)), (b.tensor("a", (8, 4), batch=True),), flops=1000)
    mask = b.item("mask", (first,), (b.tensor("m", (8, 4), batch=True, grad=False),), kind="op", replicable=True)
    last = b.item("last", (x, mask, b.parameter("v", 4, 4)), (b.tensor("b", (8, 4), batch=True),), flops=1000)
    graph = b.build((last,))
    blocks = BlockGraph(graph, coarsen(graph))
    assert blocks.edges == ((0, 1),)
    assert [value.tensor.id for value in blocks.values] == ["a"]


def test_a_replicable_item_that_makes_an_output_is_ordinary():
    graph = transformer_graph(layers=1)
    assert 0 in items_of(coarsen(replace(graph, outputs=("logits", "mask"))))


def test_independent_branches_stay_apart():
    blocks = coarsen(branches_graph(length=3))
    sides = [{graph_name.split(".")[0] for graph_name in (block.label,)} for block in blocks]
    assert len(blocks) == 6
    assert {frozenset(side) for side in sides} == {frozenset("a"), frozenset("b")}


def test_colocated_items_share_a_block_with_everything_between():
    graph = replace(chain_graph([8] * 8), colocated=((1, 3), (2, 4)))
    assert [block.items for block in coarsen(graph)] == [(0,), (1, 2, 3, 4), (5,), (6,)]


def test_repeats_are_found_by_structure_at_any_period():
    blocks = coarsen(transformer_graph(layers=3))
    assert [block.repeat_of for block in blocks] == [None, None, None, 1, 2, 1, 2, None]
    blocks = coarsen(chain_graph([8, 16, 8, 16, 8, 24]))
    assert [block.repeat_of for block in blocks] == [None, None, None, 1, None]  # the first reads an input


def test_a_frozen_layer_repeats_no_trained_one():
    graph = chain_graph([8] * 5)
    frozen = tuple(replace(t, requires_grad=False) if t.id == "layers.2.weight" else t for t in graph.tensors)
    assert [block.repeat_of for block in coarsen(replace(graph, tensors=frozen))] == [None, None, None, 1]


def test_a_merge_that_would_close_a_cycle_is_refused():
    clusters = Contraction([[0], [1], [2]], {(0, 1): 1, (1, 2): 1, (0, 2): 5})
    assert clusters.merge(0, 2) is None
    assert clusters.merge(0, 1) == 0
    assert clusters.merge(0, 2) == 0
    assert clusters.sorted_members() == [(0, 1, 2)]


def test_a_merge_moves_what_depends_on_it():
    clusters = Contraction([[0], [1], [2], [3]], {(0, 1): 1, (0, 2): 1, (1, 3): 1, (2, 3): 1})
    assert clusters.merge(0, 2) == 0
    assert clusters.position(0) < clusters.position(1) < clusters.position(3)
    assert clusters.merge(1, 3) == 1
    assert clusters.sorted_members() == [(0, 2), (1, 3)]


def test_an_edge_that_leads_backwards_is_refused():
    with pytest.raises(ValueError, match="backwards"):
        Contraction([[0], [1]], {(1, 0): 1})


def test_ranges_merge():
    assert merge_overlapping([(4, 6), (0, 1), (5, 9)]) == [(0, 1), (4, 9)]


def test_contractions_stay_acyclic_in_any_order():
    edges = {(a, b): (a * b) % 5 + 1 for b in range(12) for a in range(b) if (a * 7 + b * 3) % 4 == 0}
    clusters = Contraction([[v] for v in range(12)], edges)
    for u, v in sorted(edges, key=lambda edge: (edge[0] * 5 + edge[1]) % 7):
        one, other = clusters.cluster_of(u), clusters.cluster_of(v)
        if one != other:
            clusters.merge(one, other)
        graph = nx.DiGraph([(clusters.cluster_of(a), clusters.cluster_of(b)) for a, b in edges])
        graph.remove_edges_from(nx.selfloop_edges(graph))
        assert nx.is_directed_acyclic_graph(graph)
        assert all(clusters.position(a) < clusters.position(b) for a, b in graph.edges)
