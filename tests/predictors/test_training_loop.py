"""The training loop: a run that was stopped and resumed is the unbroken run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecospec.errors import UserError
from ecospec.predictors import training
from ecospec.predictors.training import LoopConfig, scheduled_rate, train

CONFIG = LoopConfig(steps=9, learning_rate=0.05, warmup_steps=3, evaluate_every=4)


class Stop(Exception):
    """Stands in for a kill."""


class Toy:
    """A regression whose batch is a function of the step; it also has a frozen part."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Linear(1, 1))
        self.module[3].requires_grad_(False)
        self.stop_at = -1
        self.seen: list[tuple[int, float]] = []

    def loss(self, step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        if step == self.stop_at:
            raise Stop
        self.seen.append((step, progress))
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 4, generator=generator)
        value = (self.module(x) - x.sum(1, keepdim=True)).square().mean()
        return value, {"loss": float(value.detach())}

    def run(self, folder: Path, config: LoopConfig = CONFIG, **options: Any) -> dict[str, Any]:
        return train(self.module, self.loss, config, folder, **options)


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def unlike_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_resumed_run_repeats_the_unbroken_one(tmp_path: Path) -> None:
    whole, broken, resumed = Toy(), Toy(), Toy()
    figures = whole.run(tmp_path / "whole")
    assert figures["steps"] == 9
    assert figures["loss"] < whole_first_loss(tmp_path / "whole")
    every_step = LoopConfig(**{**vars(CONFIG), "checkpoint_every_seconds": -1.0})
    broken.stop_at = 5
    with pytest.raises(Stop):
        broken.run(tmp_path / "parts", every_step)
    resumed.module[0].weight.data.zero_()  # whatever it starts from is replaced
    after = resumed.run(tmp_path / "parts", every_step, resume=True)
    assert [step for step, _ in resumed.seen] == [5, 6, 7, 8]
    assert unlike_time(log(tmp_path / "parts")) == unlike_time(log(tmp_path / "whole"))
    assert after["loss"] == figures["loss"]
    for ours, theirs in zip(resumed.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def whole_first_loss(folder: Path) -> float:
    return float(log(folder)[0]["loss"])


def test_resuming_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    figures = Toy().run(tmp_path)
    again = Toy()
    assert again.run(tmp_path, resume=True) == figures  # a kill may come before they are written down
    assert again.seen == []


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Toy().run(tmp_path)
    with pytest.raises(UserError, match="already holds a training run; give --resume, or another --output"):
        Toy().run(tmp_path)


def test_a_checkpoint_that_is_damaged_or_anothers_is_refused(tmp_path: Path) -> None:
    Toy().run(tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    other = Toy()
    other.module[0] = nn.Linear(4, 8, bias=False)
    with pytest.raises(UserError, match=r"checkpoint\.pt: not a checkpoint of this training \(ValueError: 0\.bias"):
        other.run(tmp_path, resume=True)
    for damaged in (b"junk", whole[: len(whole) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"checkpoint\.pt: not a checkpoint of this training"):
            Toy().run(tmp_path, resume=True)


def test_the_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Toy().run(tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def dies(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise Stop

    monkeypatch.setattr(training.torch, "save", dies)
    with pytest.raises(Stop):
        Toy().run(tmp_path, LoopConfig(steps=12, learning_rate=0.05), resume=True)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_evaluation_runs_without_training_and_its_figures_are_logged(tmp_path: Path) -> None:
    toy, modes = Toy(), []

    def evaluate() -> dict[str, float]:
        modes.append((toy.module.training, torch.is_grad_enabled()))
        return {"held_out": float(len(modes))}

    figures = toy.run(tmp_path, evaluate=evaluate)
    assert modes == [(False, False)] * 3  # after steps 4 and 8, and at the end
    assert figures["held_out"] == 3.0
    assert [row["step"] for row in log(tmp_path) if "held_out" in row] == [4, 8, 9]
    assert toy.module.training is False


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    toy, fresh = Toy(), Toy()
    toy.run(tmp_path)
    assert torch.equal(toy.module[3].weight, fresh.module[3].weight)
    assert not torch.equal(toy.module[0].weight, fresh.module[0].weight)


def test_a_diverging_run_stops(tmp_path: Path) -> None:
    toy = Toy()
    toy.module[0].weight.data.fill_(math.nan)
    with pytest.raises(RuntimeError, match="step 0: the gradient norm is nan"):
        toy.run(tmp_path)


def test_the_time_bound_ends_a_run_early_and_the_schedule_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(clock)))
    toy = Toy()
    figures = toy.run(tmp_path, LoopConfig(steps=100, learning_rate=0.05, warmup_steps=0, seconds=4.0))
    assert figures["steps"] == 4
    assert [progress for _, progress in toy.seen] == [0.0, 0.25, 0.5, 0.75]


def test_the_rate_warms_up_then_falls_along_a_cosine() -> None:
    config = LoopConfig(steps=100, learning_rate=2.0, warmup_steps=4, final_share=0.1)
    rates = [scheduled_rate(config, 0.0, step) for step in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert scheduled_rate(config, 0.5, 50) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert scheduled_rate(config, 1.0, 99) == scheduled_rate(config, 1.7, 99) == pytest.approx(0.2)
