"""Saved cost models: what is written is read, and what was measured on something else is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecospec.errors import UserError
from ecospec.harness.costs.saved import (
    Coefficient,
    CostKey,
    Drafting,
    Fit,
    Interval,
    Point,
    SavedCostModel,
    StepRest,
    read_cost_model,
)
from ecospec.harness.costs.store import (
    add_drafting,
    find_cost_model,
    load_cost_model,
    path_of,
    save_cost_model,
    store_folder,
)
from ecospec.policies import CostModel

KEY = CostKey(
    device="AMD EPYC",
    kind="cpu",
    threads=2,
    dtype="float32",
    checkpoint_sha256="ab" * 32,
    widened=12,
    unpacked=None,
    placement=None,
    torch="2.13.0",
    transformers="5.24.0",
    ecospec="0.1",
)
REST = StepRest(draft=0.004, predict=0.0, select=0.0001, commit=0.0002, outside=0.0003)
PREDICTING = dataclasses.replace(REST, predict=0.002)
DRAFTING = Drafting("eagle3", None, 3, 2, REST, {"feature": PREDICTING}, (48.0, 80.0, 100.0), 12)
SAVED = SavedCostModel(
    key=KEY,
    target="embedded",
    moe_layers=6,
    experts=64,
    top_k=8,
    expert_bytes=1179648,
    always_read_bytes=20_000_000,
    fit=Fit(
        Coefficient(0.008, 0.0001, Interval(0.0078, 0.0082)),
        Coefficient(9e-5, 1e-6, Interval(8.8e-5, 9.2e-5)),
        Coefficient(0.0004, None, None),
        r_squared=0.99,
        held_out_error=0.03,
        text_error=-0.02,
        warnings=("a sentence",),
    ),
    points=(
        Point(1, 8, 48, 0.0127, 0.0128, 0.0129, 15, False, 0.3),
        Point(2, 12, 72, 0.015, 0.015, 0.016, 15, True, 0.4),
    ),
    ar_seconds=0.0125,
    copy_bytes_per_second=2e10,
    context=200,
    pairs_by_tokens=(48.0, 79.0),
    windows=900,
    draftings=(DRAFTING,),
    measured="2026-01-01T00:00:00+00:00",
)


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "store"))


def test_what_is_saved_is_found_again() -> None:
    assert find_cost_model(KEY) is None
    path = save_cost_model(SAVED)
    assert path.parent == store_folder()
    assert find_cost_model(KEY) == SAVED
    assert [each.name for each in store_folder().iterdir()] == [path.name]  # nothing half-written beside it
    later = dataclasses.replace(SAVED, measured="later")
    save_cost_model(later)
    assert find_cost_model(KEY) == later


def test_without_the_variable_the_store_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ECOSPEC_COST_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_folder().parts[-2:] == ("ecospec", "cost-models")


OTHERS: dict[str, Any] = {
    "device": "NVIDIA H200",
    "kind": "cuda",
    "threads": 4,
    "dtype": "bfloat16",
    "checkpoint_sha256": "cd" * 32,
    "widened": 1,
    "unpacked": "fp8",
    "placement": "3 layers on cpu",
    "torch": "2.12.0",
    "transformers": "5.17.0",
    "ecospec": "0.2",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CostKey)])
def test_each_difference_is_refused_by_name(name: str) -> None:
    path = save_cost_model(SAVED)
    other = dataclasses.replace(KEY, **{name: OTHERS[name]})
    assert find_cost_model(other) is None
    assert path_of(other) != path
    with pytest.raises(UserError) as raised:
        load_cost_model(path, other)
    assert f"{name} = {getattr(KEY, name)!r}, now it is {OTHERS[name]!r}" in str(raised.value)
    assert str(raised.value).startswith(f"--cost-model {path}: ")


def test_a_projection_is_of_no_device_and_says_so(tmp_path: Path) -> None:
    projected = dataclasses.replace(SAVED, projection="4.8 TB/s, 37.75 MB an expert", points=(), ar_seconds=None)
    path = save_cost_model(projected, tmp_path / "projected.json")
    assert load_cost_model(path, dataclasses.replace(KEY, device="other")).projection == "4.8 TB/s, 37.75 MB an expert"
    assert projected.manifest()["projection"] == "4.8 TB/s, 37.75 MB an expert"
    assert SAVED.manifest()["projection"] is None


def test_two_processes_that_add_to_one_model_lose_nothing() -> None:
    save_cost_model(SAVED)
    # Both began with what is saved now, and each has measured an estimator.
    first = dataclasses.replace(DRAFTING, estimating={"learned": 0.0005})
    slower = dataclasses.replace(PREDICTING, predict=0.009)
    second = dataclasses.replace(
        DRAFTING, predicting={"feature": slower, "own": PREDICTING}, estimating={"isotonic": 1e-4}
    )
    add_drafting(SAVED, first)
    found = add_drafting(SAVED, second)
    assert found == find_cost_model(KEY)
    (drafting,) = found.draftings
    assert drafting.estimating == {"learned": 0.0005, "isotonic": 1e-4}
    assert drafting.predicting == {"feature": PREDICTING, "own": PREDICTING}  # what was saved first stays
    other = dataclasses.replace(DRAFTING, draft_steps=5)
    assert add_drafting(SAVED, other).draftings == (drafting, other)
    # Measured anew meanwhile: a drafting of the older measurement goes with that.
    save_cost_model(dataclasses.replace(SAVED, measured="2031-01-01T00:00:00+00:00", draftings=(other,)))
    assert add_drafting(SAVED, first).draftings == (dataclasses.replace(DRAFTING, estimating={"learned": 0.0005}),)


def test_what_a_policy_gets_of_it() -> None:
    # 4 + 0.1 + 0.2 + 0.3 ms without a predictor, 2 ms more with it
    assert SAVED.for_method(None) == CostModel(0.008, 9e-5, 0.0004, REST.total, (48.0, 80.0, 100.0))
    assert REST.total == pytest.approx(0.0046)
    assert SAVED.for_method("feature").other_seconds == pytest.approx(0.0066)
    bare = dataclasses.replace(SAVED, draftings=())
    assert bare.for_method() == CostModel(0.008, 9e-5, 0.0004, 0.0, (48.0, 79.0))
    (drafting,) = SAVED.draftings
    timed = dataclasses.replace(SAVED, draftings=(dataclasses.replace(drafting, estimating={"learned": 0.0005}),))
    assert timed.for_method("feature", "learned").other_seconds == pytest.approx(0.0071)
    assert timed.for_method("feature", "isotonic") == timed.for_method("feature") == SAVED.for_method("feature")
    for wrong in (-1e-3, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="T_estimate"):
            dataclasses.replace(SAVED, draftings=(dataclasses.replace(drafting, estimating={"learned": wrong}),))
    with pytest.raises(UserError, match="no step with predictor 'featur'; did you mean 'feature'"):
        SAVED.for_method("featur")


def test_draftings_are_kept_by_drafter_and_tree_size() -> None:
    larger = dataclasses.replace(DRAFTING, draft_topk=4)
    two = SAVED.with_drafting(larger)
    assert two.draftings == (DRAFTING, larger)
    with pytest.raises(ValueError, match="several draftings"):
        two.for_method()
    assert two.narrowed(larger).for_method("feature") == SAVED.for_method("feature")
    slower = dataclasses.replace(DRAFTING, rest=PREDICTING)
    assert two.with_drafting(slower).draftings == (larger, slower)


def test_the_manifest_has_the_keys_that_reports_read() -> None:
    found = json.loads(json.dumps(SAVED.manifest()))
    assert (found["fixed_seconds"], found["pair_seconds"], found["token_seconds"]) == (0.008, 9e-5, 0.0004)
    assert (found["r_squared"], found["warnings"]) == (0.99, ["a sentence"])
    assert found["points"][1]["tokens"] == 2
    assert {"tokens", "expert_pairs", "seconds"} <= set(found["points"][0])
    assert found["key"]["device"] == "AMD EPYC"


def _set(*where: str | int, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for part in where[:-1]:
            value = value[part]
        value[where[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("points", 0, "seconds", to="fast"), "points.0.seconds: Input should be a valid number"),
        (_set("points", 0, "tokens", to=1.5), "points.0.tokens"),
        (_set("points", 0, "seconds", to=0.0), "a pass of no time"),
        (_set("points", to=[]), "a measurement without points"),
        (_set("copy_bytes_per_second", to=-1.0), "a bandwidth"),
        (_set("fit", "pair", "seconds", to=-1e-5), "holds numbers from 0"),
        (_set("fit", "pair", "second", to=1.0), "fit.pair.second: Unexpected keyword argument"),
        (_set("draftings", 0, "pairs_by_tokens", to=[9.0, 8.0]), "never read fewer experts"),
        (_set("draftings", 0, "rest", "draft", to=-1.0), "numbers from 0"),
        (_set("key", "threads", to="2"), "key.threads"),
        (_set("points", 0, "seconds", to="0.0127"), "points.0.seconds: Input should be a valid number"),
        (_set("schema", to=2), "a cost model of schema 2, expected 1"),
    ],
)
def test_a_file_edited_into_nonsense_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    raw = SAVED.to_json()
    raw = json.loads(json.dumps(raw))
    change(raw)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError) as raised:
        read_cost_model(path, "--cost-model")
    message = str(raised.value)
    assert said in message
    assert "\n" not in message
    assert "expected what ecospec-bench profile writes" in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', "\x00", json.dumps(SAVED.to_json())[:-40], "NaN"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a cost model of this version"):
        read_cost_model(path, "--cost-model")


def test_infinite_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "infinite.json"
    path.write_text(json.dumps(SAVED.to_json()).replace("0.0127", "Infinity"))
    with pytest.raises(UserError, match="not a cost model"):
        read_cost_model(path, "--cost-model")


def test_a_file_that_is_not_there_and_a_store_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_cost_model(tmp_path / "none.json", KEY)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ECOSPEC_COST_MODELS", str(tmp_path / "file" / "store"))
    with pytest.raises(UserError, match=r"cannot be written .* in \$ECOSPEC_COST_MODELS"):
        save_cost_model(SAVED)


def test_a_write_that_breaks_off_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_cost_model(SAVED)

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ecospec.harness.costs.store.os.fsync", broken)
    with pytest.raises(KeyboardInterrupt):
        save_cost_model(dataclasses.replace(SAVED, measured="later"))
    assert find_cost_model(KEY) == SAVED
    assert list(store_folder().iterdir()) == [path]
