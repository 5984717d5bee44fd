import pickle

import pytest

from partita import errors

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_in_the_drawn_tree_below_its_parent(cls):
    lines = (errors.__doc__ or "").splitlines()
    names = {
        line.replace("│", " ").replace("├──", "   ").replace("└──", "   ").split()[0]: line for line in lines if line
    }
    line = names[cls.__name__]
    if cls is errors.PartitaError:
        return
    parent_line = names[cls.__base__.__name__]
    assert lines.index(parent_line) < lines.index(line)
    assert line.index(cls.__name__) == parent_line.index(cls.__base__.__name__) + 4


def test_the_tree_is_what_callers_catch():
    assert issubclass(errors.PartitaError, Exception)
    assert not issubclass(errors.PartitaError, ValueError | RuntimeError | AssertionError)
    plan_errors = {cls.__name__ for cls in ALL if issubclass(cls, errors.PlanError)} - {"PlanError"}
    assert plan_errors == {
        "InfeasibleError",
        "InvalidPlanError",
        "PlanMismatchError",
        "ScheduleSyntaxError",
        "SolverLimitError",
    }
    execution_errors = {cls.__name__ for cls in ALL if issubclass(cls, errors.ExecutionError)} - {"ExecutionError"}
    assert execution_errors == {"DeadlockError", "RankFailedError", "TransportError"}
    assert issubclass(errors.ScheduleSyntaxError, errors.InvalidPlanError)


@pytest.mark.parametrize("cls", ALL)
def test_message_hint_and_data_are_readable(cls):
    error = cls("needs 91.2 GiB, has 80.0 GiB", hint="try zero=1", rank=3, needed_bytes=97)
    assert str(error) == "needs 91.2 GiB, has 80.0 GiB\nhint: try zero=1"
    assert (error.message, error.hint) == ("needs 91.2 GiB, has 80.0 GiB", "try zero=1")
    assert dict(error.data) == {"rank": 3, "needed_bytes": 97}
    assert error.rank == 3
    assert str(cls("alone")) == "alone"
    assert "alone" in repr(cls("alone"))


def test_data_is_read_only_and_unknown_names_are_told():
    error = errors.PlanError("x", rank=3)
    with pytest.raises(TypeError):
        error.data["rank"] = 4
    with pytest.raises(AttributeError, match=r"'PlanError' has no attribute 'rnk'; its data: rank"):
        _ = error.rnk


@pytest.mark.parametrize("cls", ALL)
def test_errors_cross_processes(cls):
    error = cls("message", hint="hint", rank=3, where=("a.py", 7))
    error.add_note("raised on rank 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.data == error.data
    assert copy.where == ("a.py", 7)
    assert copy.__notes__ == ["raised on rank 3"]
