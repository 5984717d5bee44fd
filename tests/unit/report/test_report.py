"""Tables, bars, the honest line, comparisons and the page."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given

from partita.ir.explain import explain
from partita.ir.plan import Estimate, Memory, Plan, RunnerUp
from partita.report import diff, honest_line, memory_bars, plan_table, report, schedule_grid
from partita.report.bars import bar_rows
from partita.report.page import render_page
from tests.plans import MIB, make_cluster, make_plan
from tests.property.strategies import plans

GIB = 2**30


def big_plan() -> Plan:
    """The figures of the example in the design: 412 ms, 71.3 of 80 GiB on rank 5."""
    plan = make_plan()
    peaks = (70 * GIB, 70 * GIB, 0, 0, 0, int(71.3 * GIB))
    return replace(
        plan,
        cluster=make_cluster(device_kinds=(0,) * 6),
        memory_limits=(80 * GIB,) * 6,
        stages=(plan.stages[0], replace(plan.stages[1], ranks=(4, 5))),
        predicted=replace(
            plan.predicted,
            step_time=Estimate(value=0.412, low=0.387, high=0.455, source="modelled"),
            peak_bytes=peaks,
        ),
        solve=replace(plan.solve, objective=0.412, bound=0.4033),
    )


def test_the_honest_line_is_that_of_the_design():
    assert honest_line(big_plan()) == (
        "step 412 ms (387–455), 63 % of the time measured, gap 2.1 % (bound 403 ms), bubble 9 %, "
        "peak 71.3 of 80 GiB on rank 5"
    )


def test_the_honest_line_with_units_that_differ():
    plan = make_plan()
    predicted = replace(
        plan.predicted, step_time=Estimate(value=0.9, low=0.8, high=1.2, source="modelled"), peak_bytes=(MIB,) * 5
    )
    line = honest_line(replace(plan, predicted=predicted, memory_limits=(GIB,) * 5))
    assert line.startswith("step 900 ms (800 ms–1.20 s), ")
    assert line.endswith(", peak 1.00 MiB of 1 GiB on rank 0")


def test_the_fullest_rank_is_by_share_of_its_own_limit():
    plan = make_plan(memory_limits=(17 * MIB, *(32 * MIB,) * 4))
    assert honest_line(plan).endswith("peak 16.0 of 17 MiB on rank 0")


def test_the_table_has_a_row_per_stage():
    lines = plan_table(make_plan()).splitlines()
    assert lines[0].split()[:5] == ["stage", "blocks", "ranks", "dp", "tp"]
    assert lines[2].split()[0] == "0"
    assert "4.00 ms" in lines[2]
    assert "16.0 of 32 MiB" in lines[2]
    assert len({len(line) for line in lines[1:]}) == 1


def test_bars_are_in_proportion_and_have_a_legend():
    lines = memory_bars(make_plan(), width=32).splitlines()
    assert lines[0] == "rank 0-1 ██▓▓▒▒▒▒░░░░░░▞▪················ 16.0 of 32 MiB (50 %)"
    assert lines[1] == "rank 2-3 ███▓▓▓▒▒▒▒▒▒░░░░░░░░░▚▞▪········ 24.0 of 32 MiB (75 %)"
    assert lines[2] == f"rank 4   {'·' * 32} 0 B of 32 MiB (0 %)"
    assert lines[3].strip().startswith("█ weights  ▓ gradients")


def test_a_rank_without_limit_or_with_another_one_has_its_own_bar():
    plan = make_plan(memory_limits=(32 * MIB, 16 * MIB, 32 * MIB, 32 * MIB, 0))
    assert [ranks for ranks, _, _, _ in bar_rows(plan)] == [[0], [1], [2, 3], [4]]
    assert "0 of 0 B (-)" in memory_bars(plan)


def test_many_bars_are_cut_with_a_note():
    assert "… 1 of 3 bars shown" in memory_bars(make_plan(), height=1)


def test_equal_plans():
    assert diff(make_plan(), make_plan()) == "The plans are equal."


def test_what_differs():
    first = make_plan()
    stages = (replace(first.stages[0], blocks=(0,)), replace(first.stages[1], blocks=(1, 2, 3)))
    parameters = (*first.parameter_plans[:1], replace(first.parameter_plans[1], ranks=(2, 3)))
    predicted = replace(first.predicted, step_time=first.predicted.step_time.scaled(2.0), bubble_fraction=0.2)
    second = replace(first, stages=stages, parameter_plans=parameters, predicted=predicted)
    assert diff(first, second) == (
        "          first   second        change\n"
        "──────  ───────  ───────  ────────────\n"
        "step    41.2 ms  82.4 ms      +100.0 %\n"
        "bubble    9.0 %   20.0 %  +11.0 points\n"
        "\n"
        "Blocks that move\n"
        "  block 1 'layers.0': stage 0 -> 1\n"
        "\n"
        "Parameters\n"
        "  layers.1.weight: only in the first\n"
        "  layers.0.weight: rank 0-1 dp:R -> rank 2-3 dp:R"
    )


def test_plans_with_other_blocks_and_other_graphs():
    first = make_plan()
    merged = replace(first.blocks[0], items=(1, 2))
    second = replace(first, blocks=(merged, *first.blocks[1:]))
    assert "4 blocks and 4: they are cut differently" in diff(first, second)
    assert "Blocks that move" not in diff(first, replace(second, graph_fingerprint="other"))


def test_a_small_difference_is_not_called_equal():
    assert "differ only in details" in diff(make_plan(), make_plan(notes=()))


def test_many_moves_are_cut():
    first = make_plan()
    many = tuple(replace(first.parameter_plans[0], name=f"p{index}", names=(f"p{index}",)) for index in range(30))
    assert "… and 13 more" in diff(first, replace(first, parameter_plans=many))


def test_the_report_as_text_ends_with_the_honest_line():
    plan = make_plan()
    text = str(report(plan))
    assert text.splitlines()[-1] == honest_line(plan)
    assert plan_table(plan) in text
    assert schedule_grid(plan) in text
    assert "note: Rank 4" in text
    assert "The plans are equal." in str(report(plan, against=plan))


def test_the_report_as_json():
    plan = make_plan()
    text = report(plan, plan).to_json()
    document = json.loads(text)
    assert text == report(plan, plan).to_json()
    assert document["schema"] == "partita.report"
    assert document["line"] == honest_line(plan)
    assert document["figures"] == document["against"]
    assert document["figures"]["step_s"] == 0.0412
    assert document["grid"] == ["0F0 0F1 . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1 ."]
    assert [entry["peak_bytes"] for entry in document["memory"]] == [16 * MIB, 24 * MIB, 0]
    assert "against" not in json.loads(report(plan).to_json())


class Page(HTMLParser):
    """Checks that elements nest, and collects what would need a network or a script."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.cells = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.cells += tag == "td"
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        assert tag not in {"script", "link", "img", "iframe"}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing(tmp_path):
    plan = make_plan(notes=("<b> & co",))
    report(plan, plan).save_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "&lt;b&gt; &amp; co" in text
    assert "prefers-color-scheme: dark" in text
    assert "url(" not in text
    assert honest_line(plan) in text


def test_a_page_of_a_long_schedule_is_cut(monkeypatch):
    monkeypatch.setattr("partita.report.page.MAX_CELLS", 6)
    assert "3 of 6 steps are shown" in render_page(make_plan())


@given(plans())
def test_any_plan_can_be_shown(plan):
    shown = report(plan, plan)
    assert honest_line(plan) in str(shown)
    json.loads(shown.to_json())
    assert Page(render_page(plan)).open == []
    assert explain(plan).startswith("Toy on ")


def test_explain_prices_the_neighbouring_cuts():
    text = explain(make_plan())
    assert (
        "cut 0|1 one block earlier ('layers.0' with 4.00 KiB of parameters to stage 1): the slowest stage would take "
        "24.0 ms instead of 15.0 ms per microbatch, 9.00 ms more per step"
    ) in text
    assert "pp=1 dp=4 m=1: 46.4 ms, +5.20 ms (+13 %)" in text
    assert "pp=1 dp=1 m=1: does not fit; needs 96.0 MiB of 32.0 MiB" in text
    assert "stage 0 to 1: 8.00 KiB forward and 8.00 KiB back per microbatch (h0, e), 64.0 KiB per step" in text
    assert "memory is not what binds" in text
    assert "ended by solve_s=30" in text


def test_explain_of_other_plans():
    plan = make_plan()
    proved = replace(plan, solve=replace(plan.solve, status="optimal", bound=plan.solve.objective))
    assert "Proved by dp: no plan of the searched space takes less than 41.2 ms" in explain(proved)
    tight = replace(plan, memory_limits=(25 * MIB,) * 5)
    assert "memory is tight" in explain(tight)
    faster = replace(plan, runner_ups=(RunnerUp(description="x", step_time_s=0.04, reason="r"),))
    assert "x: 40.0 ms, -1.20 ms (-3 %); r" in explain(faster)
    one = replace(plan.stages[0], blocks=(0, 1, 2, 3), memory=Memory())
    assert "None: the model is in one stage." in explain(replace(plan, stages=(one,), edges=()))
    single = explain(replace(plan, schedule=replace(plan.schedule, num_microbatches=1)))
    assert "no slower by compute; sending, reduction, update or memory decide" in single
    assert "Nothing crosses between the stages." in explain(replace(plan, edges=()))


@pytest.mark.parametrize("number", [1, 2])
def test_plans_name_their_numbers(number):
    plan = make_plan(data_degree=number)
    assert f"2 stages x {number} replica{'s' if number > 1 else ''} on 4 of 5 ranks" in explain(plan)
