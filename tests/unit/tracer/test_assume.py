"""What a forward reads of its inputs' values: assumed while tracing, checked at every call."""

from __future__ import annotations

import torch
from torch import nn

from partita.tracer.assume import holds_for
from partita.tracer.capture import Captured, capture_model
from partita.tracer.signature import signature_of
from partita.tracer.verify import check_equal


class Body(nn.Module):
    """Layers between a branch on the inputs' values and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def through(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class Guarded(Body):
    """Does something about labels that are out of range."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 10:
            labels = labels.clamp(0, 9)
            if labels.min() == 7:
                ids = labels
        return nn.functional.cross_entropy(self.through(ids).flatten(0, 1), labels.flatten())


class Padded(Body):
    """Masks only where something is padded, as found in a tensor that is changed in place."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros_like(mask)
        seen[:, 1:] = mask[:, 1:]
        seen[:, 0].fill_(1)
        hidden = self.through(ids)
        if not torch.all(seen == 1).item():
            hidden = hidden * mask.unsqueeze(-1)
        return hidden.sum((1, 2)).mean()


class Counted(Body):
    """Runs as many layers as the input says."""

    def forward(self, ids: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers[: int(depth)]:
            hidden = torch.tanh(layer(hidden))
        return hidden.sum()


class Weighed(Body):
    """Branches on its own parameters."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.through(ids)
        return hidden.sum() if hidden.mean() > 100 else hidden.mean()


def _ids(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 10, (rows, 5), generator=torch.Generator().manual_seed(seed))


def _checked(model: nn.Module, *tensors: torch.Tensor) -> Captured:
    captured = capture_model(model, tensors)
    signature, given = signature_of(tensors, {})
    check_equal(model, captured.traced.program, signature, given)
    return captured


def test_a_branch_on_the_labels_is_assumed_and_the_batch_is_still_cut() -> None:
    captured = _checked(Guarded(), _ids(), _ids(1))
    assert captured.traced.recording is not None
    assert captured.rows is not None
    assert [a.value for a in captured.traced.program.assumptions] == [False]
    assert holds_for(captured.traced.program, (_ids(2), _ids(3)))
    assert not holds_for(captured.traced.program, (_ids(2), _ids(3) + 5))
    assert any("test_assume.py" in note for note in captured.graph.notes)


def test_memory_changed_in_place_is_part_of_the_check() -> None:
    mask = torch.ones(4, 5, dtype=torch.long)
    captured = _checked(Padded(), _ids(), mask)
    program = captured.traced.program
    assert [a.value for a in program.assumptions] == [True]
    first = mask.clone()
    first[:, 0] = 0
    assert holds_for(program, (_ids(), first)), "the first position does not matter"
    last = mask.clone()
    last[1, -1] = 0
    assert not holds_for(program, (_ids(), last))
    assert (last == torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])).all()
    other = _checked(Padded(), _ids(), last)
    assert [a.value for a in other.traced.program.assumptions] == [False]


def test_numbers_are_assumed_only_where_truths_do_not_do() -> None:
    captured = _checked(Counted(), _ids(), torch.tensor(3))
    assert [a.value for a in captured.traced.program.assumptions] == [3]
    assert not holds_for(captured.traced.program, (_ids(), torch.tensor(2)))


def test_what_depends_on_parameters_is_not_assumed() -> None:
    captured = capture_model(Weighed(), (_ids(),))
    assert captured.traced.recording is None
    assert "test_assume.py" in captured.traced.refusal


def test_what_another_capture_assumed_can_be_assumed_again() -> None:
    model = Padded()
    mask = torch.ones(4, 5, dtype=torch.long)
    mask[3, -1] = 0
    captured = capture_model(model, (_ids(), mask))
    known = captured.traced.program.assumptions
    signature, part = signature_of((_ids()[:2], mask[:2]), {})
    again = captured.tracer.trace(signature, part, known=known)
    assert [a.value for a in again.program.assumptions] == [False], "the whole batch decides, not the part"


def test_without_values_nothing_is_assumed() -> None:
    with torch.device("meta"):
        model = Guarded()
        tensors = (torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long))
    captured = capture_model(model, tensors)
    assert captured.traced.recording is None


def test_ctc_losses_are_traced() -> None:
    class Spoken(Body):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            logits = torch.log_softmax(self.through(ids), -1).transpose(0, 1)
            times = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.long)
            return nn.functional.ctc_loss(logits, targets, times, lengths, reduction="sum")

    targets = torch.randint(1, 8, (4, 2), generator=torch.Generator().manual_seed(3))
    captured = _checked(Spoken(), _ids(), targets, torch.tensor([2, 1, 2, 1]))
    assert captured.traced.recording is not None
