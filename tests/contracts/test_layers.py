import pkgutil
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

import partita

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
}
MODULES = {module.name for module in pkgutil.iter_modules(partita.__path__)}
# What may import torch; everything else may not, not even through another module.
TORCH_SIDE = {"__main__", "api", "cli", "demo", "profiler", "runtime", "testing", "tracer"}


def _layers() -> list[set[str]]:
    return [{name.strip(" ()") for name in layer.split("|")} for layer in CONTRACTS["layers"]["layers"]]


@pytest.mark.parametrize("contract", sorted(CONTRACTS))
def test_contract_is_kept(contract, capsys):
    code = lint_imports(
        config_filename=str(ROOT / "pyproject.toml"), limit_to_contracts=(contract,), no_cache=True, no_logo=True
    )
    assert code == 0, capsys.readouterr().out


def test_each_module_has_its_layer():
    assert MODULES.issubset(set().union(*_layers()) | {"__main__"})


def test_each_module_off_the_torch_side_is_in_the_torch_free_contract():
    free = {module.removeprefix("partita.") for module in CONTRACTS["torch-free"]["source_modules"]}
    assert (MODULES - TORCH_SIDE).issubset(free)
    assert free & TORCH_SIDE == set()


def test_the_order_is_the_documented_one():
    position = {name: index for index, layer in enumerate(reversed(_layers())) for name in layer}
    chain = ["units", "ir", "cost", "partitioner", "planner", "api", "cli"]
    assert [position[name] for name in chain] == sorted(position[name] for name in chain)
