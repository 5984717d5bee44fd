"""In-place operations: who must stay on one stage with the change."""

import torch
from torch import nn

from partita.tracer.mutation import colocated_items
from tests.unit.tracer.traces import WIDTH, Model, rows, trace


def groups(function, **members):
    """Return the groups by the names of their steps."""
    program = trace(Model(function, **members), rows()).program
    by_id = {step.id: step.name for step in program.steps}
    return [[by_id[number] for number in group] for group in colocated_items(program)]


def test_nothing_changes_nothing_is_bound():
    assert groups(lambda self, x: self.linear(x) + 1) == []


def test_a_change_of_the_last_reader_binds_nobody():
    assert groups(lambda self, x: self.linear(x).mul_(2)) == []


def test_a_later_reader_of_the_old_value_stays_with_the_maker():
    def late(self, x):
        y = self.linear(x)
        view = y.view(-1)
        y.mul_(2)
        return view + 1

    found = groups(late)
    assert len(found) == 1
    assert {"linear#0", "mul_"} <= set(found[0])


def test_an_input_that_is_changed_binds_its_later_readers():
    def change(self, x):
        z = x.clone()
        z.add_(1)
        x.mul_(2)
        return self.linear(x) + z

    for group in groups(change):
        assert "mul_" not in group or "linear#0" in group


def test_a_buffer_that_is_changed_keeps_its_readers_together():
    def count(self, x):
        self.seen.add_(1)
        return self.linear(x) + self.seen

    model = Model(count)
    model.register_buffer("seen", torch.zeros(WIDTH))
    program = trace(model, rows()).program
    (group,) = colocated_items(program)
    assert {program.steps[number].name for number in group} == {"add_", "add"}


def test_batch_norms_statistics_belong_to_its_own_call():
    model = Model(lambda self, x: self.norm(self.linear(x)), norm=nn.BatchNorm1d(WIDTH))
    program = trace(model, rows()).program
    assert "b:norm.running_mean" in program.changed
    assert colocated_items(program) == ()
