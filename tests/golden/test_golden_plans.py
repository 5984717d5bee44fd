"""The hand-made plan and what is shown of it, as text: a change of format or wording shows in the diff."""

from dataclasses import replace

from partita.errors import InvalidPlanError
from partita.ir.explain import explain
from partita.ir.plan import Plan
from partita.ir.serde import from_json, to_json
from partita.ir.verify import check, rules_of
from partita.report import diff, report
from tests.plans import make_cluster, make_graph, make_plan, make_schedule


def test_documents(golden):
    golden("plans/tiny_plan.json", to_json(make_plan()))
    golden("plans/tiny_graph.json", to_json(make_graph()))
    golden("plans/cluster.json", to_json(make_cluster()))
    golden("plans/schedule.json", to_json(make_schedule()))


def test_reports(golden):
    plan = make_plan()
    other = replace(plan, data_degree=1, global_batch=16, solve=replace(plan.solve, bound=0.03))
    golden("reports/inspect.txt", f"{report(plan)}\n")
    golden("reports/inspect.json", report(plan).to_json())
    golden("reports/explain.txt", f"{explain(plan)}\n")
    golden("reports/diff.txt", f"{diff(plan, other)}\n")


def test_messages(golden):
    plan, messages = make_plan(), []
    broken = replace(plan, global_batch=1, stages=(plan.stages[0], replace(plan.stages[1], ranks=(1, 2))))
    texts = [to_json(plan), to_json(plan)]
    texts[0] = texts[0].replace('"ranks": [2, 3]', '"ranks": [2, "3"]')
    texts[1] = texts[1].replace('"tensor_degree"', '"tensor_degre"', 1)
    for run in (lambda: check(broken), lambda: from_json(Plan, texts[0]), lambda: from_json(Plan, texts[1])):
        try:
            run()
        except InvalidPlanError as error:
            messages.append(str(error))
    golden("reports/messages.txt", "\n\n".join(messages) + "\n")


def test_rules(golden):
    nouns = (make_graph(), make_cluster(), make_schedule(), make_plan())
    rules = [rule for noun in nouns for group in rules_of(type(noun)) for rule in group]
    golden("reports/rules.txt", "".join(f"{rule.code} {rule.sentence}\n" for rule in rules))
