"""Recordings that were damaged or edited by hand: one line that names the file and what is expected."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from written_costs import DRAFTING, projected

from ecospec.errors import UserError
from ecospec.harness.costs.saved import cost_model_text
from ecospec.harness.recording.checking import check_belongs, check_manifest, check_request
from ecospec.harness.recording.folder import check_output, open_recording, recording_into
from ecospec.harness.recording.steps import RecordedRequest, from_bytes, to_bytes

GEOMETRY = {"moe_layers": 1, "experts": 8, "top_k": 2, "vocab_size": 100}
FACTS: dict[str, Any] = {
    **{"suite": "gsm8k", "target": "tiny", "target_sha256": "a" * 64, "target_facts": {}, "dtype": "float32"},
    **{"geometry": GEOMETRY, "drafter_spec": "tiny", "drafter_sha256": None, "drafter_facts": {}},
    **{"draft_steps": 3, "draft_topk": 2, "temperature": 0.0, "outputs": 3, "states": True, "widened": 1},
    **{"predictors": ["mine"], "estimators": ["its"]},
}


def request_by_hand(ends_at_once: bool = False) -> RecordedRequest:
    """Two trees, of four nodes and of two; or no position at all."""
    nodes, trees = (0, 0) if ends_at_once else (6, 2)
    routing = np.array([[[0, 1], [1, 2], [4, 5], [2, 3], [0, 1], [6, 7]]], dtype=np.uint8)[:, :nodes]
    return RecordedRequest(
        tokens=np.array([10, 11, 12][: trees + 1], dtype=np.int32),
        sizes=np.array([4, 2][:trees], dtype=np.int32),
        node_tokens=np.array([10, 11, 50, 12, 11, 60][:nodes], dtype=np.int32),
        parents=np.array([-1, 0, 0, 1, -1, 0][:nodes], dtype=np.int32),
        probs=np.array([1.0, 0.5, 0.4, 0.5, 1.0, 0.9][:nodes]),
        choices=np.array([11, 12, 99, 13, 12, 99][:nodes], dtype=np.int32),
        routing=routing,
        predicted={} if ends_at_once else {"mine": routing},
        estimated={} if ends_at_once else {"its": np.array([1.0, 0.5, 0.4, 0.3, 1.0, 0.2])},
        entropies=None if ends_at_once else np.array([0, 1, 1, 2, 0, 1], dtype=np.float32),
        states=None if ends_at_once else np.ones((3, 4), dtype=np.float16),
        state_rows=None if ends_at_once else np.array([0, 0, 0, 1, 2, 2], dtype=np.int32),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of three requests, the last of which ended at its first token."""
    path = tmp_path / "rec"
    with recording_into(path, FACTS, resume=False) as writer:
        for number, at_once in enumerate((False, False, True)):
            writer.add(f"q-{number}", f"key-{number}", 7, request_by_hand(at_once), 0)
    return path


def read_all(folder: Path) -> None:
    for _ in open_recording(folder).requests():
        pass


def line_of(folder: Path) -> str | None:
    """The line by which a recording is refused; None where it is not."""
    try:
        read_all(folder)
    except UserError as error:
        return str(error)
    return None


def refused(folder: Path, name: str) -> str:
    """The line by which a recording is refused; it names the file."""
    line = line_of(folder)
    assert line is not None
    assert name in line
    assert "\n" not in line
    return line


def test_what_was_recorded_is_read_back(folder: Path) -> None:
    read_all(folder)
    check_manifest(json.dumps(FACTS))


# --- the manifest ---

WRONG = (None, 5, -1, 2.5, "x", "", True, [], [1], {}, {"a": 1}, float("nan"), 10**400)


@pytest.mark.parametrize("key", [*FACTS, "kind", "schema"])
def test_a_manifest_without_a_key_or_with_another_type_is_refused(folder: Path, key: str) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: value for name, value in whole.items() if name != key}), encoding="utf-8")
    refused(folder, "manifest.json")
    taken = []
    for wrong in WRONG:
        path.write_text(json.dumps({**whole, key: wrong}), encoding="utf-8")
        if line_of(folder) is None:
            taken.append(wrong)
    kinds = {int: int, float: int | float, type(None): str | None}
    kind = kinds.get(type(whole[key]), type(whole[key]))
    assert all(isinstance(each, kind) for each in taken)


@pytest.mark.parametrize("key", ["estimators_sha256", "estimators_folders"])
@pytest.mark.parametrize("wrong", [5, True, "ab", [1]])
def test_what_an_estimator_was_read_from_is_a_list_of_texts(folder: Path, key: str, wrong: object) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**whole, key: wrong}), encoding="utf-8")
    assert key in refused(folder, "manifest.json")
    path.write_text(json.dumps({**whole, key: [None]}), encoding="utf-8")
    read_all(folder)


@pytest.mark.parametrize("key", ["moe_layers", "experts", "top_k"])
@pytest.mark.parametrize("wrong", [0, -1, "8", 1.5, None, 99])
def test_another_geometry_is_refused(folder: Path, key: str, wrong: object) -> None:
    path = folder / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["geometry"][key] = wrong
    path.write_text(json.dumps(whole), encoding="utf-8")
    if (key, wrong) == ("experts", 99):
        read_all(folder)  # more experts than are named
    else:
        assert key in refused(folder, "manifest.json") if wrong != 99 else refused(folder, "00000.safetensors")


# --- the index ---


def edited(folder: Path, number: int, **change: Any) -> None:
    """Change values in a line of the index; a value of ... takes the key out."""
    path = folder / "index.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[number] = {key: value for key, value in {**lines[number], **change}.items() if value is not ...}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "requests/00001.safetensors"}, "expected requests/00000.safetensors"),
        ({"file": "../../etc/passwd"}, "expected requests/00000.safetensors"),
        ({"file": 5}, "file: Input should be a valid string"),
        ({"id": ["q"]}, "id: Input should be a valid string"),
        ({"sha256": None}, "sha256: Input should be a valid string"),
        ({"sha256": "0" * 64}, "not the file that was recorded"),
        ({"ties": "none"}, "ties: Input should be a valid integer"),
        ({"ties": -1}, "ties: Input should be greater than or equal to 0"),
        ({"prompt": ...}, "prompt: Field required"),
        ({"more": 1}, "more: Unexpected keyword argument"),
    ],
)
def test_an_edited_line_of_the_index_is_refused(folder: Path, change: dict[str, Any], said: str) -> None:
    edited(folder, 0, **change)
    name = "00000.safetensors" if "not the file" in said else "index.jsonl, line 1"
    assert said in refused(folder, name)


def test_lines_that_are_missing_doubled_or_too_many_are_refused(folder: Path) -> None:
    path = folder / "index.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[1:]), encoding="utf-8")
    assert "expected requests/00000.safetensors" in refused(folder, "index.jsonl, line 1")
    path.write_text("".join([*lines, lines[-1].replace("00002", "00003")]), encoding="utf-8")
    assert "lists request 'q-2' again" in refused(folder, "index.jsonl, line 4")
    path.write_text("".join([*lines, lines[-1].replace("00002", "00003").replace("q-2", "q-3")]), encoding="utf-8")
    assert "lists 4 requests, expected at most the 3" in refused(folder, "index.jsonl")
    path.write_text("".join([lines[0], "[" * 5000 + "\n", *lines[1:]]), encoding="utf-8")
    refused(folder, "index.jsonl, line 2")


@pytest.mark.parametrize("how", ["index", "missing", "damaged"])
def test_a_recording_is_not_gone_on_with_where_index_and_files_disagree(folder: Path, how: str) -> None:
    if how == "index":
        path = folder / "index.jsonl"
        path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]), encoding="utf-8")
    elif how == "missing":
        (folder / "requests" / "00001.safetensors").unlink()
    else:
        (folder / "requests" / "00001.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="record it anew"):
        check_output(folder, resume=True)
    with pytest.raises(UserError, match="record it anew"), recording_into(folder, FACTS, resume=True):
        pass
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# --- the arrays ---


def put(array: Any, at: Any, value: Any) -> Any:
    array = array.copy()
    array[at] = value
    return array


REQUEST = request_by_hand()
EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"probs": put(REQUEST.probs, 1, np.nan)}, "probs has nan at 1, expected probabilities"),
    "above 1": ({"probs": put(REQUEST.probs, 1, 1.5)}, "probs has 1.5 at 1"),
    "uncertain root": ({"probs": put(REQUEST.probs, 4, 0.9)}, "probs has 0.9 at 4"),
    "single precision": ({"probs": REQUEST.probs.astype(np.float32)}, "probs is float32, expected float64"),
    "parents out of order": ({"parents": put(REQUEST.parents, 1, 3)}, "parents has 3 at 1, expected -1 for a root"),
    "its own parent": ({"parents": put(REQUEST.parents, 2, 2)}, "parents has 2 at 2"),
    "two roots": ({"parents": put(REQUEST.parents, 3, -1)}, "parents has -1 at 3"),
    "no root": ({"parents": put(REQUEST.parents, 4, 0)}, "parents has 0 at 4"),
    "floats for tokens": ({"tokens": REQUEST.tokens.astype(np.float64)}, "tokens is float64, expected int32"),
    "a negative token": ({"node_tokens": put(REQUEST.node_tokens, 2, -7)}, "node_tokens has -7 at 2"),
    "another root": ({"node_tokens": put(REQUEST.node_tokens, 4, 9)}, "expected the output's token at every root"),
    "another choice": ({"choices": put(REQUEST.choices, 0, 9)}, "expected the output's token at every root"),
    "other sizes": ({"sizes": np.array([2, 4], dtype=np.int32)}, "parents has"),
    "an expert twice": ({"routing": put(REQUEST.routing, (0, 2), [3, 3])}, "routing has an expert twice"),
    "a prediction twice": ({"predicted": {"mine": REQUEST.routing * 0}}, "predicted by mine has an expert twice"),
    "wide experts": ({"routing": REQUEST.routing.astype(np.int64)}, "routing is int64, expected uint8 or uint16"),
    "an estimate": ({"estimated": {"its": put(REQUEST.probs, 1, np.inf)}}, "estimated by its has inf at 1"),
    "an estimate's root": ({"estimated": {"its": REQUEST.probs * 0.5}}, "estimated by its has 0.5 at 0"),
    "an entropy": ({"entropies": put(REQUEST.entropies, 3, -1)}, "entropies has -1.0 at 3"),
    "states": ({"states": put(REQUEST.states, (0, 0), np.nan)}, "states are no table of finite numbers"),
    "state rows": ({"state_rows": put(REQUEST.state_rows, 5, 3)}, "state_rows has 3 at 5, expected rows of 3"),
    "no states": ({"states": None}, "states without state_rows"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_request_is_refused_though_its_hash_is_right(folder: Path, edit: str) -> None:
    change, said = EDITS[edit]
    data = to_bytes(replace(REQUEST, **change))
    (folder / "requests" / "00001.safetensors").write_bytes(data)
    edited(folder, 1, sha256=hashlib.sha256(data).hexdigest())
    assert said in refused(folder, "00001.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"routing": REQUEST.routing + np.uint8(1)}, "routing names expert 8, expected less than 8"),
        ({"predicted": {}}, "it has the predictors [], expected ['mine']"),
        ({"estimated": {"other": REQUEST.estimated["its"]}}, "the estimators ['other'], expected ['its']"),
        ({"states": None, "state_rows": None}, "it lacks the drafter's states"),
    ],
)
def test_a_request_of_another_recording_is_refused(change: dict[str, Any], said: str) -> None:
    check_belongs(REQUEST, FACTS)
    with pytest.raises(ValueError, match=re.escape(said)):
        check_belongs(replace(REQUEST, **change), FACTS)


@pytest.mark.parametrize("name", ["tokens", "sizes", "routing", "probs", "states", "predicted/mine"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 1, 1, 1)])
def test_an_array_of_another_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    arrays = load(to_bytes(REQUEST))
    arrays[name] = np.zeros(shape, dtype=arrays[name].dtype)
    with pytest.raises((UserError, ValueError)):
        check_request(from_bytes(save(arrays), Path("x")))


def test_no_damage_of_a_file_ends_in_a_traceback(folder: Path) -> None:
    path = folder / "requests" / "00000.safetensors"
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        edited(folder, 0, sha256=hashlib.sha256(bytes(data)).hexdigest())
        line_of(folder)  # where there is none, it is a number that could have been recorded


def test_states_of_another_width_are_refused(folder: Path) -> None:
    data = to_bytes(replace(REQUEST, states=np.ones((3, 5), dtype=np.float16)))
    (folder / "requests" / "00001.safetensors").write_bytes(data)
    edited(folder, 1, sha256=hashlib.sha256(data).hexdigest())
    assert "states of width 5, expected the 4 of the others" in refused(folder, "00001.safetensors")


# --- by command ---


def test_a_recording_without_a_step_is_refused_and_one_with_few_says_so(
    folder: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    ran = command("replay", folder, "--acceptance", "draft", "--predictor", "mine", "--policy", "confidence")
    assert ran.code == 0, ran.err
    for line in (
        "1 of 3 outputs ended at their first token: they have no step",
        "--predictor mine: no policy here looks at predicted experts",
        "--acceptance draft: no policy here looks at estimates of acceptance",
    ):
        assert line in ran.out
    with recording_into(tmp_path / "empty", FACTS, resume=False) as writer:
        writer.add("q", "key", 7, request_by_hand(ends_at_once=True), 0)
    ran = command("replay", tmp_path / "empty")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "there is no step to replay" in ran.err
    assert ran.out == ""


WHAT_IF = {
    **{"name": "x", "source": "y", "bandwidth": "1e12", "moe-layers": 4, "experts": 8, "top-k": 2},
    **{"expert-bytes": "1e6", "always-read-bytes": 0},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bandwidth": "1e-300"}, "bandwidth: Input should be greater than or equal to 1000000"),
        ({"bandwidth": ".inf"}, "bandwidth: Input should be a finite number"),
        ({"bandwidth": ".nan"}, "bandwidth: Input should be a finite number"),
        ({"bandwidth": "1" + "0" * 400}, "bandwidth: Input should be a valid number"),
        ({"bandwidth": "1" + "0" * 5000}, "not YAML"),
        ({"bandwidth": "true"}, "bandwidth: expected a number, not a truth value"),
        ({"bandwidth": "2020-99-99"}, "not YAML"),
        ({"bandwidth-share": "1e-320"}, "bandwidth-share: Input should be greater than or equal to 0.001"),
        ({"expert-bytes": "1e300"}, "expert-bytes: Input should be less than or equal to"),
        ({"moe-layers": "1e400"}, "moe-layers: Input should be a valid integer"),
        ({"moe-layers": "true"}, "moe-layers: expected a number, not a truth value"),
        ({"top-k": 9}, "the file: top-k 9 of 8 experts: expected at most as many"),
        ({"fixed-seconds": "1e300"}, "fixed-seconds: Input should be less than or equal to"),
        ({"name": 3}, "name: Input should be a valid string"),
        ({"more": 3}, "more: Unexpected keyword argument"),
        ({"? [1]\n": 3}, "not YAML"),
        ({"name": "x\nbandwidth: 5"}, "bandwidth is given 2 times, expected once"),
    ],
)
def test_a_what_if_file_of_absurd_numbers_is_refused(
    folder: Path, command: Callable[..., Any], tmp_path: Path, change: dict[str, object], said: str
) -> None:
    path = tmp_path / "device.yaml"
    lines = [f"{key}: {value}\n" for key, value in WHAT_IF.items()]
    path.write_text("".join(lines), encoding="utf-8")
    assert command("replay", folder, "--policy", "adaptive", "--cost-model", path).code == 0
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**WHAT_IF, **change}.items()), encoding="utf-8")
    ran = command("replay", folder, "--policy", "adaptive", "--cost-model", path)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert f"device.yaml: {said}" in ran.err


def test_a_reckoned_cost_model_of_any_target_is_replayed_with_the_recorded_drafting(
    folder: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    own = replace(DRAFTING, drafter="tiny")
    (tmp_path / "two.json").write_text(
        cost_model_text(replace(projected(), draftings=(replace(own, draft_steps=4), own))), encoding="utf-8"
    )
    ran = command("replay", folder, "--policy", "adaptive", "--cost-model", tmp_path / "two.json")
    assert ran.code == 0, ran.err
    assert "PROJECTION of tiny, not measured: round numbers" in ran.out
    (tmp_path / "other.json").write_text(cost_model_text(replace(projected(), draftings=(DRAFTING,))), encoding="utf-8")
    ran = command("replay", folder, "--policy", "adaptive", "--cost-model", tmp_path / "other.json")
    assert ran.code == 2
    assert "expected one with steps of tiny, 3 steps, top-2" in ran.err


def test_the_command_says_it_in_one_line(folder: Path, command: Callable[..., Any]) -> None:
    edited(folder, 0, file="requests/00001.safetensors")
    ran = command("replay", folder)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "index.jsonl, line 1" in ran.err
