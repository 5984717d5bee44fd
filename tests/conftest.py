"""What holds for the whole run: no unlisted skip, no child process left behind, no network, golden texts."""

import os
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.multiprocess.pool import Pool

TESTS = Path(__file__).parent
SKIPS: dict[str, str] = tomllib.loads((TESTS / "skips.toml").read_text(encoding="utf-8"))["skips"]
SKIPPED = pytest.StashKey[list[tuple[str, str]]]()
# Children inherit it through the environment, so that one whose parent has died is still known as ours.
RUN_MARK = "PARTITA_TEST_RUN"
# How long a child may take to end after the last test, seconds: a worker flushes and unmaps its memory.
GRACE_S = 5.0

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile(
    "ci", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPPED] = []
    settings.load_profile("ci" if os.environ.get("CI") else "default")
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model is built from its configuration, never fetched
    os.environ[RUN_MARK] = uuid.uuid4().hex


# ---------------------------------------------------------------- skips


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield
    _judge_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: pytest.CollectReport = yield
    _judge_skip(report, collector.config)
    return report


def _judge_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """Record a listed skip; turn an unlisted one into a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    for pattern, reason in SKIPS.items():
        if fnmatchcase(report.nodeid, pattern):
            config.stash[SKIPPED].append((report.nodeid, reason))
            return
    report.outcome = "failed"
    report.longrepr = (
        f"unlisted skip of {report.nodeid}\n{said}\nlist it in tests/skips.toml with its reason, or run it"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if skipped := config.stash[SKIPPED]:
        terminalreporter.section("listed skips")
        for nodeid, reason in skipped:
            terminalreporter.line(f"{nodeid}: {reason}")


# ---------------------------------------------------------------- processes


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Fail the last test if a process started during the run outlives it."""
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind (pid: command): {left}"


def _children() -> dict[int, str]:
    """Return the living processes of this run as pid -> command; empty where there is no /proc.

    A process is of this run if this process is an ancestor, or if it carries the mark in its environment. The resource
    tracker of multiprocessing lives until the interpreter ends and does not count.
    """
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    ours = {os.getpid()}
    mark = f"{RUN_MARK}={os.environ[RUN_MARK]}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (entry / "environ").read_bytes()
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue
        if state in "ZX" or "resource_tracker" in command:
            continue
        parents[int(entry.name)] = int(parent)
        commands[int(entry.name)] = command
        if mark in environment.split(b"\0"):
            ours.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {pid: commands[pid] for pid in sorted(ours - {os.getpid()})}


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, _no_process_left_behind: None) -> Iterator["Pool"]:
    """Gloo ranks that stay alive between tests."""
    from tests.multiprocess.pool import Pool

    with Pool(tmp_path_factory.mktemp("pool")) as ranks:
        yield ranks


# ---------------------------------------------------------------- golden texts


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file below tests/golden; ``--update-golden`` writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"no golden file {name}; write it with `make golden`"
        assert text == path.read_text(encoding="utf-8")

    return compare
