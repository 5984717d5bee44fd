"""The report of a capture: saved with its graph, and readable."""

from dataclasses import replace

from partita.ir.graph import ModelGraph
from partita.ir.report import CaptureReport, Comparison, InputEntry, ModuleEntry, OperatorCount
from partita.ir.serde import from_json, to_json
from tests.plans import make_graph

REPORT = CaptureReport(
    rung="classes kept",
    calls=3,
    glue=2,
    operators=40,
    modules=(
        ModuleEntry(decision="opened", class_name="Net", paths=("",), source="net.py:20"),
        ModuleEntry(decision="opened", class_name="Pair", paths=("pair",), reason="it reads x besides its arguments"),
        ModuleEntry(
            decision="kept whole",
            class_name="Router",
            paths=("router",),
            reason="a branch on values",
            source="net.py:8",
            stopped_at="net.py:9",
        ),
        ModuleEntry(decision="folded", class_name="Layer", paths=tuple(f"layers.{i}" for i in range(5))),
    ),
    comparisons=(
        Comparison(call="the example", compared=("results", "gradients"), shapes=((8, 4), ())),
        Comparison(call="another size", compared=("results",), shapes=((6, 4), ()), difference=2e-7),
        Comparison(call="eval()", problem="cannot be captured: it branches"),
    ),
    inputs=(
        InputEntry(name="x", shape=(8, 4), fixed_dims=(1,), batch_dim=0),
        InputEntry(name="image", shape=(3, 4, 4), fixed_dims=(0, 1, 2)),
        InputEntry(name="y", shape=()),
    ),
    rows=8,
    unknown=(OperatorCount(target="aten.odd.default", count=2),),
    blocks=5,
    distinct_blocks=2,
    remarks=("Something else.",),
)


def test_the_text_is_stable(golden):
    golden("reports/capture.txt", f"{REPORT}\n")


def test_a_model_kept_whole_says_why():
    text = str(CaptureReport(rung="whole", reason="it branches", stopped_at="net.py:3", why_not_cut="it branches"))
    assert "because    it branches" in text
    assert "stopped    at net.py:3" in text
    assert "nothing was compared" in text


def test_sentences_name_every_unusual_decision():
    assert REPORT.sentences() == (
        "pair is not folded: it reads x besides its arguments",
        "modules of class Router are kept whole: a branch on values",
        "Something else.",
    )
    assert "the batch is not cut: no axis" in CaptureReport(why_not_cut="no axis").sentences()


def test_it_travels_with_its_graph(tmp_path):
    graph = replace(make_graph(), report=REPORT)
    graph.save(tmp_path / "graph.json")
    assert ModelGraph.load(tmp_path / "graph.json").report == REPORT
    assert from_json(CaptureReport, to_json(REPORT)) == REPORT
    assert graph.notes == REPORT.sentences()


def test_verified_means_that_something_was_compared():
    assert REPORT.verified
    assert not CaptureReport(comparisons=REPORT.comparisons[-1:]).verified
