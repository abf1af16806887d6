"""The one training loop: resumable, with a log, a progress bar and a cosine schedule.

A batch is a function of the step alone, so that a run that was stopped and resumed sees what an unbroken
one sees. It lives in this room because the rooms above (the harness's target and drafter) may import it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from ecospec.errors import UserError

CHECKPOINT, BEST = "checkpoint.pt", "best.pt"
LOG = "log.jsonl"


@dataclass(frozen=True)
class LoopConfig:
    """How long and how fast to train.

    ``seconds`` (0: no bound) stops early, with the schedule following whichever of the two bounds is nearer.
    ``patience`` (0: none) stops after so many evaluations without a better one; see `train`.
    """

    steps: int
    learning_rate: float
    warmup_steps: int = 50
    final_share: float = 0.05
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seconds: float = 0.0
    checkpoint_every_seconds: float = 120.0
    evaluate_every: int = 200
    patience: int = 0


@dataclass
class Best:
    """The best evaluation so far, by one figure that is to be large.

    Attributes:
        figure: its name.
        found: the figures of that evaluation; empty before the first.
        stale: evaluations since.
    """

    figure: str
    found: dict[str, Any] = field(default_factory=dict)
    stale: int = 0

    def note(self, figures: Mapping[str, Any]) -> bool:
        """Take an evaluation; whether it is the best."""
        if self.found and not figures[self.figure] > self.found[self.figure]:
            self.stale += 1
            return False
        self.found, self.stale = dict(figures), 0
        return True


def scheduled_rate(config: LoopConfig, progress: float, step: int) -> float:
    """Linear warm-up, then a cosine from 1 to ``final_share`` over ``progress`` in [0, 1]."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * warm * (config.final_share + (1 - config.final_share) * cosine)


def train(
    module: nn.Module,
    loss: Callable[[int, float], tuple[Tensor, Mapping[str, float]]],
    config: LoopConfig,
    folder: Path,
    *,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    resume: bool = False,
    title: str = "train",
    keep_best: str = "",
) -> dict[str, Any]:
    """Minimise ``loss(step, progress)``, which returns the scalar to differentiate and figures to log.

    Args:
        keep_best: name of the figure of ``evaluate`` by which the best weights are kept, the larger the better;
            the module ends with them. Without it, it ends with the last.

    Returns the last logged figures, or those of the best evaluation, with ``steps`` and ``train_seconds``. The
    folder gets ``checkpoint.pt`` (rewritten atomically) and ``log.jsonl``.

    Raises:
        UserError: the folder already holds a run and ``resume`` is off, or the other way round.
    """
    refuse_another_run(folder, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CHECKPOINT
    parameters = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1]
    other = [p for p in parameters if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
    )
    step, elapsed, best = 0, 0.0, Best(keep_best)
    figures: dict[str, Any] = {}
    if resume and path.exists():
        step, elapsed, figures = load_checkpoint(path, module, optimizer, best)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    began = last_saved = time.monotonic()
    before = elapsed
    with Progress(*columns) as bar, (folder / LOG).open("a", encoding="utf-8") as log:
        task = bar.add_task(title, total=config.steps, completed=step)
        while step < config.steps and not (config.seconds and elapsed >= config.seconds) and not over(config, best):
            progress = step / config.steps
            if config.seconds:
                progress = max(progress, elapsed / config.seconds)
            rate = scheduled_rate(config, progress, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            module.train()
            value, seen = loss(step, progress)
            value.backward()
            norm = nn.utils.clip_grad_norm_(parameters, config.clip_norm)
            if not math.isfinite(float(norm)):
                raise RuntimeError(f"step {step}: the gradient norm is {float(norm)}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            now = time.monotonic()
            elapsed = before + now - began
            figures = {"step": step, "seconds": round(elapsed, 1), "rate": rate, **seen}
            done = step == config.steps or bool(config.seconds and elapsed >= config.seconds)
            evaluated = evaluate is not None and (done or step % config.evaluate_every == 0)
            if evaluate is not None and evaluated:
                module.eval()
                with torch.no_grad():
                    figures.update(evaluate())
                if keep_best and best.note(figures):
                    save_checkpoint(folder / BEST, module, optimizer, step, elapsed, best, figures)
            log.write(json.dumps(figures) + "\n")
            log.flush()
            shown = " ".join(f"{k} {v:.3f}" for k, v in seen.items())
            bar.update(task, completed=step, description=f"{title} {shown}")
            # What was the best must not be older in the checkpoint than in its own file.
            if done or (keep_best and evaluated) or now - last_saved > config.checkpoint_every_seconds:
                save_checkpoint(path, module, optimizer, step, elapsed, best, figures)
                last_saved = now
    if best.found:
        load_checkpoint(folder / BEST, module, optimizer, Best(keep_best))
        figures = {**best.found, "best_step": best.found["step"]}
    return {**figures, "steps": step, "train_seconds": round(elapsed, 1)}


def over(config: LoopConfig, best: Best) -> bool:
    """Whether patience has run out."""
    return bool(config.patience) and best.stale >= config.patience


def refuse_another_run(folder: Path, *, resume: bool) -> None:
    """Keep the files of a training run from being written over.

    Raises:
        UserError: the folder holds one that is not to be gone on with.
    """
    if (folder / CHECKPOINT).exists() and not resume:
        raise UserError(f"{folder} already holds a training run; give --resume, or another --output")


def load_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, best: Best
) -> tuple[int, float, dict[str, Any]]:
    """Put the trainable parameters, the optimiser's state and the best evaluation back.

    Returns step, elapsed seconds, and the figures that were logged last.

    Raises:
        UserError: the file is damaged, or of another training.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: tuple(value.shape) for name, value in state["module"].items()}
        expected = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
        if found != expected:
            name = sorted(found.items() ^ expected.items())[0][0]
            raise ValueError(f"{name} is {found.get(name, 'not there')}, expected {expected.get(name, 'nothing')}")
        module.load_state_dict(state["module"], strict=False)  # what is not trained is not in it
        optimizer.load_state_dict(state["optimizer"])
        best.found, best.stale = dict(state["best"]), int(state["stale"])
        return int(state["step"]), float(state["elapsed"]), dict(state["figures"])
    except Exception as error:  # unpickling damaged bytes may raise anything
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{path}: not a checkpoint of this training ({type(error).__name__}: {reason}); give another --output"
        ) from error


def save_checkpoint(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    elapsed: float,
    best: Best,
    figures: Mapping[str, Any],
) -> None:
    """Write all that `load_checkpoint` puts back; a kill leaves the old or the new file."""
    state = {
        "module": {name: p.detach() for name, p in module.named_parameters() if p.requires_grad},
        "optimizer": optimizer.state_dict(),
        "step": step,
        "elapsed": elapsed,
        "best": best.found,
        "stale": best.stale,
        "figures": dict(figures),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
