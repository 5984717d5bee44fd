"""Control-flow operators in a container's own code are steps; long unrolled loops are kept whole."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop

from partita.ir.graph import ModelGraph
from partita.tracer import unrolled
from partita.tracer.capture import capture_model
from partita.tracer.rows import CoupledError
from partita.tracer.signature import signature_of
from partita.tracer.verify import check_equal
from tests.unit.tracer.traces import WIDTH, Model, rows

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while Dynamo reads the bodies


def branch(model, x, flag):
    """A branch that reads weights and the number of rows, with a branch inside."""

    def twice(given):
        return torch.cond(flag > 2, torch.sin, torch.cos, (model.linear(given),)) + torch.ones(x.shape[0], WIDTH)

    return torch.cond(flag > 0, twice, lambda given: given.clone(), (model.first(x),)).sum()


def loop(model, x, times):
    """A loop whose end the values decide."""

    def step(i, h):
        return i + 1, torch.tanh(model.linear(h))

    return while_loop(lambda i, _: i < times, step, (torch.zeros((), dtype=torch.long), model.first(x)))[1].sum()


def recurrence(model, x, dim):
    """A scan along a dim of the input."""
    given = model.first(x)

    def step(state, u):
        state = torch.tanh(model.linear(state)) + u
        return state, state.clone()

    return scan(step, given.new_zeros(*given.shape[:dim], *given.shape[dim + 1 :]), given, dim=dim)[1].sum()


def each(model, x):
    """A map over the rows."""
    return mapped(lambda row: torch.tanh(model.linear(row)) * row.shape[0], model.first(x)).sum()


def build(function):
    torch.manual_seed(0)
    return Model(function, first=nn.Linear(WIDTH, WIDTH)).double()


def sequences(count=4, length=5):
    torch.manual_seed(0)
    return torch.randn(count, length, WIDTH, dtype=torch.float64)


CALLS = {
    "cond": (branch, (rows().double(), torch.tensor(3)), (rows(3).double(), torch.tensor(0)), 6),
    "while_loop": (loop, (rows().double(), torch.tensor(3)), (rows(3).double(), torch.tensor(5)), 6),
    "scan": (recurrence, (sequences(), 1), (sequences(3, 7), 1), 4),
    "map_impl": (each, (sequences(),), (sequences(3, 7),), 4),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_a_step_that_is_exact_at_other_sizes_and_on_other_branches(name):
    function, example, other, count = CALLS[name]
    model = build(function)
    captured = capture_model(model, example)
    program = captured.traced.program
    (step,) = [step for step in program.steps if str(step.target) == name]
    assert "p:linear.weight" in step.reads
    signature, tensors = signature_of(other, {})
    assert program.sizes.holds(tuple(tuple(t.shape) for t in tensors))
    assert check_equal(model, program, signature, tensors) < 1e-12
    assert captured.graph.batch_rows == count


def test_its_graph_is_priced_and_saved(tmp_path):
    function, (x, dim), *_ = CALLS["scan"]
    graph = capture_model(build(function), (x, dim)).graph
    (op,) = [op for op in graph.ops if op.target == "scan"]
    assert op.flops >= x.shape[1] * 2 * x.shape[0] * WIDTH * WIDTH
    assert op.workspace > 0
    graph.save(tmp_path / "graph.json")
    assert ModelGraph.load(tmp_path / "graph.json") == graph


def test_of_two_branches_the_dearer_counts():
    function, example, *_ = CALLS["cond"]
    graph = capture_model(build(function), example).graph
    (op,) = [op for op in graph.ops if op.target == "cond"]
    assert op.flops >= 2 * 6 * WIDTH * WIDTH


def test_a_loop_of_unknown_length_is_noted():
    function, example, *_ = CALLS["while_loop"]
    assert any("priced as one step" in note for note in capture_model(build(function), example).graph.notes)


@pytest.mark.parametrize(
    ("function", "example", "reason"),
    [
        (
            lambda m, x: torch.cond(x.mean() > 0, m.linear, lambda given: given.clone(), (m.first(x),)),
            (rows().double(),),
            "not linear in a reduction over the batch",
        ),
        (
            lambda m, x, flag: torch.cond(
                flag > 0, lambda given: given - given.mean(0), lambda given: given.clone(), (m.first(x),)
            ),
            (rows().double(), torch.tensor(-1)),
            "reads a reduction over the batch",
        ),
        (
            lambda m, x: while_loop(lambda h: h.sum() < 0, lambda h: (m.linear(h),), (m.first(x),))[0],
            (rows().double(),),
            "not linear in a reduction over the batch",
        ),
    ],
    ids=["condition", "branch not taken", "end"],
)
def test_rows_that_meet_inside_are_not_cut(function, example, reason):
    captured = capture_model(build(function), example)
    assert captured.traced.recording is not None
    assert captured.rows is None
    assert any(reason in note for note in captured.graph.notes)


def test_a_scan_along_the_first_dim_leaves_the_second_for_the_rows():
    captured = capture_model(build(recurrence), (sequences(), 0))
    assert captured.rows.axis == (0, 1)
    with pytest.raises(CoupledError, match="steps along the rows"):
        captured.traced.rows((0, 0))


def test_random_operators_inside_are_seen():
    def dropped(m, x, flag):
        return torch.cond(flag > 0, lambda given: torch.dropout(given, 0.5, True), torch.sin, (m.first(x),)).sum()

    program = capture_model(build(dropped), (rows().double(), torch.tensor(1))).traced.program
    assert [step.random for step in program.steps if str(step.target) == "cond"] == [True]


class Unrolled(nn.Module):
    """A Python loop over time steps."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        state, found = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            found.append(state[0])
        return torch.stack(found, 1)


def test_a_class_that_unrolls_a_long_loop_is_kept_whole(monkeypatch):
    monkeypatch.setattr(unrolled, "MOST_OPERATORS", 100)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unrolled(), nn.Linear(WIDTH, WIDTH)).double()
    captured = capture_model(model, (sequences(2, 1500),))
    assert [step.name for step in captured.traced.program.steps] == ["0#0", "1#0", "2#0"]
    (note,) = [note for note in captured.graph.notes if "Unrolled are kept whole" in note]
    assert "more than 100 operators" in note
    assert "test_control.py" in note
    assert check_equal(model, captured.traced.program, *signature_of((sequences(2, 1500),), {})) < 1e-12


def test_a_model_that_unrolls_a_long_loop_is_one_block_with_advice(monkeypatch):
    monkeypatch.setattr(unrolled, "MOST_OPERATORS", 100)
    captured = capture_model(Unrolled().double(), (sequences(2, 1500),))
    assert len(captured.graph.items) == 1
    assert any("scan" in note for note in captured.graph.notes)


def test_depth_alone_is_no_loop(monkeypatch):
    monkeypatch.setattr(unrolled, "MOST_OPERATORS", 20)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(30)])
    assert len(capture_model(model, (rows(),)).traced.program.steps) > 20
