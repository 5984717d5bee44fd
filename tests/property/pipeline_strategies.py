"""Random pipeline problems: small DAGs with skips, shared parameters, tight memory, pins, both schedules."""

from hypothesis import strategies as st

from partita.partitioner.problem import Net, ParameterGroup, PipelineProblem


def _nets(draw, n, edges):
    nets = []
    for producer in range(n):
        targets = sorted({b for a, b in edges if a == producer})
        while targets:
            take = draw(st.integers(1, len(targets)))
            readers, targets = tuple(targets[:take]), targets[take:]
            savers = draw(st.sets(st.sampled_from((producer, *readers))))
            size, gradient = draw(st.integers(0, 9)), draw(st.sampled_from((0, 3)))
            seconds = draw(st.sampled_from((0.0, 0.25, 1.0, 2.5)))
            nets.append(
                Net(
                    producer=producer,
                    readers=readers,
                    bytes=size,
                    gradient_bytes=gradient,
                    seconds=seconds,
                    savers=tuple(sorted(savers)),
                )
            )
    return tuple(nets)


@st.composite
def pipeline_problems(draw, max_blocks=7, chain=False):
    n = draw(st.integers(1, max_blocks))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = [(v, v + 1) for v in range(n - 1)] if chain else []
    edges += [pair for pair in pairs if pair not in edges and draw(st.integers(0, 2)) == 0]
    stages = draw(st.integers(1, min(4, n)))
    sizes = st.integers(0, 8)
    groups = st.builds(
        ParameterGroup,
        readers=st.sets(st.integers(0, n - 1), min_size=1, max_size=3).map(lambda found: tuple(sorted(found))),
        bytes=sizes,
        seconds=st.sampled_from((0.0, 0.5, 3.0)),
        split_s=st.sampled_from((0.0, 1.5)),
        update_bytes=sizes,
    )
    seconds = st.sampled_from((0.0, 0.5, 1.0, 1.25, 2.0, 7.0))
    capacity = draw(st.sampled_from((15, 30, 60, 1000)))
    pins = draw(st.one_of(st.just(()), st.tuples(*[st.sampled_from((None, None, None, *range(stages)))] * n)))
    return PipelineProblem(
        num_stages=stages,
        num_microbatches=draw(st.sampled_from((1, 2, 5))),
        schedule=draw(st.sampled_from(("gpipe", "1f1b"))),
        capacities=tuple(capacity + draw(st.sampled_from((0, 0, 10))) for _ in range(stages)),
        forward_s=draw(st.tuples(*[seconds] * n)),
        backward_s=draw(st.tuples(*[seconds] * n)),
        saved_bytes=draw(st.tuples(*[sizes] * n)),
        transient_bytes=draw(st.tuples(*[sizes] * n)),
        edges=tuple(sorted(edges)),
        nets=_nets(draw, n, edges),
        parameters=tuple(draw(st.lists(groups, max_size=6))),
        base_bytes=draw(st.sampled_from((0, 4))),
        stage_s=draw(st.sampled_from((0.0, 0.5))),
        update_in_turn=draw(st.booleans()),
        pins=pins,
    )
