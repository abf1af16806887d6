"""Runs, recordings and replays by acceptance estimators that nobody named: found, said, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from made_up_estimators import made_up
from tiny_checkpoints import Checkpoints, write_checkpoints
from written_costs import fixed_costs

from ecospec.errors import UserError
from ecospec.harness.acceptance_store import path_of
from ecospec.harness.lm_eval_model import EcospecLM
from ecospec.harness.manifest import checkpoint_hash
from ecospec.harness.recording.estimating import fitted_for
from ecospec.harness.recording.folder import open_recording
from ecospec.predictors.acceptance.folder import CARD, FACTS, PLOT, WEIGHTS

LARGEST_PLOT = 40_000


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "store"))


@pytest.fixture
def facts_of(command: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a recording says of a target and drafter."""

    def run(name: str, *arguments: object) -> dict[str, Any]:
        given = ("--data", "embedded", "--limit", 1, "--max-new-tokens", 2, "--acceptance", "draft", "--output", name)
        ran = command("record", "--suite", "gsm8k", *given, *arguments)
        assert ran.code == 0, ran.err
        manifest = json.loads((tmp_path / name / "manifest.json").read_text(encoding="utf-8"))
        return {"target": manifest["target_facts"], "drafter": manifest["drafter_facts"]}

    return run


@pytest.fixture
def parts(checkpoints: Checkpoints) -> tuple[object, ...]:
    return (
        *("--target", checkpoints.target, "--drafter", checkpoints.drafter),
        *("--predictor", f"learned:path={checkpoints.learned}"),
    )


@pytest.fixture
def adaptive(bench: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A run whose policy looks at estimates, with a cost model."""
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)

    def run(*arguments: object) -> Any:
        return bench("--policy", "adaptive", "--cost-model", costs, "--limit", 1, *arguments)

    return run


def one_line(ran: Any) -> str:
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    return str(ran.err)


def test_a_run_finds_what_is_saved_and_says_so(
    adaptive: Callable[..., Any],
    bench: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    tmp_path: Path,
) -> None:
    facts = facts_of("rec", *parts)
    before = one_line(adaptive("--output", "none"))
    for word in ("nothing fitted belongs to this target and drafter", "'ecospec-bench record --suite", "--states"):
        assert word in before
    assert "'ecospec-bench train acceptance --recording RECORDING'" in before
    assert not (tmp_path / "none").exists()
    made_up(facts)
    folder = path_of(facts, "0")
    for kind in ("learned", "isotonic"):
        ran = adaptive("--acceptance", kind, "--output", kind)
        assert ran.code == 0, ran.err
        (line,) = [each for each in ran.err.splitlines() if "acceptance estimator" in each]
        assert line == (
            f"ecospec-bench: acceptance estimator {kind!r}: the one saved for this target and drafter, {folder} "
            f"(sha256 {checkpoint_hash(folder)[:12]})"
        )
        manifest = json.loads((tmp_path / kind / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["acceptance"] == kind
        assert manifest["acceptance_folder"] == str(folder)
        assert manifest["acceptance_sha256"] == checkpoint_hash(folder)
    named = adaptive("--acceptance", f"learned:path={folder}", "--output", "named")
    assert named.code == 0, named.err
    assert "acceptance estimator" not in named.err
    figures = [
        [(each["method"], each["tokens"], each["steps"]) for each in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / name / "prompts.jsonl" for name in ("learned", "named"))
    ]
    assert figures[0] == figures[1]
    several = adaptive("--suite", "gsm8k,amc", "--output", "several")  # said once for all runs of a command
    assert several.code == 0, several.err
    assert several.err.count("acceptance estimator") == 1
    unasked = bench("--policy", "confidence", "--limit", 1, "--output", "unasked")
    assert unasked.code == 0, unasked.err
    assert "acceptance estimator" not in unasked.err
    manifest = json.loads((tmp_path / "unasked" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["acceptance_folder"] is manifest["acceptance_sha256"] is None


def test_what_does_not_fit_is_refused(
    adaptive: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    tmp_path: Path,
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts, ("0", "0.7"), learned=False)
    said = one_line(adaptive("--temperature", 1, "--output", "o"))
    assert "for this target and drafter there is one saved at temperature 0, 0.7, not at 1; expected one of" in said
    assert "nothing fitted for acceptance estimator 'learned'" in one_line(adaptive("--output", "o"))
    assert "which drafter 'ngram' has not" in one_line(adaptive("--drafter", "ngram", "--output", "o"))
    # One that lies where another's would is not taken for it.
    other = path_of({**facts, "drafter": {"name": "ngram", "longest": 3}}, "0")
    shutil.copytree(path_of(facts, "0"), other)
    said = one_line(adaptive("--acceptance", "isotonic", "--drafter", "ngram", "--output", "o"))
    assert f"acceptance {other}: fitted for a drafter with name = None, but this one has ngram" in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("broken", ["facts", "weights", "changed weights", "no weights", "no facts"])
def test_a_damaged_entry_is_refused_and_not_passed_over(
    adaptive: Callable[..., Any], facts_of: Callable[..., dict[str, Any]], parts: tuple[object, ...], broken: str
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts)
    path = path_of(facts, "0") / (WEIGHTS if "weights" in broken else FACTS)
    if broken.startswith("no "):
        path.unlink()
    elif broken == "changed weights":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes()[:-9])
    said = one_line(adaptive("--output", "o"))
    expected = {
        "facts": f"{path}: not readable",
        "no facts": f"acceptance {path.parent}: no {FACTS}",
        "no weights": f"{path}: not the weights of this folder",
    }
    assert expected.get(broken, "not the weights of this folder (its hash is not the recorded one)") in said


def test_two_targets_have_each_their_own(
    adaptive: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    second = write_checkpoints(tmp_path / "second", seed=1)
    others = ("--target", second.target, "--drafter", second.drafter, "--predictor", f"learned:path={second.learned}")
    first_facts, second_facts = facts_of("a", *parts), facts_of("b", *others)
    assert first_facts["target"] != second_facts["target"]
    made_up(second_facts)
    assert "nothing fitted belongs" in one_line(adaptive("--output", "first"))
    ran = adaptive(*others, "--output", "second-run")
    assert ran.code == 0, ran.err
    assert str(path_of(second_facts, "0")) in ran.err
    made_up(first_facts)
    ran = adaptive("--output", "first")
    assert ran.code == 0, ran.err
    assert str(path_of(first_facts, "0")) in ran.err
    mixed = adaptive("--drafter", second.drafter, "--output", "mixed")
    assert "nothing fitted belongs" in one_line(mixed)


def test_drafters_of_one_name_are_told_apart(
    facts_of: Callable[..., dict[str, Any]], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    given = ("--target", checkpoints.target, "--predictor", f"token-frequency:path={checkpoints.token_frequency}")
    short, long = (facts_of(f"n{n}", *given, "--drafter", f"ngram:longest={n}") for n in (2, 4))
    assert short["drafter"] == {"name": "ngram", "longest": 2}
    assert path_of(short, "0") != path_of(long, "0")


def test_recording_and_replay_and_lm_eval_find_the_same(
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    checkpoints: Checkpoints,
    command: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts)
    folder = path_of(facts, "0")
    given = ("--data", "embedded", "--limit", 1, "--max-new-tokens", 6, "--output", "found")
    ran = command("record", "--suite", "amc", *parts, *given)
    assert ran.code == 0, ran.err
    assert f"'learned': the one saved for this target and drafter, {folder}" in ran.err
    manifest = json.loads((tmp_path / "found" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["estimators"] == ["learned"]
    assert manifest["estimators_folders"] == [str(folder)]
    assert manifest["estimators_sha256"] == [checkpoint_hash(folder)]
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    projected = ("--policy", "adaptive", "--cost-model", "gpt-oss-120b")
    ran = command("replay", "found", *projected, "--acceptance", "learned")
    assert ran.code == 0, ran.err
    said = f"acceptance as estimated by learned, when it was recorded: {folder} (sha256 {checkpoint_hash(folder)[:12]})"
    assert said in ran.out
    capsys.readouterr()
    model = EcospecLM(
        "adaptive",
        target=str(checkpoints.target),
        drafter=str(checkpoints.drafter),
        cost_model=str(costs),
        max_gen_toks=4,
    )
    assert f"the one saved for this target and drafter, {folder}" in capsys.readouterr().err
    assert model.generate_until([Instance("generate_until", {}, ("one two three", {"until": []}), 0)])
    about = {"folder": str(folder), "sha256": checkpoint_hash(folder)}
    assert model.get_model_info()["ecospec_acceptance"] == {"0": about}
    warm = Instance("generate_until", {}, ("one", {"until": [], "do_sample": True, "temperature": 0.7}), 0)
    with pytest.raises(UserError, match=r"saved at temperature 0, not at 0\.7"):
        model.generate_until([warm])


def test_a_replay_estimates_by_what_was_fitted_since(
    facts_of: Callable[..., dict[str, Any]], parts: tuple[object, ...], command: Callable[..., Any], tmp_path: Path
) -> None:
    facts = facts_of("rec", *parts)
    given = ("record", "--suite", "amc", *parts, "--data", "embedded", "--limit", 2, "--max-new-tokens", 8)
    for name, more in (("later", ("--states",)), ("stateless", ())):
        ran = command(*given, *more, "--acceptance", "draft", "--output", name)
        assert ran.code == 0, ran.err
    policies = ("--policy", "optimal", "--budget", 3, "--cost-model", "gpt-oss-120b")
    assert "nothing fitted belongs" in one_line(command("replay", "later", *policies, "--acceptance", "learned"))
    made_up(facts)
    folder = path_of(facts, "0")
    ran = command(*given, "--acceptance", "learned", "--acceptance", "isotonic", "--output", "at-once")
    assert ran.code == 0, ran.err
    rows = {}
    for kind in ("learned", "isotonic", "draft"):
        for name in ("at-once", "later"):
            ran = command("replay", name, *policies, "--acceptance", kind, "--output", f"{name}-{kind}.json")
            assert ran.code == 0, ran.err
            assert (f"acceptance as estimated by {kind}" in ran.out) == (kind != "draft" or True)
            assert (f", fitted in {folder} (sha256 {checkpoint_hash(folder)[:12]})" in ran.out) == (
                name == "later" and kind != "draft"
            )
            rows[name, kind] = json.loads((tmp_path / f"{name}-{kind}.json").read_text())["rows"][1]
    for kind in ("learned", "isotonic"):
        assert rows["later", kind] == rows["at-once", kind]
    assert rows["later", "learned"] != rows["later", "draft"]
    recording = open_recording(tmp_path / "later")
    for kind, tolerance in (("learned", 2e-3), ("isotonic", 0.0)):
        fitted = fitted_for(kind, [recording])
        assert fitted is not None
        both = zip(recording.requests(), open_recording(tmp_path / "at-once").requests(), strict=True)
        for (_, later), (_, once) in both:
            found = fitted.added_to(later).estimated[kind]
            assert np.abs(found - once.estimated[kind]).max() <= tolerance
    said = one_line(command("replay", "stateless", *policies, "--acceptance", "learned"))
    assert "reads the drafter's states, which recording stateless does not hold; expected one that was made wi" in said
    made_up(facts, prompts=(recording.entries[1].prompt,))
    said = one_line(command("replay", "later", *policies, "--acceptance", "isotonic"))
    assert "was fitted to 1 of these 2 requests, such as amc-1" in said


def test_a_resumed_run_refuses_another_estimator(
    adaptive: Callable[..., Any],
    facts_of: Callable[..., dict[str, Any]],
    parts: tuple[object, ...],
    command: Callable[..., Any],
) -> None:
    facts = facts_of("rec", *parts)
    made_up(facts)
    assert adaptive("--output", "run").code == 0
    ran = command("--resume", "run")
    assert ran.code == 0, ran.err
    before = checkpoint_hash(path_of(facts, "0"))
    made_up(facts, learned=True, seed=1)
    assert f"run was run with acceptance_sha256 = {before!r}, now it is" in command("--resume", "run").err


def test_training_saves_for_the_runs_of_its_target(
    command: Callable[..., Any], adaptive: Callable[..., Any], parts: tuple[object, ...], tmp_path: Path
) -> None:
    given = ("--data", "embedded", "--limit", 10, "--max-new-tokens", 6, "--acceptance", "draft", "--states")
    assert command("record", "--suite", "gsm8k", *parts, *given, "--output", "cold").code == 0
    assert command("record", "--suite", "gsm8k", *parts, *given, "--temperature", 1, "--output", "warm").code == 0
    ran = command("train", "acceptance", "--recording", "cold", "--recording", "warm", "--threads", 1)
    assert ran.code == 0, ran.err
    lines = [line for line in ran.out.splitlines() if line.startswith("saved in ")]
    folders = [Path(line.removeprefix("saved in ").partition(": ")[0]) for line in lines]
    assert [each.parent for each in folders] == [tmp_path / "store" / "acceptance"] * 2
    for key, line, folder in zip("01", lines, folders, strict=True):
        assert f"runs of this target and drafter at temperature {key} find it by --acceptance learned, the def" in line
        assert {each.name for each in folder.iterdir()} == {FACTS, WEIGHTS, CARD, PLOT}
        card = (folder / CARD).read_text(encoding="utf-8")
        assert f"]({PLOT})" in card
        assert [f"## Temperature {at}" in card for at in "01"] == [at == key for at in "01"]
        assert (folder / PLOT).stat().st_size < LARGEST_PLOT
    facts = json.loads((folders[0] / FACTS).read_text(encoding="utf-8"))
    assert list(facts["isotonic"]) == list(facts["learned"]) == ["0"]
    assert len(facts["fitted_on"]) == 10
    for at, folder in enumerate(folders):
        ran = adaptive("--suite", "amc", "--temperature", at, "--output", f"run-{at}")
        assert ran.code == 0, ran.err
        assert str(folder) in ran.err
    ran = adaptive("--output", "o")
    assert ran.code == 2
    assert "was fitted to 1 of these 1 prompts" in ran.err.splitlines()[-1]
    # Anew, from one recording: the other temperature's stays.
    kept = checkpoint_hash(folders[0])
    assert command("train", "acceptance", "--recording", "warm", "--seed", 1).code == 0
    assert checkpoint_hash(folders[0]) == kept
