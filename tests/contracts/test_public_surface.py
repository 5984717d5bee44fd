import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import partita

VERBS = {"auto_parallelize", "capture", "inspect", "plan", "profile", "simulate", "solve"}
NOUNS = {
    "Cluster",
    "Example",
    "Limits",
    "ModelGraph",
    "ParallelModule",
    "PartitionProblem",
    "Plan",
    "ProfileTable",
    "Schedule",
    "Search",
}
ERRORS = {
    "CaptureError",
    "CostError",
    "DeadlockError",
    "ExecutionError",
    "InfeasibleError",
    "InvalidPlanError",
    "PartitaError",
    "PlanError",
    "PlanMismatchError",
    "RankFailedError",
    "SolverLimitError",
    "TransportError",
}
HEAVY = ("torch", "ortools", "pandas", "numpy", "networkx", "rich", "transformers")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_exported_names_are_exactly_these():
    assert set(partita.__all__) == VERBS | NOUNS | ERRORS
    assert sorted(partita.__all__) == partita.__all__


@pytest.mark.parametrize("name", sorted(VERBS | NOUNS))
def test_a_lazy_name_resolves_to_its_home(name):
    module, _, attribute = partita._HOMES[name].partition(":")
    assert getattr(partita, name) is getattr(import_module(module), attribute)


def test_names_are_either_eager_errors_or_have_a_home():
    assert set(partita._HOMES) == VERBS | NOUNS
    assert all(issubclass(getattr(partita, name), partita.PartitaError) for name in ERRORS)


def test_dir_lists_the_lazy_names_and_unknown_names_raise():
    assert set(partita.__all__) <= set(dir(partita))
    with pytest.raises(AttributeError, match="no attribute 'parallelise'"):
        _ = partita.parallelise


def test_no_public_name_is_the_name_of_a_module():
    modules = {module.name for module in pkgutil.iter_modules(partita.__path__)}
    assert modules & set(partita.__all__) == set()


def test_import_partita_is_light():
    loaded = _run(f"import sys, partita; dir(partita); print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("name", ["Plan", "Cluster", "ModelGraph", "Schedule", "Example", "Limits", "Search"])
def test_the_nouns_need_the_standard_library_only(name):
    loaded = _run(f"import sys, partita; partita.{name}; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_the_version_is_the_distribution_s():
    assert partita.__version__.count(".") == 2
    try:
        installed = importlib.metadata.version("partita")
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        return
    assert installed == partita.__version__


def test_the_package_is_typed():
    spec = importlib.util.find_spec("partita")
    assert (Path(spec.origin).parent / "py.typed").is_file()
