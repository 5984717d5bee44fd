"""Laying programs over stages: what crosses, what is recomputed, what is copied, what follows the plan."""

import pytest
import torch
from torch import nn

from partita.errors import ExecutionError
from partita.runtime.stages import follow_stages, lay_out
from partita.tracer.program import same_steps
from tests.unit.tracer.traces import WIDTH, Model, rows, trace


def program_of(function, *args, count=3, **members):
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
    return trace(Model(function, layers=layers, **members), *(args or (rows(),))).program


def places(program, stages):
    """Return stage_of from a part of each step's name to its stage; recomputed steps have none."""
    found = {}
    for step in program.steps:
        if not step.replicable:
            found[step.id] = next(stage for part, stage in stages.items() if part in step.name)
    return found


def names(layout):
    return [[step.name for step in steps] for steps in layout.steps]


def skipping(self, x):
    first = self.layers[0](x)
    return self.layers[2](self.layers[1](first)) + first


def test_values_go_to_every_stage_that_reads_them_and_only_there():
    program = program_of(skipping)
    layout = lay_out(program, places(program, {"layers.0": 0, "layers.1": 1, "layers.2": 2, "add": 2}), 3)
    first, second, third = (step.writes[0] for step in program.steps[:3])
    assert layout.edges == {(0, 1): (first,), (0, 2): (first,), (1, 2): (second,)}
    assert layout.received == ((), (first,), (first, second))
    assert layout.home[third] == 2
    assert layout.tensors_of(1) == {"p:layers.1.weight", "p:layers.1.bias"}
    assert layout.result_names == (program.steps[-1].writes[0],)


def test_the_last_stage_gets_what_the_loss_reads():
    program = program_of(lambda self, x: (self.layers[0](x), self.layers[1](x)), count=2)
    stages = places(program, {"layers.0": 0, "layers.1": 1})
    early = program.steps[0].writes[0]
    assert lay_out(program, stages, 2).edges == {}
    assert lay_out(program, stages, 2, last_reads=(early,)).edges == {(0, 1): (early,)}


def masked(self, x):
    mask = torch.ones(x.shape[0], dtype=torch.bool)[:, None]
    x = torch.where(mask, self.layers[0](x), 0.0)
    return torch.where(mask, self.layers[1](x), x)


def test_cheap_values_are_recomputed_and_not_sent():
    program = program_of(masked, count=2)
    stages = places(program, {"layers.0": 0, "where_1": 1, "layers.1": 1, "where": 0})
    layout = lay_out(program, stages, 2)
    assert ["ones" in part for part in names(layout)] == [True, True]
    (message,) = layout.edges.values()
    assert len(message) == 1, "only the first layer's values cross"


def changing(self, x):
    x = self.layers[0](x)
    x = x.view(-1).mul_(2).view(-1, WIDTH)
    return self.layers[1](x)


def test_received_values_that_are_changed_are_copied_first():
    program = program_of(changing, count=2)
    layout = lay_out(program, {step.id: int(step.id > 0) for step in program.steps}, 2)
    assert layout.copied == (frozenset(), frozenset({program.steps[0].writes[0]}))
    together = lay_out(program, {step.id: 0 for step in program.steps}, 2)
    assert together.copied == (frozenset(), frozenset())


def test_a_changed_input_is_copied():
    program = program_of(lambda self, x: self.layers[0](x.add_(1)), count=1)
    layout = lay_out(program, {step.id: 0 for step in program.steps}, 1)
    assert layout.copied == (frozenset(program.inputs),)


def test_gradients_come_back_only_for_what_can_have_one():
    def choose(self, x):
        x = self.layers[0](x)
        index = x.argmax(1)
        return self.layers[1](x)[index]

    program = program_of(choose, count=2)
    stages = places(program, {"layers.0": 0, "argmax": 0, "layers.1": 1, "index": 1})
    layout = lay_out(program, stages, 2)
    values, index = layout.edges[0, 1]
    assert values in program.differentiable
    assert index not in program.differentiable


# ---------------------------------------------------------------- other calls of the same model


def test_another_call_follows_the_plan():
    base = program_of(skipping)
    stages = places(base, {"layers.0": 0, "layers.1": 1, "layers.2": 1, "add": 1})
    holders = {
        value: (stage,)
        for stage, path in [(0, "layers.0"), (1, "layers.1"), (1, "layers.2")]
        for value in (f"p:{path}.weight", f"p:{path}.bias")
    }
    other = program_of(lambda self, x: self.layers[2](self.layers[0](x).relu()))
    found = follow_stages(other, base, stages, holders, 2)
    assert {step.name: found[step.id] for step in other.steps} == {"layers.0#0": 0, "relu": 0, "layers.2#0": 1}
    backwards = program_of(lambda self, x: self.layers[0](self.layers[1](x)))
    with pytest.raises(ExecutionError, match=r"'layers.0#0' needs values of stage 1"):
        follow_stages(backwards, base, stages, holders, 2)


def test_programs_are_the_same_if_steps_operands_and_numbers_are():
    def shifted(self, x):
        return self.layers[0](x) + (1.0 if x.shape[0] > 1 else 2.0)

    base = program_of(shifted, count=1)
    smaller = program_of(shifted, rows(3), count=1)
    one = program_of(shifted, rows(1), count=1)
    assert same_steps(base, smaller, ((3, WIDTH),))
    assert not same_steps(base, one, ((1, WIDTH),))
    assert not base.sizes.holds(((1, WIDTH),)), "a refused program must not be used for these shapes afterwards"
    plain = program_of(lambda self, x: self.layers[0](x) + 1.0, count=1)
    assert same_steps(plain, program_of(lambda self, x: self.layers[0](x) + 1.0, rows(1), count=1), ((1, WIDTH),))
    assert plain.sizes.holds(((1, WIDTH),))
