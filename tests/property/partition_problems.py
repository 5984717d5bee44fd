"""Random bare partition problems, small enough for brute force; times are multiples of 1/64, so that sums are exact."""

from __future__ import annotations

from itertools import product
from math import inf

from hypothesis import strategies as st

from partita.partitioner import DeviceClass, PartitionProblem
from partita.partitioner.maxload import evaluate

TICK = 1 / 64


@st.composite
def partition_problems(draw: st.DrawFn, max_nodes: int = 6) -> PartitionProblem:
    """Few nodes with nets, colocation and sizes, on up to three devices of up to two classes."""
    n = draw(st.integers(1, max_nodes))
    pairs = [(u, v) for v in range(n) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2 * n)) if pairs else []
    ticks = st.integers(0, 64).map(lambda t: t * TICK)
    sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)))
    limits = st.one_of(st.none(), st.integers(max(sizes), max(sum(sizes), 1)))
    shapes = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1)]))
    banned = st.integers(0, 9).map(lambda k: k == 0)
    classes = tuple(
        DeviceClass(
            name=f"class {c}",
            count=count,
            times=tuple(inf if draw(banned) else draw(ticks) for _ in range(n)),
            memory_bytes=draw(limits),
            communicates=c == 0 or draw(st.booleans()),
        )
        for c, count in enumerate(shapes)
    )
    together = (
        draw(st.lists(st.lists(st.integers(0, n - 1), min_size=2, max_size=3, unique=True), max_size=1))
        if n > 2
        else []
    )
    return PartitionProblem(
        nodes=tuple(f"n{v}" for v in range(n)),
        classes=classes,
        sizes=sizes,
        edges=tuple(edges),
        costs=tuple(draw(st.lists(st.integers(0, 24).map(lambda t: t * TICK), min_size=n, max_size=n))),
        order=tuple(edges),
        colocated=tuple(map(tuple, together)),
    )


def brute_force(problem: PartitionProblem, *, contiguous: bool) -> float:
    """Return the least objective over all assignments."""
    every = product(range(problem.num_devices), repeat=len(problem.nodes))
    return min(evaluate(problem, assignment, contiguous=contiguous).objective for assignment in every)
