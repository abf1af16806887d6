"""Runs with known figures and realistic noise in their times, in memory and as run folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ecospec.harness.comparing.runs import Method, Run, by_method, output_of
from ecospec.harness.records import AR, PromptRecord, append_records

LAYERS = 2
FACTS: dict[str, Any] = {
    "suite": "gsm8k",
    "prompts_sha256": "a" * 64,
    "checkpoint_sha256": "c" * 64,
    "drafter_sha256": None,
    "drafter_spec": "eagle3",
    "limit": None,
    "budget": 4,
    "temperature": 0.0,
    "dtype": "float32",
    "check": "all",
    "device": "cpu",
    "device_name": "a processor",
    "threads": 2,
    "versions": {"ecospec": "0.1", "torch": "2.13.0"},
    "geometry": {"moe_layers": LAYERS},
    "copy_bytes_per_second": 1e10,
}
SPEEDUPS = {AR: 1.0, "confidence": 1.5, "marginal-cost": 1.6, "mine": 1.4}
METHODS = (
    Method(AR, False),
    Method("confidence", False, "confidence"),
    Method("marginal-cost", False, "marginal-cost", "feature"),
    Method("mine", False, "mine", "feature"),
)


def records(
    prompts: int = 24, *, noise: float = 0.0, seed: int = 0, methods: Sequence[Method] = METHODS
) -> list[PromptRecord]:
    """The outputs of a run: the figures depend on the prompt, the times on ``seed`` as well.

    Args:
        noise: standard deviation of the log of a time; besides it, the machine drifts from prompt to prompt, by a
            random walk that AR and all methods share, and one run is faster than another.
    """
    rng = np.random.default_rng([seed, 1])
    speed = rng.normal(0, 2 * noise) + np.cumsum(rng.normal(0, noise / 2, prompts))
    found = []
    for index in range(prompts):
        sizes = np.random.default_rng(index)
        length = int(sizes.integers(30, 90))
        for method in methods:
            steps = length - 1 if method.label == AR else max(1, (length - 1) * 10 // int(sizes.integers(18, 24)))
            seconds = 0.02 * (length - 1) / SPEEDUPS[method.label] * float(np.exp(speed[index] + rng.normal(0, noise)))
            found.append(
                PromptRecord(
                    prompt_id=f"gsm8k-{index}",
                    method=method.label,
                    prompt_tokens=10,
                    tokens=[index, *range(length - 1)],
                    text="",
                    reason="length",
                    prefill_seconds=0.1,
                    decode_seconds=seconds,
                    steps=steps,
                    emitted=length - 1,
                    selected=steps * (1 if method.label == AR else 4),
                    expert_pairs=float(steps * LAYERS * (4 if method.label == AR else 9)),
                    phase_seconds={"verify": seconds},
                    predicted_overlap=0.75 if method.predictor else None,
                    verdict="exact",
                    score=float(index % 2),
                )
            )
    return found


def changed(
    found: Sequence[PromptRecord], change: Callable[[PromptRecord], dict[str, Any]], method: str = "marginal-cost"
) -> list[PromptRecord]:
    """The records with those of one method changed."""
    return [replace(record, **change(record)) if record.method == method else record for record in found]


def run_of(found: Sequence[PromptRecord], methods: Sequence[Method] = METHODS, **facts: Any) -> Run:
    """A run in memory."""
    outputs = by_method([output_of(record) for record in found])
    return Run("gsm8k", {**FACTS, **facts}, LAYERS, tuple(methods), outputs)


def write_run(folder: Path, found: Sequence[PromptRecord], methods: Sequence[Method] = METHODS, **facts: Any) -> Path:
    """A run folder with what a comparison reads of it."""
    folder.mkdir(parents=True)
    parts = [
        {
            "label": method.label,
            "policy": method.policy,
            "predictor": method.predictor,
            "predictor_sha256": method.predictor_sha256,
        }
        for method in methods
        if method.label != AR
    ]
    manifest = {**FACTS, "methods": [method.label for method in methods], "method_parts": parts, **facts}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    append_records(folder / "prompts.jsonl", found)
    rows = [{"label": method.label, "true_routing": method.true_routing} for method in methods]
    (folder / "report.json").write_text(
        json.dumps({"rows": rows, "prompts": len({each.prompt_id for each in found})}), encoding="utf-8"
    )
    return folder
