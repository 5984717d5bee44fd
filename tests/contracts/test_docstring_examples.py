import doctest
from importlib import import_module
from pathlib import Path

import pytest

import partita

SOURCE = Path(partita.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(("partita", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_run(module):
    result = doctest.testmod(import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
