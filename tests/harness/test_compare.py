"""Comparing runs: what is planted is found, what is the same passes, what cannot be compared is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared_runs import FACTS, METHODS, changed, records, run_of, write_run

from ecospec.errors import UserError
from ecospec.harness.comparing.baseline import read_baseline, save_baseline
from ecospec.harness.comparing.comparable import BY_CONTENT, BY_METHOD, MACHINE, MUST_AGREE
from ecospec.harness.comparing.comparison import Comparison, compare_runs
from ecospec.harness.comparing.figures import DIFFERS, SAME, TOLERATED, WITHIN, tolerances_of
from ecospec.harness.comparing.runs import Method
from ecospec.harness.records import PromptRecord
from ecospec.harness.run_folder import RESUME_KEYS

EXACTLY = tolerances_of(())


def comparison(
    base: list[PromptRecord], new: list[PromptRecord], tolerance: str | None = None, **facts: Any
) -> Comparison:
    tolerances = EXACTLY if tolerance is None else tolerances_of([tolerance])
    return compare_runs([run_of(base)], [run_of(new, **facts)], tolerances, slower=0.1, absolute=False)


def one_token(record: PromptRecord) -> dict[str, Any]:
    return {"tokens": [*record.tokens[:-1], 7777]} if record.prompt_id == "gsm8k-3" else {}


def fewer_accepted(record: PromptRecord) -> dict[str, Any]:
    """Two in a hundred more steps for the same tokens."""
    return {"steps": record.steps + 1} if int(record.prompt_id.split("-")[1]) % 2 else {}


def more_experts(record: PromptRecord) -> dict[str, Any]:
    return {"expert_pairs": record.expert_pairs * 1.02}


PLANTED: dict[str, tuple[Callable[[PromptRecord], dict[str, Any]], set[str]]] = {
    "one token": (one_token, {"tokens"}),
    "alpha": (fewer_accepted, {"steps", "alpha", "active-experts", "verified-tokens"}),
    "experts": (more_experts, {"active-experts"}),
    "selected": (lambda r: {"selected": r.selected - 1}, {"verified-tokens"}),
    "overlap": (lambda r: {"predicted_overlap": 0.7}, {"overlap"}),
    "score": (lambda r: {"score": 0.0} if r.prompt_id == "gsm8k-5" else {}, {"score"}),
    "verdict": (lambda r: {"verdict": "violated"} if r.prompt_id == "gsm8k-5" else {}, {"lossless"}),
    "reason": (lambda r: {"reason": "stop"} if r.prompt_id == "gsm8k-5" else {}, {"tokens"}),
}


def test_a_run_is_the_same_as_itself() -> None:
    found = comparison(records(), records())
    assert found.regressions == []
    assert {each.verdict for each in found.figures} == {SAME}
    # Tokens, five ratios but for the overlap of those without a predictor, score and verdict, of four methods.
    assert len(found.figures) == 4 * 8 - 2
    alpha = next(each for each in found.figures if (each.method, each.figure) == ("marginal-cost", "alpha"))
    mine = [record for record in records() if record.method == "marginal-cost"]
    assert alpha.base == pytest.approx(sum(r.emitted for r in mine) / sum(r.steps for r in mine))
    experts = next(each for each in found.figures if (each.method, each.figure) == ("AR", "active-experts"))
    assert experts.base == 4.0


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found_and_nothing_else(planted: str) -> None:
    change, figures = PLANTED[planted]
    found = comparison(records(), changed(records(), change))
    differing = [each for each in found.figures if each.verdict == DIFFERS]
    assert {each.method for each in differing} == {"marginal-cost"}
    assert {each.figure for each in differing} == figures
    assert all(f"gsm8k, marginal-cost, {each.figure}: " in " ".join(found.regressions) for each in differing)
    assert {each.verdict for each in found.figures if each not in differing} == {SAME}


def test_a_change_is_measured_by_prompts_and_by_the_sum() -> None:
    found = comparison(records(), changed(records(), more_experts))
    experts = next(each for each in found.figures if each.verdict == DIFFERS)
    assert (experts.prompts, experts.of, experts.first) == (24, 24, "gsm8k-0")
    assert experts.change is not None
    assert experts.change.value == pytest.approx(1.02)
    assert "9 -> 9.18000 (+2.00 %) (24 of 24 prompts differ, first gsm8k-0)" in found.regressions[0]


def test_differences_that_cancel_in_a_sum_are_differences() -> None:
    moved = {"gsm8k-0": 1, "gsm8k-1": -1}
    found = comparison(records(), changed(records(), lambda r: {"selected": r.selected + moved.get(r.prompt_id, 0)}))
    selected = next(each for each in found.figures if each.verdict == DIFFERS)
    assert (selected.figure, selected.base == selected.new, selected.prompts) == ("verified-tokens", True, 2)


@pytest.mark.parametrize(
    ("planted", "tolerance", "verdict"),
    [
        ("experts", "active-experts=0.021", WITHIN),
        ("experts", "active-experts=0.019", DIFFERS),
        ("experts", "all=0.021", WITHIN),
        ("experts", "all=0.5,active-experts=0.019", DIFFERS),
        ("experts", "alpha=0.5", DIFFERS),
        ("one token", "tokens=0.042", WITHIN),  # 1 of 24 is 0.0417
        ("one token", "tokens=0.041", DIFFERS),
        ("score", "score=0.042", WITHIN),
        ("score", "score=0.041", DIFFERS),
        ("verdict", "all=0.99", DIFFERS),  # a verdict has no tolerance
    ],
)
def test_a_tolerance_is_a_bound_on_one_figure(planted: str, tolerance: str, verdict: str) -> None:
    found = comparison(records(), changed(records(), PLANTED[planted][0]), tolerance)
    assert {each.verdict for each in found.figures} == {SAME, verdict}
    assert bool(found.regressions) == (verdict == DIFFERS)


def test_a_verdict_that_gets_better_passes() -> None:
    worse = changed(records(), PLANTED["verdict"][0])
    assert comparison(worse, records()).regressions == []
    assert len(comparison(records(), worse).regressions) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alhpa=0.1", "did you mean 'alpha'"),
        ("lossless=0.1", "unknown figure 'lossless'"),
        ("alpha", "expected alpha=NUMBER"),
        ("alpha=much", "expected alpha=NUMBER"),
        ("alpha=-0.1", "from 0 to below 1"),
        ("alpha=1", "from 0 to below 1"),
        ("alpha=nan", "from 0 to below 1"),
    ],
)
def test_a_wrong_tolerance_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tolerances_of([text])


def test_all_stands_for_the_figures_that_are_not_named() -> None:
    assert tolerances_of(["all=0.02", "alpha=0.01,tokens=0"]) == {
        **dict.fromkeys(TOLERATED, 0.02),
        "alpha": 0.01,
        "tokens": 0.0,
    }


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"suite": "amc"}, "suite = 'gsm8k' in BASE and 'amc' in NEW"),
        ({"budget": 5}, "budget = 4 in BASE and 5 in NEW"),
        ({"prompts_sha256": "b" * 64}, "prompts_sha256 = 'aaa"),
        ({"prompts_sha256": "b" * 64, "limit": 8}, "limit = None in BASE and 8 in NEW"),
        ({"checkpoint_sha256": "d" * 64}, "checkpoint_sha256 = 'ccc"),
        ({"drafter_sha256": "d" * 64}, "drafter_sha256 = None"),
        ({"drafter_spec": "ngram"}, "drafter_spec = 'eagle3' in BASE and 'ngram' in NEW"),
        ({"temperature": 1.0}, "temperature"),
        ({"batch_size": 2}, "batch_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"check": "none"}, "check"),
    ],
)
def test_runs_that_differ_in_what_matters_are_refused(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^gsm8k: cannot be compared: {said}"):
        comparison(records(), records(), **facts)


def test_all_that_a_resumed_run_must_share_is_known_to_a_comparison() -> None:
    parts = [MUST_AGREE, MACHINE, BY_METHOD, BY_CONTENT]
    known = [key for part in parts for key in part]
    assert len(known) == len(set(known))
    assert set(RESUME_KEYS) <= set(known)


def test_a_method_with_another_predictor_is_refused() -> None:
    others = [replace(m, predictor="learned") if m.label == "mine" else m for m in METHODS]
    with pytest.raises(UserError, match="the predictor of mine = 'feature' in BASE and 'learned' in NEW"):
        compare_runs([run_of(records())], [run_of(records(), others)], EXACTLY, slower=0.1, absolute=False)


def test_prompts_that_one_run_has_alone_are_refused() -> None:
    with pytest.raises(UserError, match="prompt gsm8k-23 of AR is in BASE alone"):
        comparison(records(24), records(23))


def test_another_machine_leaves_deterministic_figures_and_gates_no_time() -> None:
    slow = changed(records(), lambda r: {"decode_seconds": r.decode_seconds * 2})
    for facts in ({"device_name": "another"}, {"threads": 8}, {"versions": {"ecospec": "0.1", "torch": "2.12.0"}}):
        found = comparison(records(), slow, **facts)
        assert found.regressions == []
        assert {each.verdict for each in found.timings} == {"not gated"}
        assert any("times are not gated: " in note for note in found.notes)
        assert len(comparison(records(), changed(records(), more_experts), **facts).regressions) == 1
    newer = {"versions": {"ecospec": "0.2", "torch": "2.13.0"}, "git_revision": "abc"}
    assert len(comparison(records(), slow, **newer).regressions) == 1  # which is what a comparison is for


def test_tolerances_for_elsewhere_are_for_other_rounding_only() -> None:
    worse, elsewhere = changed(records(), more_experts), tolerances_of(["active-experts=0.03"])
    for facts, passes in (
        ({}, False),
        ({"device_platform": "a newer kernel"}, False),  # which changes times alone
        ({"device_name": "another"}, True),
        ({"threads": 8}, True),
        ({"versions": {"ecospec": "0.1", "torch": "2.12.0"}}, True),
        ({"versions": {"ecospec": "0.2", "torch": "2.13.0"}}, False),
    ):
        runs = [run_of(records())], [run_of(worse, **facts)]
        found = compare_runs(*runs, EXACTLY, slower=0.1, absolute=False, elsewhere=elsewhere)
        assert (found.regressions == []) == passes, facts
        assert any("the tolerances of --elsewhere apply" in note for note in found.notes) == passes


def test_methods_and_runs_that_are_missing_fail_and_new_ones_are_listed() -> None:
    fewer = [record for record in records() if record.method != "mine"]
    whole, part = run_of(records()), run_of(fewer, METHODS[:3])
    found = compare_runs([whole], [part], EXACTLY, slower=0.1, absolute=False)
    assert found.regressions == ["gsm8k, mine: missing in NEW"]
    found = compare_runs([part], [whole], EXACTLY, slower=0.1, absolute=False)
    assert (found.regressions, found.added) == ([], ("gsm8k, mine",))
    amc = replace(whole, name="amc")
    found = compare_runs([whole, amc], [whole], EXACTLY, slower=0.1, absolute=False)
    assert found.regressions == ["run amc: missing in NEW"]
    found = compare_runs([whole], [amc, whole], EXACTLY, slower=0.1, absolute=False)
    assert (found.regressions, found.added) == ([], ("run amc",))
    with pytest.raises(UserError, match="no run in common: BASE has gsm8k, NEW has amc"):
        compare_runs([whole], [amc], EXACTLY, slower=0.1, absolute=False)


def test_a_method_that_sees_true_routing_has_no_time() -> None:
    methods = [*METHODS[:3], Method("mine", True, "mine", "oracle")]
    slow = changed(records(), lambda r: {"decode_seconds": r.decode_seconds * 2}, "mine")
    runs = run_of(records(), methods), run_of(slow, methods)
    found = compare_runs([runs[0]], [runs[1]], EXACTLY, slower=0.1, absolute=True)
    assert found.regressions == []
    assert "mine" not in {each.method for each in found.timings}


def test_a_saved_baseline_is_small_and_as_good_as_the_run_but_for_times(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    runs = [run_of(records()), replace(run_of(records(8)), name="amc")]
    save_baseline(path, runs)
    text = path.read_text(encoding="utf-8")
    assert "seconds" not in text.replace("copy_bytes_per_second", "")
    assert len(text) < 300 * len(text.splitlines()) + 2000
    read = read_baseline(path, text)
    for before, after in zip(runs, read, strict=True):
        assert (before.name, before.moe_layers, before.methods) == (after.name, after.moe_layers, after.methods)
        assert {
            label: {
                prompt: replace(output, prefill_seconds=None, decode_seconds=None) for prompt, output in found.items()
            }
            for label, found in before.outputs.items()
        } == after.outputs
    found = compare_runs(read, runs, EXACTLY, slower=0.1, absolute=True)
    assert (found.regressions, found.timings) == ([], ())
    assert "no times on one side" in found.notes[0]
    worse = [run_of(changed(records(), one_token)), runs[1]]
    assert len(compare_runs(read, worse, EXACTLY, slower=0.1, absolute=False).regressions) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"ecospec_baseline": 9}\n', "schema 9, expected 1"),
        ('{"ecospec_baseline": 1}\nnot json\n', "line 2: not a baseline"),
        ('{"ecospec_baseline": 1}\n{"run": "a", "prompt_id": "x"}\n', "line 2: not a baseline"),
        ('{"ecospec_baseline": 1}\n{"run": "a", "methods": [{"colour": 1}]}\n', "line 2: not a baseline"),
    ],
)
def test_a_damaged_baseline_is_one_line(command: Callable[..., Any], tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "base.jsonl").write_text(text, encoding="utf-8")
    ran = command("compare", "base.jsonl", "base.jsonl")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert said in ran.err


def test_the_command_compares_folders_with_exit_codes(command: Callable[..., Any], tmp_path: Path) -> None:
    write_run(tmp_path / "base", records())
    write_run(tmp_path / "same", records(noise=0.01, seed=1))
    write_run(tmp_path / "worse", changed(records(), one_token))
    write_run(tmp_path / "other", records(), budget=5)
    ran = command("compare", "base", "same", "--json", "found.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.rstrip().endswith("compare: passes")
    plain = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (plain["schema"], plain["passes"], plain["regressions"]) == (1, True, [])
    assert {each["verdict"] for each in plain["figures"]} == {"same"}
    ran = command("compare", "base", "worse", "--json", "found.json")
    assert ran.code == 1
    assert "REGRESSION gsm8k, marginal-cost, tokens: " in ran.out
    assert ran.out.rstrip().endswith("compare: 1 regression")
    assert not json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["passes"]
    assert command("compare", "base", "worse", "--tolerance", "tokens=0.1").code == 0
    ran = command("compare", "base", "other")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "budget = 4 in BASE and 5 in NEW" in ran.err
    assert command("compare", "base", "--save", "base.jsonl").code == 0
    assert command("compare", "base.jsonl", "same").code == 0
    assert command("compare", "base.jsonl", "worse").code == 1


def test_folders_of_several_runs_are_paired_by_name(command: Callable[..., Any], tmp_path: Path) -> None:
    for parent in ("base", "new"):
        write_run(tmp_path / parent / "amc", records(8))
        write_run(tmp_path / parent / "gsm8k", records())
        (tmp_path / parent / "suites.json").write_text('["gsm8k", "amc"]', encoding="utf-8")
    ran = command("compare", "base", "new")
    assert ran.code == 0, ran.err
    assert "60 of 60 deterministic figures are the same" in ran.out
    ran = command("compare", "base/gsm8k", "new")  # a run by itself is called as its suite
    assert ran.code == 0
    assert "in NEW alone, not judged: run amc" in ran.out
    assert command("compare", "base", "new/gsm8k").code == 1
    (tmp_path / "new" / "amc" / "report.json").unlink()
    ran = command("compare", "base", "new")
    assert ran.code == 2
    assert "new/amc is not finished; expected ecospec-bench --resume new first" in ran.err
    shutil.rmtree(tmp_path / "new" / "amc")  # as before its first prompt
    ran = command("compare", "base", "new")
    assert ran.code == 2
    assert "new/amc is not finished; expected ecospec-bench --resume new first" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("base",), "nothing to compare base with"),
        (("base", "nowhere"), "nowhere: not readable"),
        (("base", "empty"), "empty holds no run"),
        (("base", "text"), "text: expected a run folder"),
        (("base", "base", "--slower", "0"), "--slower 0: expected a share above 0"),
        (("base", "base", "--save", "file"), "--save file: expected one run"),
        (("base", "damaged"), "damaged: not a run of this version (KeyError: 'method_parts')"),
        (("base", "cut"), "cut is not finished"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    write_run(tmp_path / "base", records(4))
    write_run(tmp_path / "cut", records(4))
    cut = (tmp_path / "cut" / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "cut" / "prompts.jsonl").write_text("".join(cut[:-4]), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("{}")
    write_run(tmp_path / "damaged", records(4))
    (tmp_path / "damaged" / "manifest.json").write_text(json.dumps({**FACTS, "methods": ["AR", "confidence"]}))
    ran = command("compare", *arguments)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert said in ran.err
