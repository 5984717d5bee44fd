"""Contiguous partition by dynamic programming over nested sets of items.

``F(k, j)`` is the least maximum load of the items of set j on ``k[c]`` devices of each class c::

    F(k, j) = min over classes c with k[c] > 0 and sets i <= j of  max( F(k - 1_c, i), load_c(j without i) )

Over all down-sets of the order this is exact (`solve_ideals`); over the prefixes of one topological order it is the
best contiguous partition that this order allows (`solve_order`).  Better orders come from the answers
(`improve_orders`): any order that keeps the devices of a solution in line allows that solution again, so shuffling
items within devices never loses and often wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import networkx as nx
import numpy as np
import numpy.typing as npt

from partita.partitioner.ideals import Ideals, depth_first_order, enumerate_ideals, greedy_order
from partita.partitioner.maxload.reduction import Reduced

Floats = npt.NDArray[np.float64]
MAX_WORK = 4_000_000_000
"""Element operations that `solve_ideals` may take: up to a minute of numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Devices in a line.

    Attributes:
        objective: Largest load, ``inf`` if nothing fits.
        stages: (class, items) of each device that is used, in order.
    """

    objective: float
    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()


def solve_ideals(reduced: Reduced, *, max_ideals: int = 6000, max_work: int = MAX_WORK) -> Line | None:
    """Return the optimum, or None if the graph has too many down-sets."""
    family = enumerate_ideals(reduced.num_items, reduced.order, limit=max_ideals)
    states = _num_states(reduced)
    if family is None or family.count**2 * (len(reduced.nets) + states) > max_work:
        return None
    loads = _ideal_loads(reduced, family)
    objective, steps = best_chain(loads, [c.count for c in reduced.problem.classes])
    stages = [(c, tuple(np.flatnonzero(family.members[j] & ~family.members[i]).tolist())) for c, i, j in steps]
    return Line(objective=objective, stages=tuple(stages))


def solve_order(reduced: Reduced, order: Sequence[int]) -> Line:
    """Return the best contiguous partition whose devices are intervals of a topological order."""
    loads = interval_loads(reduced, order)
    objective, steps = best_chain(loads, [c.count for c in reduced.problem.classes])
    return Line(objective=objective, stages=tuple((c, tuple(order[i:j])) for c, i, j in steps))


def starting_orders(reduced: Reduced) -> list[tuple[int, ...]]:
    """Return a few topological orders: as numbered, depth first, light first, heavy first."""
    graph = _graph(reduced)
    weight = reduced.times.min(axis=0)
    orders = [list(range(reduced.num_items)), depth_first_order(graph)]
    orders += [greedy_order(graph, lambda v: float(weight[v])), greedy_order(graph, lambda v: -float(weight[v]))]
    return list(dict.fromkeys(map(tuple, orders)))


def improve_orders(reduced: Reduced, best: Line, *, seed: int, more: Callable[[], bool]) -> Iterator[Line]:
    """Yield ever better lines: shuffle the items within the devices of the best, solve along the new order, repeat.

    Args:
        reduced: The problem.
        best: Where to start.
        seed: Of the shuffles.
        more: Whether to go on.
    """
    graph, draw = _graph(reduced), random.Random(seed)  # noqa: S311 - a search, no secret
    while more() and best.stages:
        rank = {v: t for t, (_, items) in enumerate(best.stages) for v in items}
        noise = _noise(reduced, draw)
        order = greedy_order(graph, lambda v, noise=noise, rank=rank: rank[v] + noise[v])  # type: ignore[misc]
        found = solve_order(reduced, order)
        if found.objective <= best.objective:
            better = found.objective < best.objective
            best = found
            if better:
                yield best


def _noise(reduced: Reduced, draw: random.Random) -> list[float]:
    """Return a number in [0, 1) per item: at random, or alike along paths, so that branches stay together."""
    if draw.random() < 0.5:
        return [draw.random() for _ in range(reduced.num_items)]
    noise = [0.0] * reduced.num_items
    before: list[list[int]] = [[] for _ in noise]
    for u, v in reduced.order:
        before[v].append(u)
    for v, sources in enumerate(before):
        noise[v] = noise[draw.choice(sources)] if sources and draw.random() < 0.8 else draw.random()
    return noise


def _graph(reduced: Reduced) -> nx.DiGraph:
    graph = nx.DiGraph(reduced.order)
    graph.add_nodes_from(range(reduced.num_items))
    return graph


def _num_states(reduced: Reduced) -> int:
    return int(np.prod([c.count + 1 for c in reduced.problem.classes])) * len(reduced.problem.classes)


def best_chain(loads: Floats, counts: Sequence[int]) -> tuple[float, list[tuple[int, int, int]]]:
    """Return the least maximum load of a chain from set 0 to the last, and its steps (class, from, to)."""
    columns = np.arange(loads.shape[1])
    start = np.where(columns == 0, 0.0, inf)
    values: dict[tuple[int, ...], Floats] = {tuple(0 for _ in counts): start}
    choices: dict[tuple[int, ...], tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = {}
    for state in list(product(*(range(count + 1) for count in counts)))[1:]:
        value, kind, source = np.full_like(start, inf), np.full(len(start), -1), np.zeros(len(start), dtype=np.intp)
        for c in (c for c, used in enumerate(state) if used):
            worst = np.maximum(values[_less(state, c)], loads[c])  # [to, from]
            at = worst.argmin(axis=1)
            candidate = worst[columns, at]
            better = candidate < value
            value[better], kind[better], source[better] = candidate[better], c, at[better]
        values[state], choices[state] = value, (kind, source)
    state, j = tuple(counts), len(start) - 1
    objective = float(values[state][j])
    steps = []
    while objective < inf and any(state):
        kind, source = choices[state]
        c, i = int(kind[j]), int(source[j])
        if i != j:
            steps.append((c, i, j))
        state, j = _less(state, c), i
    return objective, steps[::-1]


def _less(state: tuple[int, ...], c: int) -> tuple[int, ...]:
    return (*state[:c], state[c] - 1, *state[c + 1 :])


def interval_loads(reduced: Reduced, order: Sequence[int]) -> Floats:
    """Return ``loads[c, j, i]``, the load on class c of the items at positions i to j - 1 of the order.

    A net is cut by an interval if it has items in it but not all: all nets, less those with no item in it (it lies in a
    gap between two neighbours of the net), less those within it.  Gaps and nets are counted by sums over a grid.
    """
    n = len(order)
    position = {v: p for p, v in enumerate(order)}
    apart, within = np.zeros((n + 1, n + 1)), np.zeros((n + 1, n + 1))
    total = 0.0
    for cost, items in reduced.nets:
        at = sorted(position[v] for v in items)
        total += cost
        within[at[-1] + 1, at[0]] += cost
        for left, right in zip([-1, *at], [*at, n], strict=True):
            apart[right, left + 1] += cost
    within = within.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
    apart = apart[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    members = np.zeros((n + 1, n), dtype=bool)
    members[:, order] = np.tri(n + 1, n, -1, dtype=bool)
    return _loads(reduced, members, np.tri(n + 1, dtype=bool), total - apart - within)


def _ideal_loads(reduced: Reduced, family: Ideals) -> Floats:
    """Return ``loads[c, j, i]``, the load on class c of ideal j without ideal i."""
    nested = family.below.copy()
    np.fill_diagonal(nested, val=True)
    traffic = np.zeros(nested.shape)
    for cost, items in reduced.nets:
        inside = family.members[:, list(items)].sum(axis=1)
        part = inside[:, None] - inside[None, :]
        traffic += cost * ((part > 0) & (part < len(items)))
    return _loads(reduced, family.members, nested, traffic)


def _loads(reduced: Reduced, members: npt.NDArray[np.bool_], nested: npt.NDArray[np.bool_], traffic: Floats) -> Floats:
    """Return the loads of all differences of sets from the traffic of each; ``inf`` where one does not fit."""
    rows = []
    sizes = members.astype(np.int64) @ np.array(reduced.sizes, dtype=np.int64)
    for c, times in zip(reduced.problem.classes, reduced.times, strict=True):
        allowed = np.isfinite(times)
        work, banned = members @ np.where(allowed, times, 0.0), members @ (~allowed).astype(np.int64)
        load = np.subtract.outer(work, work) + traffic * float(c.communicates)
        fits = nested & (banned[:, None] == banned[None, :])
        if c.memory_bytes is not None:
            fits &= sizes[:, None] - sizes[None, :] <= c.memory_bytes
        np.fill_diagonal(load, 0.0)
        rows.append(np.where(fits, np.maximum(load, 0.0), inf))
    return np.array(rows)
