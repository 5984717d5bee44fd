"""The command line: its options are frozen, its exit codes mean what they say, and `inspect` needs no torch."""

import json
import subprocess
import sys
from argparse import _SubParsersAction
from pathlib import Path

import pytest

import partita
from partita import cli
from partita.cli import launch, make
from partita.cost.profile_table import Curve, ProfileTable
from partita.errors import CaptureError, InfeasibleError
from partita.ir.plan import Plan
from partita.ir.request import Limits, Search
from partita.ir.serde import to_json
from tests.plans import MIB, make_graph, make_plan

HELP = {"-h", "--help", "--debug"}
FROZEN = {
    "demo": {"--out", "--nproc", "--steps"},
    "plan": {
        *("model", "--cluster", "--out", "--example", "--optimizer", "--precision", "--pp", "--dp", "--tp", "--zero"),
        *("--schedule", "--microbatches", "--memory", "--batch", "--solve-time", "--seed", "--costs", "--json"),
    },
    "profile": {
        *("model", "--example", "--device", "--cluster", "--out", "--optimizer", "--rows", "--operators", "--split"),
        *("--anew", "--json"),
    },
    "inspect": {"plan", "--json", "--html", "--against", "--example", "--out"},
    "explain": {"plan"},
    "diff": {"first", "second"},
    "simulate": {"plan", "--trace", "--json"},
    "run": {"--nproc", "script", "arguments"},
    "doctor": {"--cluster", "--no-measure", "--json"},
}


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    return str(path)


@pytest.fixture
def fake_api(monkeypatch):
    """Stand in for the verbs, so that the command line is tested without a model."""
    calls = []

    class Api:
        @staticmethod
        def plan(model, example, **options):
            calls.append((model, example, options))
            return make_plan()

    monkeypatch.setitem(sys.modules, "partita.api", Api)
    monkeypatch.setattr(partita, "api", Api, raising=False)
    return calls


def test_profile_measures_and_saves(fake_api, user_module, tmp_path, monkeypatch, capsys):
    api = sys.modules["partita.api"]
    table = ProfileTable(device="cpu", environment="here", links={"host": Curve(((1, 1e-5), (2**20, 1e-3)))})
    monkeypatch.setattr(api, "profile", lambda *_args, **_options: table, raising=False)
    out = tmp_path / "costs.json"
    assert cli.main(["profile", f"{user_module}:build", "--cluster", "4xcpu", "--out", str(out)]) == 0
    assert ProfileTable.load(out) == table
    assert fake_api[0][2]["cost"] == table
    shown = capsys.readouterr().out
    assert "link host from 1 B" in shown
    assert "measured: 63 % of the blocks' time" in shown
    assert cli.main(["profile", f"{user_module}:build", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"] == "here"


def test_an_interrupted_profile_says_that_it_goes_on(fake_api, user_module, monkeypatch, capsys):
    api = sys.modules["partita.api"]

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "profile", interrupted, raising=False)
    assert cli.main(["profile", f"{user_module}:build"]) == 130
    assert "goes on from there" in capsys.readouterr().err


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A user's module in the current directory."""
    text = (
        "def build(): return 'model', ('example',)\n"
        "def bare(): return 'model'\n"
        "def example(): return {'x': 1}\n"
        "class Inner:\n    build = staticmethod(build)\n"
    )
    (tmp_path / "users_module.py").write_text(text, encoding="utf-8")
    (tmp_path / "broken_module.py").write_text("import no_such_thing\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "users_module"
    for name in ("users_module", "broken_module"):
        sys.modules.pop(name, None)


def options(parser):
    return {name for action in parser._actions for name in action.option_strings or (action.dest,)} - HELP


def test_commands_and_options_are_frozen():
    commands = next(action for action in cli.build_parser()._actions if isinstance(action, _SubParsersAction))
    assert {name: options(parser) for name, parser in commands.choices.items()} == FROZEN


def test_version_help_and_wrong_usage(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"partita {partita.__version__}\n"
    assert cli.main(["--help"]) == 0
    assert all(f"    {name}" in (text := capsys.readouterr().out) or name in text for name in list(FROZEN)[:1])
    assert cli.main([]) == 2
    assert cli.main(["inspect"]) == 2
    assert cli.main(["inspects", "x"]) == 2
    assert cli.main(["inspect", "x", "--no-such-option"]) == 2
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize("name", FROZEN)
def test_every_command_has_help(name, capsys):
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in FROZEN[name] if option.startswith("--"))
    assert max(map(len, text.splitlines())) <= 100


def test_inspect(plan_file, tmp_path, capsys):
    assert cli.main(["inspect", plan_file]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("step 41.2 ms (38.7–45.5), ")
    assert cli.main(["inspect", plan_file, "--html", str(tmp_path / "plan.html"), "--against", plan_file]) == 0
    assert "The plans are equal." in capsys.readouterr().out
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli.main(["inspect", plan_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "partita.report"


def test_explain_and_diff(plan_file, capsys):
    assert cli.main(["explain", plan_file]) == 0
    assert capsys.readouterr().out == make_plan().explain() + "\n"
    assert cli.main(["diff", plan_file, plan_file]) == 0
    assert capsys.readouterr().out == "The plans are equal.\n"


def test_a_clear_error_is_code_1_without_traceback(tmp_path, capsys):
    missing = str(tmp_path / "nothing.json")
    assert cli.main(["inspect", missing]) == 1
    assert capsys.readouterr().err == f"partita inspect: {missing}: No such file or directory\n"
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    assert cli.main(["inspect", str(tmp_path / "bad.json")]) == 1
    error = capsys.readouterr().err
    assert "bad.json: not JSON" in error
    assert "hint: " in error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [["--debug", "inspect"], ["inspect", "--debug"]])
def test_debug_shows_the_traceback(words, tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main([*words, str(tmp_path / "nothing.json")])


def test_plan_passes_everything_on(fake_api, user_module, tmp_path, capsys):
    words = f"plan {user_module}:build --cluster 4xcpu --out p.json --optimizer sgd --precision fp32 --pp 2,4 --dp 1"
    words += " --zero 0,1 --microbatches 8 --memory 40MiB --batch 32 --solve-time 2s --seed 7 --schedule 1f1b,gpipe"
    assert cli.main(words.split()) == 0
    ((model, example, given),) = fake_api
    assert (model, example) == ("model", ("example",))
    assert given == {
        "cluster": "4xcpu",
        "optimizer": "sgd",
        "precision": "fp32",
        "limits": Limits(memory_bytes=40 * MIB, num_microbatches=8, global_batch=32, solve_s=2.0),
        "search": Search(pp=(2, 4), dp=1, zero=(0, 1), schedule=("1f1b", "gpipe")),
        "seed": 7,
        "cost": None,
    }
    assert Plan.load(tmp_path / "p.json") == make_plan()
    assert capsys.readouterr().out.endswith("\nsaved as p.json\n")


def test_plan_with_defaults_and_json(fake_api, user_module, capsys):
    command = ["plan", f"{user_module}:bare", "--example", f"{user_module}:example", "--cluster", "4xcpu", "--json"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == to_json(make_plan())
    ((model, example, given),) = fake_api
    assert (model, example) == ("model", {"x": 1})
    assert given == {
        "cluster": "4xcpu", "optimizer": "adamw", "precision": "bf16", "limits": Limits(), "search": Search(),
        "seed": 0, "cost": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("users_module", "does not name a function"),
        ("users_module:", "does not name a function"),
        ("no_such_users_module:build", "there is no module 'no_such_users_module'"),
        ("users_module:nothing", "has no 'nothing'"),
        ("users_module:bare", "a model without an example"),
        ("broken_module:build", "No module named 'no_such_thing'"),
    ],
)
def test_a_wrong_reference_is_a_clear_error(reference, says, fake_api, user_module, capsys):
    if reference.startswith("broken"):
        with pytest.raises(ModuleNotFoundError, match=says):  # the user's own defect keeps its traceback
            cli.main(["plan", reference, "--cluster", "4xcpu"])
        return
    assert cli.main(["plan", reference, "--cluster", "4xcpu"]) == 1
    assert says in capsys.readouterr().err
    assert fake_api == []


def test_a_reference_may_have_dots(user_module):
    assert make.resolve(f"{user_module}:Inner.build")() == ("model", ("example",))


@pytest.mark.parametrize(
    "words", ["--pp two", "--memory 40GeB", "--microbatches 0", "--precision fp8", "--solve-time soon", "--batch -1"]
)
def test_wrong_values_are_wrong_usage(words, fake_api, user_module):
    assert cli.main(["plan", f"{user_module}:build", "--cluster", "4xcpu", *words.split()]) == 2
    assert fake_api == []


@pytest.mark.parametrize(("error", "code"), [(InfeasibleError, 3), (CaptureError, 1)])
def test_errors_have_their_exit_codes(error, code, fake_api, user_module, monkeypatch, capsys):
    def fail(*_, **__):
        raise error("does not fit", hint="try less")

    monkeypatch.setattr(sys.modules["partita.api"], "plan", fail)
    assert cli.main(["plan", f"{user_module}:build", "--cluster", "4xcpu"]) == code
    assert capsys.readouterr().err == "partita plan: does not fit\nhint: try less\n"


def test_run_needs_its_script(tmp_path, capsys):
    assert cli.main(["run", "--nproc", "2", str(tmp_path / "none.py")]) == 1
    assert "there is no script" in capsys.readouterr().err
    assert cli.main(["run", "--nproc", "0", "x.py"]) == 2


def test_run_passes_the_scripts_own_options_on():
    arguments = cli.build_parser(["run"]).parse_args(["run", "--nproc", "3", "train.py", "--json", "--nproc", "9", "x"])
    assert (arguments.nproc, arguments.script) == (3, "train.py")
    assert arguments.arguments == ["--json", "--nproc", "9", "x"]


def test_demo_gets_its_arguments(monkeypatch):
    seen = []
    module = type(sys)("partita.demo.run")
    module.main = seen.append
    monkeypatch.setitem(sys.modules, "partita.demo", type(sys)("partita.demo"))
    monkeypatch.setitem(sys.modules, "partita.demo.run", module)
    assert cli.main(["demo", "--out", "here", "--nproc", "2"]) == 0
    assert (seen[0].out, seen[0].nproc, seen[0].steps) == (Path("here"), 2, None)
    assert launch.run_demo(seen[0]) == 0


def test_a_closed_pipe_is_no_traceback(plan_file):
    command = [sys.executable, "-m", "partita", "inspect", plan_file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read()
        process.wait()
    assert b"Traceback" not in error


def test_the_module_and_the_command_are_the_same(plan_file):
    done = subprocess.run(
        [sys.executable, "-m", "partita", "inspect", plan_file], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("TinyLM on 5xcpu")
    assert done.stderr == ""


MODEL = (
    "import torch\n"
    "def build():\n    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), (torch.randn(6, 4),)\n"
    "def bare():\n    return build()[0]\n"
    "def examples():\n    return [(torch.randn(6, 4),), (torch.randn(3, 4),)]\n"
)


@pytest.fixture
def model_file(tmp_path, monkeypatch):
    path = tmp_path / "sub" / "a_users_model.py"
    path.parent.mkdir()
    path.write_text(MODEL, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(path)
    sys.modules.pop("a_users_model", None)


def test_inspect_captures_a_model_and_saves_its_graph(model_file, tmp_path, capsys):
    out = str(tmp_path / "graph.json")
    assert cli.main(["inspect", f"{model_file}:bare", "--example", f"{model_file}:examples", "--out", out]) == 0
    text = capsys.readouterr().out
    assert "example 2 3x4: results, gradients, buffers equal" in text
    assert "2 calls of modules" in text
    assert cli.main(["inspect", out]) == 0
    assert capsys.readouterr().out.strip() == text.rpartition("saved as")[0].strip()
    assert cli.main(["inspect", f"{model_file}:build", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rung"] == "recorded"


def test_inspecting_a_graph_needs_no_torch(tmp_path):
    path = tmp_path / "graph.json"
    make_graph().save(path)
    code = (
        "import sys; from partita.cli import main\n"
        f"assert main(['inspect', {str(path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "The mask is recomputed where it is needed." in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.py:build"], "there is no file 'none.py'"),
        (["MODEL:bare"], "without an example call"),
        (["MODEL:build", "--html", "x.html"], "only go with a plan file"),
        (["PLAN", "--out", "x.json"], "only go with a model"),
        (["none.json"], "No such file"),
    ],
)
def test_what_cannot_be_inspected_is_a_clear_error(words, says, model_file, plan_file, capsys):
    words = [word.replace("MODEL", model_file).replace("PLAN", plan_file) for word in words]
    assert cli.main(["inspect", *words]) == 1
    assert says in capsys.readouterr().err
