"""The paper's tables from runs whose figures can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from report_records import MANIFEST, METHODS, records, summary

from ecospec.harness.paper_tables import paper_tables
from ecospec.harness.report import MethodInfo
from ecospec.harness.run_reading import RunData

PARTS = [{"label": m.label, "policy": m.label, "predictor": None} for m in METHODS[1:]]


def run(name: str, suite: str = "gsm8k", **facts: Any) -> RunData:
    manifest = {**MANIFEST, "suite": suite, "batch_size": 1, "method_parts": PARTS, **facts}
    return RunData(name, Path(name), manifest, summary(records()), {}, missing=facts.get("missing", 0))


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table below a title, header first."""
    after = page.split(f"## {title}")[1].split("\n\n")[1]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in after.splitlines()]
    return [line for line in lines if not line[0].startswith("---")]


def test_table_1_has_three_lines_a_method_and_a_column_a_suite() -> None:
    page = paper_tables([run("a"), run("b", "amc")])
    lines = table(page, "Table 1: embedded, T = 0, γ = 4")
    assert lines[0] == ["", "", "gsm8k", "amc", "Avg."]
    # Spd of confidence: 15 seconds of AR (3 of prefill) over 9; Len: 12 / 6; Exp: 42 pairs / 6 steps / 2 layers
    assert lines[4:7] == [
        ["confidence", "Spd", "1.67", "1.67", "1.67"],
        ["", "Len", "2.00", "2.00", "2.00"],
        ["", "Exp", "3.50", "3.50", "3.50"],
    ]
    assert lines[10] == ["oracle", "Spd", "–", "–", "–"]
    assert [line[0] for line in lines[1::3]] == ["AR", "confidence", "marginal", "oracle"]


def test_a_mean_is_over_the_suites_that_have_a_value() -> None:
    other = run("b", "amc")
    page = paper_tables([run("a"), RunData("b", other.folder, other.manifest, summary([]), {}, 3)])
    lines = table(page, "Table 1: embedded, T = 0, γ = 4")
    assert lines[5] == ["", "Len", "2.00", "–", "2.00"]
    assert "- b: interrupted: 0 of 3 prompts are finished" in page


def test_temperatures_and_targets_have_tables_of_their_own() -> None:
    page = paper_tables([run("a"), run("b", temperature=1.0), run("c", target="other")])
    for title in ("embedded, T = 0, γ = 4", "embedded, T = 1, γ = 4", "other, T = 0, γ = 4"):
        assert table(page, f"Table 1: {title}")[0] == ["", "", "gsm8k", "Avg."]
    assert "Tables 6 to 8" not in page
    assert "Tables 11 and 12" not in page


def test_batch_sizes_and_budgets_are_columns() -> None:
    page = paper_tables([run("a", batch_size=8), run("b"), run("c", batch_size=2), run("d", budget=5)])
    sizes = table(page, "Tables 6 to 8, batch sizes: gsm8k, embedded, T = 0, γ = 4")
    assert sizes[0] == ["", "", "1", "2", "8"]
    # ρ of confidence: AR's 10.8 s / 12 steps over 3.6 s / 6 steps
    assert sizes[6] == ["", "ρ", "1.500", "1.500", "1.500"]
    budgets = table(page, "Tables 11 and 12, budgets γ: gsm8k, embedded, T = 0")
    assert budgets[0] == ["", "", "4", "5"]


def test_the_time_of_a_step() -> None:
    lines = table(paper_tables([run("a")]), "Time of a step in ms, mean over suites: embedded, T = 0, γ = 4")
    header, confidence = lines[0], lines[2]
    assert confidence[header.index("T_verify")] == "600.000"
    assert confidence[header.index("T_draft")] == "200.000"
    assert confidence[header.index("ρ")] == "1.500"
    assert confidence[header.index("Spd")] == "1.67"


def test_several_predictors_are_named_and_compared() -> None:
    parts = [
        {"label": "confidence", "policy": "confidence", "predictor": None},
        {"label": "marginal", "policy": "marginal-cost", "predictor": "learned"},
        {"label": "oracle", "policy": "marginal-cost", "predictor": "oracle"},
    ]
    page = paper_tables([run("a", method_parts=parts)])
    lines = table(page, "Tables 9 and 10, predictors: embedded, T = 0, γ = 4")
    # overlap: 0.5 in 4 steps and 0.8 in 2
    assert ["marginal-cost with learned", "overlap, %", "60.0", "60.0"] in lines


def test_of_two_runs_with_a_method_the_first_counts_and_that_is_said() -> None:
    second = with_prefill("a-2", 9.0)
    assert paper_tables([second]) != paper_tables([run("a")])
    page = paper_tables([run("a"), second])
    said = "- a-2: AR, confidence, marginal, oracle stand above as they are in a, which has the same suite and setting"
    assert page == paper_tables([run("a")]) + f"\n{said}\n"


def with_prefill(name: str, seconds: float, suite: str = "gsm8k", **facts: Any) -> RunData:
    """Every method but AR takes so many seconds to the first token of each of the three prompts."""
    slower = [replace(each, prefill_seconds=seconds) if each.method != "AR" else each for each in records()]
    return replace(run(name, suite, **facts), report=summary(slower))


def with_yardstick(name: str, suite: str = "gsm8k", **facts: Any) -> RunData:
    """Passes of marginal take 3/4 of the time that those of confidence take, those of clairvoyant the half."""
    shares = {"AR": 1.0, "confidence": 1.0, "marginal": 0.75, "oracle": 0.5}
    found = [
        replace(
            each,
            method="clairvoyant" if each.method == "oracle" else each.method,
            phase_seconds={**each.phase_seconds, "verify": each.phase_seconds["verify"] * shares[each.method]},
        )
        for each in records()
    ]
    methods = [*METHODS[:3], MethodInfo("clairvoyant", true_routing=True)]
    return replace(run(name, suite, **facts), report=summary(found, methods))


def test_verification_has_what_sees_the_true_routing_as_well() -> None:
    lines = table(paper_tables([run("a"), run("b", "amc")]), "Verification: embedded, T = 0, γ = 4")
    assert lines[0] == ["", "", "gsm8k", "amc", "Avg."]
    # α·ρ: AR's passes take 10.8 s for 12 tokens, the method's 3.6 s. Only marginal has an overlap.
    assert lines[5:9] == [
        ["confidence", "Len", "2.00", "2.00", "2.00"],
        ["", "Exp", "3.50", "3.50", "3.50"],
        ["", "ρ", "1.500", "1.500", "1.500"],
        ["", "α·ρ", "3.000", "3.000", "3.000"],
    ]
    assert lines[13] == ["", "overlap, %", "60.0", "60.0", "60.0"]
    # 32 pairs in 6 steps of 2 layers
    assert lines[14:] == [
        ["oracle", "Len", "2.00", "2.00", "2.00"],
        ["", "Exp", "2.67", "2.67", "2.67"],
        ["", "ρ", "1.500", "1.500", "1.500"],
        ["", "α·ρ", "3.000", "3.000", "3.000"],
    ]


def test_headroom_is_a_table_where_there_is_a_yardstick() -> None:
    page = paper_tables([with_yardstick("a"), run("b", "amc")])
    # α·ρ: confidence 3, marginal 4, clairvoyant 6
    lines = table(page, "Headroom closed in %: embedded, T = 0, γ = 4")
    assert lines == [["", "", "gsm8k", "amc", "Avg."], ["marginal", "clairvoyant", "33.3", "–", "33.3"]]
    assert "the α·ρ of confidence to that of the yardstick" in page
    assert "eadroom" not in paper_tables([run("a")])


def test_the_time_of_a_step_by_suite_where_there_are_several() -> None:
    page = paper_tables([run("a"), with_yardstick("b", "amc")])
    lines = table(page, "Time of a step in ms by suite: embedded, T = 0, γ = 4")
    assert ["", "T_verify", "600.000", "450.000", "525.000"] in lines
    assert [line[1] for line in lines[1:3]] == ["T_verify", "T_commit"]
    assert "by suite" not in paper_tables([run("a")])


def test_temperatures_are_columns_over_the_suites_that_all_have() -> None:
    page = paper_tables(
        [
            run("a", temperature=1.0, suite="amc"),
            run("b"),
            with_prefill("c", 2.0, "amc"),
            with_prefill("d", 3.0, temperature=1.0),
            with_prefill("e", 9.0, "mtbench", temperature=1.0),
        ]
    )
    lines = table(page, "Temperatures, mean over gsm8k, amc: embedded, γ = 4")
    assert lines[0] == ["", "", "T = 0", "T = 1"]
    # 15 seconds of AR over 9 and over 12; over 15 and over 9
    assert lines[6:11] == [
        ["confidence", "Spd", "1.46", "1.33"],
        ["", "Len", "2.00", "2.00"],
        ["", "Exp", "3.50", "3.50"],
        ["", "ρ", "1.500", "1.500"],
        ["", "α·ρ", "3.000", "3.000"],
    ]


def test_a_mean_over_common_suites_lacks_none_of_them() -> None:
    fewer = replace(run("d", "amc", temperature=1.0), report=summary(records(), METHODS[:2]))
    runs = [with_yardstick("a"), run("b", "amc"), with_yardstick("c", temperature=1.0), fewer]
    lines = table(paper_tables(runs), "Temperatures, mean over gsm8k, amc: embedded, γ = 4")
    (spd,) = (line for line in lines if line[:2] == ["marginal", "Spd"])
    assert spd[2] != "–"
    assert spd[3] == "–"
    assert not [line for line in lines if line[1] == "headroom, clairvoyant, %"]
    (_, _, both) = table(paper_tables([runs[0], runs[2]]), "Temperatures, gsm8k: embedded, γ = 4")[-8:-5]
    assert both == ["", "headroom, clairvoyant, %", "33.3", "33.3"]


def test_columns_without_a_common_suite_have_no_mean() -> None:
    page = paper_tables([run("a"), run("b", "amc", temperature=1.0)])
    assert "## Temperatures: embedded, γ = 4, at most 128 tokens\n\nNo suite has figures for every column.\n" in page
    empty = replace(run("c", temperature=1.0), report=summary([]))
    assert "No suite has figures for every column." in paper_tables([run("a"), empty])


def test_targets_are_columns_whatever_belongs_to_a_target() -> None:
    parts = [{**part, "predictor": "learned:path=x" if part["label"] == "marginal" else None} for part in PARTS]
    other = {"target": "large", "drafter": "head", "dtype": "bfloat16", "acceptance": "learned:path=y"}
    runs = [
        run("a", acceptance="learned", estimated=True),
        with_prefill("b", 2.0, estimated=True, method_parts=parts, **other),
    ]
    page = paper_tables(runs)
    assert "## Targets, gsm8k: T = 0, γ = 4, at most 128 tokens\n\n" in page
    lines = table(page, "Targets, gsm8k")
    assert lines[0] == ["", "", "embedded", "large"]
    assert ["confidence", "Spd", "1.67", "1.25"] in lines
    assert [line[0] for line in lines if line[0]] == ["AR", "confidence", "marginal", "oracle"]
    again = run("c", estimated=True, **{**other, "acceptance": "isotonic"})
    lines = table(paper_tables([*runs, again]), "Targets, gsm8k")
    large = "large, acceptance {}, drafter head, bfloat16"
    embedded = "embedded, acceptance learned, drafter embedded, float32"
    assert lines[0][2:] == [embedded, large.format("learned:path=y"), large.format("isotonic")]


def test_a_predictor_is_named_where_its_own_target_has_several() -> None:
    def with_predictor(name: str) -> list[dict[str, Any]]:
        return [{**part, "predictor": name if part["label"] == "marginal" else None} for part in PARTS]

    runs = [
        run("a", method_parts=with_predictor("feature")),
        run("b", target="large", method_parts=with_predictor("x")),
        run("c", target="large", method_parts=with_predictor("y")),
    ]
    methods = [line[0] for line in table(paper_tables(runs), "Targets, gsm8k") if line[0]]
    assert methods == ["AR", "confidence", "marginal", "oracle", "marginal with x", "marginal with y"]


def test_what_runs_differ_in_besides_is_said_and_kept_apart() -> None:
    page = paper_tables([run("a"), run("b", seed=1, widened=1)])
    for words in ("experts widened ×8, seed 0", "experts widened ×1, seed 1"):
        assert table(page, f"Table 1: embedded, T = 0, γ = 4, at most 128 tokens, {words}")
    assert "stand above" not in page
    assert "seed" not in paper_tables([run("a")])


def test_sizes_and_budgets_have_means_of_all_figures_too() -> None:
    page = paper_tables([run(f"{suite}-{n}", suite, batch_size=n) for suite in ("gsm8k", "amc") for n in (2, 1)])
    lines = table(page, "Batch sizes, mean over gsm8k, amc: embedded, T = 0, γ = 4")
    assert lines[0] == ["", "", "1", "2"]
    assert [line[1] for line in lines[1:6]] == ["Spd", "Len", "Exp", "ρ", "α·ρ"]
    page = paper_tables([run("a", budget=10), run("b", budget=9)])
    assert table(page, "Budgets γ, gsm8k: embedded, T = 0")[0] == ["", "", "9", "10"]
