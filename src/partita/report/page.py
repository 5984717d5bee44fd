"""One HTML page about a plan: no network, no script, readable in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from partita.ir.explain import explain
from partita.ir.plan import Plan
from partita.ir.summary import headline
from partita.report.bars import CATEGORIES, bar_rows, parts
from partita.report.compare import diff
from partita.report.grid import cell_text, lay_out, row_labels
from partita.report.table import COLUMNS, honest_line, of_limit, row
from partita.report.text import ranges
from partita.units import format_bytes, format_seconds

MAX_CELLS = 20_000
"""Cells of the largest grid that is drawn whole; a browser draws so many at once."""
MAX_PARAMETERS = 2_000
"""Parameters that are listed."""
SHADES = ("#4c78a8", "#72b7b2", "#b279a2", "#54a24b", "#eeca3b", "#e45756", "#9d755d")
"""One colour per category of memory, told apart on white and on black."""

STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #f6f8fa; --f: #bcd6f2; --b: #bfe3b4; --w: #f5e2a8; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --soft: #1c2128; --f: #2b527a; --b: #2f6b3a;
 --w: #6b5a1e; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.line { background: var(--soft); border-left: 4px solid #4c78a8; padding: .6rem 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem;
 text-align: left; white-space: nowrap; font-variant-numeric: tabular-nums; }
.grid td { border: 1px solid var(--line); padding: 0 .35rem; text-align: center; font-size: 12px; min-width: 1.6rem; }
.grid th { font-weight: normal; font-size: 12px; border: 0; }
.F { background: var(--f); } .B, .I { background: var(--b); } .W { background: var(--w); }
.bar { display: flex; width: 32rem; height: 1.2rem; background: var(--soft); border: 1px solid var(--line); }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
pre { background: var(--soft); padding: 1rem; overflow-x: auto; }
"""


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="line">{line}</p>
{notes}
{body}
</body>
</html>
"""


def render_page(plan: Plan, against: Plan | None = None) -> str:
    """Return the page as text.

    Args:
        plan: The plan.
        against: Another plan to compare it with.
    """
    title = escape(headline(plan))
    sections = [
        ("Stages", _table(COLUMNS, (row(plan, stage) for stage in plan.stages))),
        ("Schedule", _grid(plan)),
        ("Memory", _bars(plan)),
        ("Between stages", _edges(plan)),
        ("Considered and not chosen", _runner_ups(plan)),
        ("Why", f"<pre>{escape(explain(plan))}</pre>"),
        ("Compared with the other plan (first)", f"<pre>{escape(diff(against, plan))}</pre>" if against else ""),
        ("Parameters", _parameters(plan)),
    ]
    body = "\n".join(f"<h2>{escape(name)}</h2>\n{content}" for name, content in sections if content)
    notes = "".join(f"<p>{escape(note)}</p>" for note in plan.notes)
    return PAGE.format(title=title, style=STYLE, line=escape(honest_line(plan)), notes=notes, body=body)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}</table></div>' if lines else ""


def _grid(plan: Plan) -> str:
    grid = lay_out(plan.schedule)
    shown = max(1, min(grid.num_steps, MAX_CELLS // max(1, len(grid.rows))))
    named = any(len({action.stage for action in actions if action}) > 1 for actions in grid.rows)
    lines = []
    for label, actions in zip(row_labels(plan), grid.rows, strict=True):
        cells = [
            f'<td class="{action.kind}" title="{action}, step {step}">{cell_text(action, named=named)}</td>'
            if action
            else "<td></td>"
            for step, action in enumerate(actions[:shown])
        ]
        lines.append(f"<tr><th>{escape(label)}</th>{''.join(cells)}</tr>\n")
    note = f"<p>{shown} of {grid.num_steps} steps are shown.</p>" if shown < grid.num_steps else ""
    about = "<p>Every action takes one step here: the grid shows order and waiting, not time.</p>"
    return f'{about}<div class="wide"><table class="grid">\n{"".join(lines)}</table></div>{note}'


def _bars(plan: Plan) -> str:
    rows = []
    for ranks, memory, peak, limit in bar_rows(plan):
        whole = max(limit, peak, 1)
        pieces = "".join(
            f'<div style="background:{shade};width:{100 * size / whole:.2f}%" '
            f'title="{name} {format_bytes(size)}"></div>'
            for (name, _, _), shade, size in zip(CATEGORIES, SHADES, parts(memory), strict=True)
            if size and peak
        )
        text = of_limit(peak, limit)
        rows.append(f'<tr><td>rank {ranges(ranks)}</td><td><div class="bar">{pieces}</div></td><td>{text}</td></tr>\n')
    legend = "".join(
        f'<span><i style="background:{shade}"></i>{name}</span>'
        for (name, _, _), shade in zip(CATEGORIES, SHADES, strict=True)
    )
    return f'<p class="legend">{legend}</p><div class="wide"><table>\n{"".join(rows)}</table></div>'


def _edges(plan: Plan) -> str:
    header = ("from", "to", "forward", "backward", "tensors")
    return _table(
        header,
        (
            (
                f"stage {edge.source}",
                f"stage {edge.target}",
                format_bytes(edge.bytes),
                format_bytes(edge.backward_bytes),
                ", ".join(edge.tensors[:8]) + (" …" if len(edge.tensors) > 8 else ""),
            )
            for edge in plan.edges
        ),
    )


def _runner_ups(plan: Plan) -> str:
    rows = []
    for other in plan.runner_ups:
        step = "-" if other.step_time_s == float("inf") else format_seconds(other.step_time_s)
        rows.append((other.description, step, other.reason))
    return _table(("plan", "step", "why not"), rows)


def _parameters(plan: Plan) -> str:
    listed = plan.parameter_plans[:MAX_PARAMETERS]
    rows = []
    for one in listed:
        shape, ranks = str(list(one.shape)), ranges(sorted(one.ranks))
        rows.append((one.name, shape, one.dtype, ranks, str(one.layout), format_bytes(one.bytes_per_rank)))
    table = _table(("name", "shape", "dtype", "ranks", "layout", "per rank"), rows)
    summary = f"{len(listed)} of {len(plan.parameter_plans)} parameters"
    return f"<details><summary>{summary}</summary>{table}</details>" if table else ""
