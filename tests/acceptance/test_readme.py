"""The Python blocks of the README and of docs/ run, in order, and print what the text blocks behind them show."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README_HEAD = 30


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if dict(blocks(page)).get("python")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for kind, text in blocks(page):
            if kind == "python":
                exec(compile(text, page.name, "exec"), names)
    shown = [line for kind, text in blocks(page) if kind == "text" for line in text.splitlines() if line]
    printed = output.getvalue().splitlines()
    assert [line for line in shown if line not in printed] == []


def test_the_readme_opens_with_the_call_the_plan_and_the_limits():
    head = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:README_HEAD])
    for part in ("partita.auto_parallelize(", "stage  blocks", "No GPU?", "Not yet:", "docs/architecture.md"):
        assert part in head


def test_the_links_of_the_pages_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
