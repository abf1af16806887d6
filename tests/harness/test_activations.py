"""Experts' activations: what a run counts against a count of its own, the file, and the sums."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import run_ar, run_speculative, tiny_head, tiny_target

from ecospec.errors import UserError
from ecospec.harness.activations import (
    ACTIVATIONS,
    PromptActivations,
    append_activations,
    as_counts,
    keep_activations,
    read_activations,
    total_activations,
)
from ecospec.harness.choosing import Sampling
from ecospec.harness.decoding import Speculation
from ecospec.harness.records import read_records
from ecospec.harness.steps import active_pairs, unique_pairs
from ecospec.harness.target import TargetSession
from ecospec.policies.builtin import Confidence


def line(prompt: str, ar: list[list[float]], mine: list[list[float]], steps: float = 4) -> PromptActivations:
    return PromptActivations(prompt, {"AR": steps, "mine": 2}, {"AR": ar, "mine": mine})


LINES = [line("p1", [[4, 0], [1, 3]], [[2, 1], [0, 2]]), line("p2", [[0, 4], [2, 2]], [[1, 1], [2, 0]])]


def test_active_pairs_by_hand() -> None:
    routing = torch.tensor([[[0, 1], [1, 2]], [[3, 0], [3, 0]]])  # 2 layers, 2 tokens, K = 2
    assert active_pairs(routing, experts=4).tolist() == [[True, True, True, False], [True, False, False, True]]
    assert unique_pairs(routing, experts=4) == 5
    assert active_pairs(torch.empty(0, 2, 0, dtype=torch.int64), experts=0).shape == (0, 0)


@pytest.mark.parametrize("speculative", [False, True])
def test_a_generation_counts_the_experts_of_every_pass(monkeypatch: pytest.MonkeyPatch, speculative: bool) -> None:
    target, seen = tiny_target(), Counter[tuple[int, int]]()

    def watch(name: str) -> None:
        real = getattr(TargetSession, name)

        def watched(self: TargetSession, *arguments: Any) -> Any:
            step = real(self, *arguments)
            layers = step.routing.tolist()
            seen.update({(layer, e) for layer, rows in enumerate(layers) for row in rows for e in row})
            return step

        monkeypatch.setattr(TargetSession, name, watched)

    watch("verify" if speculative else "decode")
    if speculative:
        method = Speculation(Confidence(), tiny_head(), 4, 3, 2)
        done = run_speculative(target, method, [3, 1, 4, 1, 5], Sampling(), n=12)
    else:
        done = run_ar(target, [3, 1, 4, 1, 5], Sampling(), n=12)
    assert done.activations is not None
    expected = np.zeros_like(done.activations)
    for (layer, expert), count in seen.items():
        expected[layer, expert] = count
    assert done.activations.tolist() == expected.tolist()
    assert done.activations.sum() == sum(step.expert_pairs for step in done.steps)


def test_lines_come_back_and_a_torn_last_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / ACTIVATIONS
    append_activations(path, [])
    assert not path.exists()
    append_activations(path, LINES[:1])
    append_activations(path, LINES[1:])
    assert list(read_activations(path)) == LINES
    whole = path.read_text()
    path.write_text(whole + '{"prompt_id": "p3", "st')
    assert list(read_activations(path)) == LINES
    keep_activations(path, {"p2"})
    assert list(read_activations(path)) == LINES[1:]
    assert path.read_text() == whole.splitlines(keepends=True)[1]


@pytest.mark.parametrize(
    "wrong",
    [
        "[]",
        "{}",
        '{"prompt_id": "p", "steps": {"AR": 1}, "counts": {}}',
        '{"prompt_id": "p", "steps": {"AR": 1}, "counts": {"AR": [[2]]}}',
        '{"prompt_id": "p", "steps": {"AR": 1}, "counts": {"AR": [[-1]]}}',
        '{"prompt_id": "p", "steps": {"AR": 1}, "counts": {"AR": [[1], [1, 0]]}}',
        '{"prompt_id": "p", "steps": {"AR": 1}, "counts": {"AR": [1]}}',
        '{"prompt_id": "p", "steps": {"AR": 1, "b": 1}, "counts": {"AR": [[1]], "b": [[1, 0]]}}',
        '{"prompt_id": 1, "steps": {}, "counts": {}}',
        "nonsense",
    ],
)
def test_what_no_run_has_written_is_an_error(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / ACTIVATIONS
    path.write_text(wrong + "\n")
    append_activations(path, LINES)
    with pytest.raises(UserError, match="line 1: not a line of this version"):
        list(read_activations(path))


def test_sums_shares_and_the_load_curve_by_hand(tmp_path: Path) -> None:
    path = tmp_path / ACTIVATIONS
    assert total_activations(path, ["AR"], {"p1"}) == {}
    append_activations(path, LINES)
    found = total_activations(path, ["AR", "mine", "other"], {"p1", "p2", "p3"})
    assert list(found) == ["AR", "mine"]
    assert found["AR"].counts.tolist() == [[4, 4], [3, 5]]
    assert (found["AR"].steps, found["AR"].prompts) == (8, 2)
    assert found["AR"].shares.tolist() == [[0.5, 0.5], [0.375, 0.625]]
    assert found["AR"].load_curve.tolist() == [(0.5 + 0.625) / 2, (0.5 + 0.375) / 2]
    assert found["AR"].load_curve.sum() == 8 * 2 / 8 / 2  # pairs / steps / layers: E
    assert total_activations(path, ["mine"], {"p2"})["mine"].counts.tolist() == [[1, 1], [2, 0]]


def test_whole_counts_are_integers_in_the_file() -> None:
    assert json.dumps(as_counts(np.array([[1.0, 0.5]]))) == "[[1, 0.5]]"


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_writes_counts_that_add_up_to_its_records(bench: Callable[..., Any], tmp_path: Path, batch: int) -> None:
    ran = bench("--policy", "marginal", "--limit", 3, "--batch-size", batch, "--output", "out")
    assert ran.code == 0, ran.err
    records = read_records(tmp_path / "out" / "prompts.jsonl")
    lines = {each.prompt_id: each for each in read_activations(tmp_path / "out" / ACTIVATIONS)}
    assert set(lines) == {record.prompt_id for record in records}
    for record in records:
        found = lines[record.prompt_id]
        assert found.steps[record.method] == pytest.approx(record.whole_steps)
        assert np.sum(found.counts[record.method]) == pytest.approx(record.expert_pairs)
    if batch > 1:
        # A batch's steps are whole ones again, counted over the prompts that shared them.
        shared = [record for record in records if record.batch == records[0].prompt_id and record.method == "AR"]
        assert len(shared) == 2
        counts = sum(np.array(lines[record.prompt_id].counts["AR"]) for record in shared)
        assert np.allclose(counts, np.round(counts))
    before = (tmp_path / "out" / ACTIVATIONS).read_text()
    (tmp_path / "out" / ACTIVATIONS).write_text(before + '{"prompt_id": "gone", "st')
    assert bench("--policy", "marginal", "--limit", 3, "--batch-size", batch, "--output", "out", "--resume").code == 0
    assert (tmp_path / "out" / ACTIVATIONS).read_text() == before
