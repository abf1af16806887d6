"""Traces on disk: what goes in comes out, and what is damaged, cut short or of another target is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ecospec.errors import UserError
from ecospec.predictors import traces
from ecospec.predictors.contract import TargetView
from ecospec.predictors.traces import TracedText, TraceWriter, expert_dtype, open_trace, pack_routing

VIEW = TargetView(moe_layers=3, experts=8, top_k=2, vocab_size=64, hidden_size=4, embedding=torch.zeros(64, 4))
FACTS = {"target_name": "mine", "seed": 0}


def texts(count: int, view: TargetView = VIEW, seed: int = 0) -> list[TracedText]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        n = int(rng.integers(1, 30))
        routing = np.stack(
            [[rng.choice(view.experts, view.top_k, replace=False) for _ in range(n)] for _ in range(view.moe_layers)]
        )
        tokens = rng.integers(0, view.vocab_size, n).astype(np.int32)
        found.append(TracedText(f"t-{i}", tokens, int(rng.integers(0, n + 1)), pack_routing(routing, view.experts)))
    return found


def write(folder: Path, given: list[TracedText], *, resume: bool = False, view: TargetView = VIEW) -> TraceWriter:
    with TraceWriter(folder, FACTS, view, resume=resume) as writer:
        for text in given:
            if text.id not in writer.done:
                writer.append(text)
    return writer


def write_and_be_stopped(folder: Path, given: list[TracedText]) -> None:
    with TraceWriter(folder, FACTS, VIEW) as writer:
        for text in given:
            writer.append(text)
        raise KeyboardInterrupt


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "SHARD_TOKENS", 50)


def same(ours: TracedText, theirs: TracedText) -> bool:
    return (
        (ours.id, ours.prompt_tokens) == (theirs.id, theirs.prompt_tokens)
        and np.array_equal(ours.tokens, theirs.tokens)
        and np.array_equal(ours.routing, theirs.routing)
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("experts", [8, 256, 300])
def test_what_is_written_is_read(tmp_path: Path, experts: int) -> None:
    view = replace(VIEW, experts=experts)
    given = texts(20, view)
    write(tmp_path / "trace", given, view=view)
    trace = open_trace(tmp_path / "trace", view)
    assert (trace.texts, trace.tokens) == (20, sum(len(text.tokens) for text in given))
    assert len(trace.shards) > 2
    assert all(map(same, trace, given))
    assert next(iter(trace)).routing.dtype == (np.uint16 if experts > 256 else np.uint8) == expert_dtype(experts)


def test_a_token_of_a_large_model_costs_less_than_a_kilobyte(tmp_path: Path) -> None:
    large = TargetView(moe_layers=94, experts=128, top_k=8, vocab_size=151_936, hidden_size=4096, embedding=None)
    rng = np.random.default_rng(0)
    routing = pack_routing(rng.integers(0, 128, (94, 1000, 8)), 128)
    text = TracedText("t", rng.integers(0, 151_936, 1000).astype(np.int32), 10, routing)
    write(tmp_path / "trace", [text], view=large)
    size = sum(len(data) for data in files(tmp_path / "trace").values())
    assert size / 1000 < 800


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("stop", [0, 1, 5, 11, 19])
def test_a_trace_that_was_stopped_and_gone_on_with_has_the_same_files(tmp_path: Path, stop: int) -> None:
    given = texts(20)
    write(tmp_path / "whole", given)
    with pytest.raises(KeyboardInterrupt):
        write_and_be_stopped(tmp_path / "part", given[:stop])
    index = tmp_path / "part" / "index.jsonl"
    with index.open("ab") as file:
        file.write(b'{"name": "000')  # a write cut short
    (tmp_path / "part" / "shards" / "00099.partial").write_bytes(b"torn")
    write(tmp_path / "part", given, resume=True)
    (tmp_path / "part" / "shards" / "00099.partial").unlink()
    assert files(tmp_path / "part") == files(tmp_path / "whole")


def test_a_trace_of_another_target_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace", texts(2))
    for change in ({"moe_layers": 4}, {"experts": 9}, {"top_k": 1}, {"vocab_size": 65}, {"hidden_size": 5}):
        ((name, value),) = change.items()
        found = getattr(VIEW, name)
        with pytest.raises(UserError, match=f"made from a target with {name} = {found}, not {value}"):
            open_trace(tmp_path / "trace", replace(VIEW, **change))


def test_a_trace_is_gone_on_with_by_the_same_options_only(tmp_path: Path) -> None:
    write(tmp_path / "trace", texts(2))
    with pytest.raises(UserError, match="was made with seed = 0, now it is 1; expected the same options"):
        TraceWriter(tmp_path / "trace", {**FACTS, "seed": 1}, VIEW, resume=True)
    with pytest.raises(UserError, match="not an empty folder; expected a new one, or --resume"):
        TraceWriter(tmp_path / "trace", FACTS, VIEW)
    with pytest.raises(UserError, match=r"no manifest\.json; expected a folder"):
        TraceWriter(tmp_path / "nowhere", FACTS, VIEW, resume=True)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("shards/00001.safetensors", lambda data: data[:-9], "shard 00001.safetensors is damaged: its hash is not"),
        ("shards/00001.safetensors", lambda data: data[:-1] + b"x", "shard 00001.safetensors is damaged: its hash"),
        ("shards/00001.safetensors", None, "shard 00001.safetensors is not readable"),
        ("manifest.json", lambda data: data[:40], "manifest.json is damaged"),
        ("manifest.json", lambda data: b"[]", "manifest.json is not that of a trace"),
        ("manifest.json", lambda data: data.replace(b'"schema": 1', b'"schema": 7'), "written in format 7, expected 1"),
        ("manifest.json", None, "no manifest.json"),
        ("index.jsonl", lambda data: b"{}\n" + data, "index.jsonl, line 1, is damaged"),
        ("index.jsonl", lambda data: data.split(b"\n", 1)[1], "index.jsonl, line 1, is damaged"),
        ("index.jsonl", lambda data: b"", "it has no texts; expected a finished trace"),
        ("index.jsonl", None, "it has no texts; expected a finished trace"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, name: str, damage: object, message: str) -> None:
    folder = tmp_path / "trace"
    write(folder, texts(20))
    path = folder / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError) as refused:
        list(open_trace(folder, VIEW))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


def test_a_shard_of_another_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace", texts(3))
    wide = replace(VIEW, moe_layers=5)
    write(tmp_path / "wide", texts(3, wide), view=wide)
    for name in ("shards/00000.safetensors", "index.jsonl"):
        shutil.copy(tmp_path / "wide" / name, tmp_path / "trace" / name)
    with pytest.raises(UserError, match=r"shard 00000\.safetensors has routing \(\d+, 5, 2\), expected"):
        list(open_trace(tmp_path / "trace", VIEW))


def test_a_text_is_in_a_trace_once(tmp_path: Path) -> None:
    given = texts(1)
    with pytest.raises(ValueError, match="t-0 is in the trace already"):
        write_twice(tmp_path / "trace", given)


def write_twice(folder: Path, given: list[TracedText]) -> None:
    with TraceWriter(folder, FACTS, VIEW) as writer:
        writer.append(given[0])
        writer.append(given[0])


@pytest.mark.parametrize(
    ("tokens", "prompt", "routed"), [([], 0, 0), ([1], 0, 2), ([1, 2], 0, 1), ([1, 2], 3, 2), ([1, 2], -1, 2)]
)
def test_a_text_has_a_routing_for_each_token_and_no_longer_prompt(tokens: list[int], prompt: int, routed: int) -> None:
    with pytest.raises(ValueError, match=r"expected \[L, n, K\]|prompt tokens of"):
        TracedText("t", np.array(tokens, dtype=np.int32), prompt, np.zeros((3, routed, 2), dtype=np.uint8))


def test_the_manifest_ties_a_trace_to_its_target(tmp_path: Path) -> None:
    write(tmp_path / "trace", texts(1))
    manifest = json.loads((tmp_path / "trace" / "manifest.json").read_text(encoding="utf-8"))
    assert len(manifest["target"].pop("embedding_sha256")) == 64
    assert manifest["target"] == {"moe_layers": 3, "experts": 8, "top_k": 2, "vocab_size": 64, "hidden_size": 4}
    assert manifest["seed"] == 0


def test_a_trace_of_a_target_with_the_same_sizes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace", texts(2))
    with pytest.raises(UserError, match="made from a target with embedding_sha256"):
        open_trace(tmp_path / "trace", replace(VIEW, embedding=torch.ones(64, 4)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lengths", lambda a: a * 2),
        ("lengths", lambda a: a * 0),
        ("lengths", lambda a: a[:-1]),
        ("prompt_lengths", lambda a: a * 0 - 1),
        ("prompt_lengths", lambda a: a + 100),
        ("prompt_lengths", lambda a: a[:-1]),
        ("tokens", lambda a: a + VIEW.vocab_size),
        ("tokens", lambda a: a * 0 - 1),
        ("tokens", lambda a: a.astype(np.float32)),
        ("routing", lambda a: a + VIEW.experts),
        ("routing", lambda a: a.astype(np.float32)),
    ],
)
def test_a_shard_with_what_no_text_of_the_target_has_is_one_line(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    write(tmp_path / "trace", texts(3))
    path, index = tmp_path / "trace" / "shards" / "00000.safetensors", tmp_path / "trace" / "index.jsonl"
    arrays = load_file(path)
    save_file({**arrays, name: change(arrays[name])}, path)
    line = json.loads(index.read_text())
    index.write_text(json.dumps({**line, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}) + "\n")
    with pytest.raises(UserError, match=r"shard 00000\.safetensors has lengths, tokens or experts"):
        list(open_trace(tmp_path / "trace", VIEW))
