"""The plan file's format is frozen: another field is a new version and a line in docs/plan-format.md."""

from pathlib import Path
from typing import get_type_hints

from partita.ir.cluster import Cluster, DeviceSpec, Level, Link
from partita.ir.frozen import fields_of
from partita.ir.graph import Item, ModelGraph, Op, TensorSpec
from partita.ir.layout import Layout
from partita.ir.plan import (
    BlockPlan,
    Edge,
    Estimate,
    Memory,
    ParameterPlan,
    Plan,
    Prediction,
    RunnerUp,
    SolveReport,
    StagePlan,
)
from partita.ir.report import CaptureReport, Comparison, InputEntry, ModuleEntry, OperatorCount
from partita.ir.schedule import Schedule
from partita.ir.serde import SCHEMAS, VERSION

DOCUMENT = Path(__file__).parents[2] / "docs" / "plan-format.md"
PLAN = (Plan, Cluster, DeviceSpec, Level, Link, Schedule, BlockPlan, StagePlan, Memory, Edge, ParameterPlan, Layout)
REST = (Prediction, SolveReport, RunnerUp, Estimate)
GRAPH = (ModelGraph, TensorSpec, Op, Item, CaptureReport, ModuleEntry, Comparison, InputEntry, OperatorCount)


def schema(nouns):
    lines = []
    for noun in nouns:
        hints = get_type_hints(noun)
        lines.append(noun.__name__)
        for field in fields_of(noun):
            kind = hints[field.name]
            text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
            text = text.replace("typing.", "").replace("partita.ir.", "")
            lines.append(f"  {field.name}: {text}{' (not written)' if field.metadata.get('volatile') else ''}")
    return "\n".join(lines) + "\n"


def test_the_fields_of_plans(golden):
    golden("schema/plan.txt", f"version {VERSION}\n{schema(PLAN + REST)}")


def test_the_fields_of_graphs(golden):
    golden("schema/graph.txt", f"version {VERSION}\n{schema(GRAPH)}")


def test_the_document_names_every_schema_and_every_field_of_a_plan():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in SCHEMAS.values() if name not in text] == []
    missing = [field.name for noun in (*PLAN, *REST) for field in fields_of(noun) if f"`{field.name}`" not in text]
    assert missing == []
    assert f'"version": {VERSION}' in text
