"""The rules of conftest.py, seen failing: each is tried on a small suite of its own in another process."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run_suite(tmp_path):
    """Run pytest on one test file under a copy of conftest.py; returns exit code and output."""

    def run(source: str, name: str = "test_it.py") -> tuple[int, str]:
        shutil.copy(TESTS / "conftest.py", tmp_path)
        (tmp_path / "skips.toml").write_text('[skips]\n"*::test_listed" = "the listed reason"\n', encoding="utf-8")
        (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (tmp_path / name).write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_listed_skip_passes_and_is_printed(run_suite):
    code, output = run_suite("import pytest\ndef test_listed(): pytest.skip('here')\ndef test_other(): pass\n")
    assert code == 0, output
    assert "test_it.py::test_listed: the listed reason" in output


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\ndef test_a(): pytest.skip('no device')\n",
        "import pytest\n@pytest.mark.skipif(True, reason='no device')\ndef test_a(): pass\n",
        "import pytest\npytest.skip('no device', allow_module_level=True)\n",
        "import pytest\npytest.importorskip('no_such_device', reason='no device')\n",
    ],
    ids=["call", "mark", "module", "import"],
)
def test_an_unlisted_skip_fails_the_run(run_suite, source):
    code, output = run_suite(source)
    assert code != 0
    assert "unlisted skip" in output
    assert "no device" in output


def test_an_expected_failure_is_no_skip(run_suite):
    code, output = run_suite("import pytest\n@pytest.mark.xfail\ndef test_a(): assert False\n")
    assert code == 0, output


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are listed through /proc")
@pytest.mark.parametrize("orphaned", [False, True])
def test_a_process_left_behind_fails_the_run(run_suite, orphaned):
    # The child outlives the grace time, and ends by itself soon after.
    start = "subprocess.Popen(['sleep', '8'], start_new_session=True)"
    if orphaned:
        start = "subprocess.run(['sh', '-c', 'sleep 8 >/dev/null 2>&1 &'])"
    code, output = run_suite(f"import subprocess\ndef test_a(): {start}\n")
    assert code != 0
    assert re.search(r"processes left behind.*sleep", output)
