"""What a user names and nothing uses is checked and said; what is wrong is said before any work begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Checkpoints
from written_costs import DRAFTING, fixed_costs, projected

from ecospec.errors import UserError
from ecospec.harness import outputs, preparing
from ecospec.harness.config import RunConfig
from ecospec.harness.costs import command as profiling
from ecospec.harness.costs.projected import projected_for
from ecospec.harness.costs.replacing import check_store, replaced_by
from ecospec.harness.costs.store import path_of, save_cost_model
from ecospec.harness.outputs import check_file, check_folder
from ecospec.harness.plugins import load_plugins
from ecospec.harness.unused import unused_options


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """No target is loaded in this test."""

    def load(*arguments: object, **more: object) -> None:
        raise AssertionError("a target was loaded before this was found")

    monkeypatch.setattr(preparing, "load_target", load)
    monkeypatch.setattr(profiling, "load_target_of", load)


def notes_of(policy: str, named: tuple[str, ...], **options: Any) -> list[str]:
    return unused_options(RunConfig("gsm8k", tuple(policy.split(",")), **options), named, load_plugins())


def test_what_is_named_and_used_by_nothing_is_said(tmp_path: Path) -> None:
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    assert notes_of("confidence", ()) == []
    (line,) = notes_of("confidence,marginal", ("cost_model",), cost_model=costs)
    assert line == f"--cost-model {costs}: no policy here weighs time (confidence, marginal-cost); nothing uses it"
    (line,) = notes_of("confidence,oracle", ("predictor",), predictor=("feature",))
    assert (
        line == "--predictor feature: no policy here looks at predicted experts (confidence, oracle); nothing uses it"
    )
    (line,) = notes_of("marginal,clairvoyant", ("acceptance",), acceptance="isotonic")
    assert line.startswith("--acceptance isotonic: no policy here looks at estimates of acceptance")
    assert len(notes_of("confidence", ("top_p", "top_k", "seed"), top_p=0.9, top_k=3, seed=4)) == 3


def test_what_is_used_or_a_default_is_not(tmp_path: Path) -> None:
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    assert notes_of("confidence", (), cost_model=costs, top_p=0.9) == []
    named = ("cost_model", "predictor", "acceptance", "top_p")
    assert notes_of("throughput", named, cost_model=costs, temperature=1.0) == []
    assert notes_of("confidence", ("budget", "limit")) == []


@pytest.mark.parametrize("policy", ["confidence", "throughput"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost_model": Path("nope.json")}, "nope.json: cannot be read"),
        ({"cost_model": Path("bad.json")}, "bad.json: not a cost model"),
        ({"predictor": ("featur",)}, "did you mean 'feature'"),
        ({"acceptance": "isotonik"}, "did you mean 'isotonic'"),
        ({"acceptance": "isotonic:path=nowhere"}, "nowhere"),
        ({"predictor": ("learned:path=nowhere",)}, "nowhere"),
    ],
)
def test_what_is_wrong_is_refused_whether_it_is_used_or_not(
    command: Callable[..., Any], tmp_path: Path, policy: str, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    if policy == "throughput" and said == "nowhere":
        pytest.skip("its own loading says so")
    with pytest.raises(UserError, match=said):
        notes_of(policy, tuple(options), **options)


def test_a_run_says_it_and_runs(bench: Callable[..., Any], tmp_path: Path, checkpoints: Checkpoints) -> None:
    costs = fixed_costs(tmp_path / "costs.json", 1e-4)
    ran = bench("--policy", "confidence", "--cost-model", costs, "--seed", 3)
    assert ran.code == 0
    notes = [line for line in ran.err.splitlines() if line.startswith("ecospec-bench: note: ")]
    assert [note.split()[2] for note in notes] == ["--cost-model", "--predictor", "--seed"]
    assert bench("--policy", "marginal").err == ""


# --- before the work begins ---


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("place", ["file/inside", "file", "used", "x" * 300])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--suite", "gsm8k"),
        ("--suite", "gsm8k,amc"),
        ("sweep", "--suite", "gsm8k"),
        ("record", "--suite", "gsm8k"),
        ("profile",),
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_is_said_before_anything_is_loaded(
    command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], place: str
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("", encoding="utf-8")
    ran = command(*arguments, "--output", place)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "--output" in ran.err


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("record", "--acceptance", "learnd"), "did you mean 'learned'"),
        (("record", "--predictor", "oracle"), "looks at the true routing"),
        (("record", "--policy", "x"), "No such option"),
        (("record", "--resume"), "no recording"),
        (("--cost-model", "nope.json", "--policy", "adaptive"), "nope.json: cannot be read"),
        (("profile", "--context", "0"), "--context 0"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_name_or_file_is_said_before_anything_is_loaded(
    command: Callable[..., Any], arguments: tuple[str, ...], said: str
) -> None:
    suite = () if "profile" in arguments else ("--suite", "gsm8k")
    ran = command(*arguments, *suite, "--output", "out")
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize("place", ["there", "no/where.json", "x" * 300])
@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "nothing", "--output"),
        ("report", "nothing", "--output"),
        ("compare", "nothing", "nothing", "--json"),
        ("compare", "nothing", "--save"),
        ("evaluate", "--trace", "nothing", "--output"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_said_before_anything_is_read(
    command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], place: str
) -> None:
    (tmp_path / "there").mkdir()
    ran = command(*arguments, place)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert f"{arguments[-1]} {place}: " in ran.err


def test_what_may_not_be_written_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder("it", tmp_path / "a" / "b")
    check_file("it", tmp_path / "a.json")
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=f"nothing can be written into {tmp_path}"):
        check_folder("it", tmp_path / "a" / "b")
    with pytest.raises(UserError, match="no permission"):
        check_file("it", tmp_path / "a.json")


# --- cost models ---


def test_a_profile_says_what_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "models"))
    check_store()
    plain = dataclasses.replace(projected(), measured="then", draftings=(DRAFTING,))
    better, worse = (dataclasses.replace(plain, fit=dataclasses.replace(plain.fit, r_squared=r)) for r in (0.99, 0.5))
    worse = dataclasses.replace(worse, draftings=())
    assert replaced_by(better) is None
    save_cost_model(better)
    line = replaced_by(worse)
    assert line is not None
    assert "measured then: R² was 0.9900 and is 0.5000 now" in line
    assert "steps of 1 other drafters" in line
    path_of(worse.key).write_text("{", encoding="utf-8")
    assert replaced_by(worse) == f"it replaces a damaged file: {path_of(worse.key)}"
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(UserError, match=r"cost models .*models .*ECOSPEC_COST_MODELS.*is a file"):
        check_store()


def test_a_projection_with_several_draftings_gives_the_run_its_own() -> None:
    second = dataclasses.replace(DRAFTING, draft_steps=4)
    both = dataclasses.replace(projected(), draftings=(DRAFTING, second))
    own = projected_for(both, second.identity, "it")
    assert own.draftings == (second,)
    assert own.for_method().other_seconds == pytest.approx(1.2e-3)
    with pytest.raises(UserError, match=r"steps of mine, 3 steps, top-2; mine, 4 .* alone; expected .* of other, 3"):
        projected_for(both, ("other", None, 3, 2), "it")
    plain = projected()
    assert projected_for(plain, ("other", None, 3, 2), "it") is plain
