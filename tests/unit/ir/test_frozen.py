"""The light dataclass behaves like the standard library's."""

import copy
import dataclasses
import pickle

import pytest

from partita.ir import frozen
from tests.plans import make_cluster, make_graph, make_plan, make_schedule


@frozen.dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    """A class of every kind of field."""

    a: int
    b: tuple[int, ...] = ()
    c: dict[str, int] = frozen.field(default_factory=dict)
    d: float = frozen.field(default=0.0, compare=False, metadata={"volatile": True})

    @property
    def double(self) -> int:
        """Twice ``a``."""
        return 2 * self.a


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standard:
    """A class of every kind of field."""

    a: int
    b: tuple[int, ...] = ()
    c: dict[str, int] = dataclasses.field(default_factory=dict)
    d: float = dataclasses.field(default=0.0, compare=False, metadata={"volatile": True})

    @property
    def double(self) -> int:
        """Twice ``a``."""
        return 2 * self.a


@frozen.dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """No field."""


BOTH = pytest.mark.parametrize("cls", [Light, Standard])


@BOTH
def test_values_defaults_and_properties(cls):
    noun = cls(a=3)
    assert (noun.a, noun.b, noun.c, noun.d, noun.double) == (3, (), {}, 0.0, 6)
    assert cls(a=1).c is not cls(a=1).c
    assert cls.__doc__ == "A class of every kind of field."


@BOTH
@pytest.mark.parametrize("values", [{}, {"b": ()}, {"a": 1, "z": 2}])
def test_wrong_arguments_are_type_errors(cls, values):
    with pytest.raises(TypeError):
        cls(**values)
    with pytest.raises(TypeError):
        cls(1)


@BOTH
def test_equality_is_by_value_of_compared_fields_and_type(cls):
    assert cls(a=1, d=2.0) == cls(a=1, d=3.0)
    assert cls(a=1) != cls(a=2)
    assert cls(a=1) != "other"
    assert Light(a=1) != Standard(a=1)


@BOTH
def test_hash_leaves_out_fields_that_are_not_compared(cls):
    assert hash(cls(a=1, c=(), d=2.0)) == hash(cls(a=1, c=(), d=3.0))


@BOTH
def test_nothing_can_be_changed(cls):
    noun = cls(a=1)
    for name in ("a", "unknown"):
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(noun, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del noun.a
    assert noun.a == 1
    assert not hasattr(noun, "__dict__")


@BOTH
def test_the_standard_functions_know_it(cls):
    noun = cls(a=1, b=(2,))
    assert dataclasses.is_dataclass(noun)
    assert dataclasses.is_dataclass(cls)
    assert [(f.name, f.type, f.compare) for f in dataclasses.fields(cls)] == [
        (name, dataclasses.fields(Standard)[index].type, name != "d") for index, name in enumerate("abcd")
    ]
    assert dataclasses.fields(noun)[3].metadata == {"volatile": True}
    assert dataclasses.replace(noun, a=5) == cls(a=5, b=(2,))
    assert dataclasses.asdict(noun) == {"a": 1, "b": (2,), "c": {}, "d": 0.0}
    assert repr(noun) == f"{cls.__name__}(a=1, b=(2,), c={{}}, d=0.0)"
    assert repr(Empty()) == "Empty()"


@BOTH
def test_it_travels(cls):
    noun = cls(a=1, c={"x": 1}, d=2.0)
    for twin in (pickle.loads(pickle.dumps(noun)), copy.copy(noun), copy.deepcopy(noun)):
        assert twin == noun
        assert twin.d == 2.0
    assert copy.deepcopy(noun).c is not noun.c


def test_a_class_without_fields():
    assert Empty() == Empty()
    assert hash(Empty()) == hash(Empty())
    assert Empty() != Light(a=1)


def test_only_the_one_form_is_known():
    with pytest.raises(TypeError, match="frozen"):
        frozen.dataclass(frozen=False, slots=True, kw_only=True)


@pytest.mark.parametrize("make", [make_plan, make_graph, make_cluster, make_schedule])
def test_the_nouns_are_values(make):
    noun = make()
    assert pickle.loads(pickle.dumps(noun)) == noun == copy.deepcopy(noun)
    assert hash(noun) == hash(make())
    assert dataclasses.replace(noun, name="other") != noun if hasattr(noun, "name") else True
