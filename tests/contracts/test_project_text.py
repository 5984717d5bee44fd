"""The project's files name nothing that is true on one machine only, and leave no marks of unfinished work."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED_FOLDERS = {
    ".git",
    ".venv",
    "build",
    "dist",
    "demo",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
}

# Spelled in parts, so that this file passes its own test.
HOSTS = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"))]
FOLDERS = ["work", "tmp", "root", "home"]
MARKS = ["".join(parts) for parts in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"))]
FORBIDDEN = {
    "a host of a package registry": "|".join(re.escape(host) for host in HOSTS),
    # Not "~/work/", not "a/tmp/b", not a link's path.
    "a path of one machine": rf"(?<![\w.~<>}}-])/(?:{'|'.join(FOLDERS)})/",
    "a mark of unfinished work": rf"\b(?:{'|'.join(MARKS)})\b",
}


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:  # an unpacked source distribution
        found = [path for path in ROOT.rglob("*") if not IGNORED_FOLDERS & set(path.relative_to(ROOT).parts)]
    return [path for path in found if path.is_file()]


def _text(path: Path) -> str:
    content = path.read_bytes()
    return "" if b"\0" in content else content.decode("utf-8")


def test_the_listing_finds_the_project():
    names = {path.relative_to(ROOT).as_posix() for path in _files()}
    assert {"pyproject.toml", "src/partita/units.py", "tests/contracts/test_project_text.py"} <= names


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_contains(what):
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _files()
        for number, line in enumerate(_text(path).splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join([what, *found])


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a host of a package registry", f"index-url = https://{HOSTS[0]}/simple"),
        ("a path of one machine", f"open('/{FOLDERS[1]}/x')"),
        ("a mark of unfinished work", f"# {MARKS[0]}: later"),
    ],
)
def test_the_patterns_catch(what, line):
    assert re.search(FORBIDDEN[what], line)
