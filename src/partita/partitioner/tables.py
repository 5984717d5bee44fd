r"""The cost of every possible stage at once, as matrices over pairs of ideals.

A stage is ``D = J \ I`` for ideals ``I`` within ``J``.  Every term of equations (2) to (6) of
`partita.partitioner.problem` except the maxima is a sum of products ``w * a(I) * b(J)`` of indicators, because J closes
D above and I below.  With ``p`` the producer and ``R`` the readers of a net, and ``|R in J|`` the readers in J::

    sends      [p not in I] [p in J and R not within J]                       (a reader of a block of D is never in I)
    receives   sum_c [p in I and |R in I| = c - 1] [|R in J| >= c]            (some reader is in J but not in I)
    saves      [p not in I] [p in J and a saver is in J]
    holds      sum_c [|R in I| = c - 1] [|R in J| >= c]                       (parameters: p is in every I)
    holds all  [|R in I| = 0] [|R in J| = |R|]

So each table is one matrix product: ``(J x terms) @ diag(w) @ (terms x I)``.  The maxima follow the covers of the
family: ``max(J \ I) = max(transient_v, max((J - v) \ I))`` for a maximal block v of J outside I.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.partitioner.ideals import Bools, Floats, Ideals
from partita.partitioner.problem import Net, PipelineProblem

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    r"""Costs of the stage ``J \ I`` at ``[J, I]``; entries where I is not within J mean nothing.

    They do not depend on the number of stages, the schedule or the capacities, so that one set serves all of those.

    Attributes:
        ideals: The family.
        time_s: t, seconds of one microbatch.
        once_s: r, seconds once per step.
        static_bytes: Parameters, without the base bytes of stage 0.
        pinned_bytes: Saved and received bytes of one microbatch.
        buffer_bytes: Message buffers.
        transient_bytes: Largest short-lived need of a block.
        update_bytes: Temporaries of the optimiser.
    """

    ideals: Ideals
    time_s: Floats
    once_s: Floats
    static_bytes: Floats
    pinned_bytes: Floats
    buffer_bytes: Floats
    transient_bytes: Floats
    update_bytes: Floats


class _Terms:
    """Products of indicators, with several weights each, summed up at the end by one matrix product per weight."""

    def __init__(self, count: int, num_weights: int) -> None:
        self._count = count
        self._num_weights = num_weights
        self._lower: list[Bools] = []
        self._upper: list[Bools] = []
        self._weights: list[tuple[float, ...]] = []

    def add(self, lower: Bools, upper: Bools, *weights: float) -> None:
        """Add ``w * lower(I) * upper(J)`` for each weight; zero products are dropped."""
        if any(weights):
            self._lower.append(lower)
            self._upper.append(upper)
            self._weights.append(weights)

    def total(self, which: int) -> Floats:
        """Return the sum for one of the weights, at [J, I]."""
        chosen = [index for index, weights in enumerate(self._weights) if weights[which]]
        if not chosen:
            return np.zeros((self._count, self._count))
        weights = np.array([self._weights[index][which] for index in chosen])
        lower = np.array([self._lower[index] for index in chosen], dtype=np.float64)
        upper = np.array([self._upper[index] for index in chosen], dtype=np.float64)
        total: Floats = upper.T @ (weights[:, None] * lower)
        return total


def build_tables(problem: PipelineProblem, ideals: Ideals) -> Tables:
    """Price every pair of ideals.

    Complexity: O(terms * ideals^2) multiplications for ``terms`` about twice the number of (net, reader) pairs.
    """
    members = ideals.members
    crossing = _Terms(ideals.count, 2)
    pinned = _Terms(ideals.count, 1)
    for net in problem.nets:
        _add_net(net, members, crossing, pinned)
    held = _Terms(ideals.count, 3)
    for group in problem.parameters:
        if len(group.readers) > 1:
            inside = _inside(members, group.readers)
            _add_holds(inside, held, group.bytes, group.seconds + group.split_s, group.update_bytes)
            held.add(inside == 0, inside == len(group.readers), 0.0, -group.split_s, 0.0)
    own = [group for group in problem.parameters if len(group.readers) == 1]
    own_bytes = _per_block(problem.num_blocks, ((g.readers[0], g.bytes) for g in own))
    own_s = _per_block(problem.num_blocks, ((g.readers[0], g.seconds) for g in own))
    own_update = _per_block(problem.num_blocks, ((g.readers[0], g.update_bytes) for g in own))
    update = _additive(members, own_update) + held.total(2)
    if problem.update_in_turn:
        update = _largest(ideals, _largest_per_block(problem))
    return Tables(
        ideals=ideals,
        time_s=_additive(members, problem.block_s) + crossing.total(0),
        once_s=_additive(members, own_s) + held.total(1) + problem.stage_s,
        static_bytes=_additive(members, own_bytes) + held.total(0),
        pinned_bytes=_additive(members, problem.saved_bytes) + pinned.total(0),
        buffer_bytes=crossing.total(1),
        transient_bytes=_largest(ideals, problem.transient_bytes),
        update_bytes=update,
    )


def _inside(members: Bools, blocks: Sequence[int]) -> Counts:
    """Return how many of the blocks each ideal holds."""
    counts: Counts = members[:, list(blocks)].sum(axis=1, dtype=np.int64)
    return counts


def _add_holds(inside: Counts, terms: _Terms, *weights: float, also: Bools | None = None) -> None:
    """Add ``[some of the blocks is in J but not in I]``, restricted to the ideals I of ``also``."""
    for count in range(1, int(inside.max()) + 1):
        lower = inside == count - 1
        terms.add(lower if also is None else lower & also, inside >= count, *weights)


def _add_net(net: Net, members: Bools, crossing: _Terms, pinned: _Terms) -> None:
    """Add sends, receives and saves of one net."""
    made, inside = members[:, net.producer], _inside(members, net.readers)
    buffer_bytes = net.bytes + net.gradient_bytes
    crossing.add(~made, made & (inside < len(net.readers)), net.seconds, buffer_bytes)
    _add_holds(inside, crossing, net.seconds, buffer_bytes, also=made)
    _add_holds(inside, pinned, net.bytes, also=made)
    if net.savers:
        pinned.add(~made, made & members[:, list(net.savers)].any(axis=1), net.bytes)


def _per_block(num_blocks: int, entries: Iterable[tuple[int, float]]) -> list[float]:
    """Sum (block, value) entries by block."""
    totals = [0.0] * num_blocks
    for block, value in entries:
        totals[block] += value
    return totals


def _largest_per_block(problem: PipelineProblem) -> list[int]:
    """Return for each block the largest temporaries of the parameters that it reads."""
    largest = [0] * problem.num_blocks
    for group in problem.parameters:
        for v in group.readers:
            largest[v] = max(largest[v], group.update_bytes)
    return largest


def _additive(members: Bools, values: Sequence[float]) -> Floats:
    r"""Return the sum of a value over the blocks of J \ I."""
    prefix = members @ np.array(values, dtype=np.float64)
    difference: Floats = prefix[:, None] - prefix[None, :]
    return difference


def _largest(ideals: Ideals, values: Sequence[int]) -> Floats:
    r"""Return the largest value over the blocks of J \ I."""
    members, largest = ideals.members, np.zeros((ideals.count, ideals.count))
    if not any(values):
        return largest
    for j, smaller, v in ideals.covers:
        outside = ~members[:, v]
        np.maximum(largest[j], np.where(outside, np.maximum(largest[smaller], values[v]), 0.0), out=largest[j])
    return largest
