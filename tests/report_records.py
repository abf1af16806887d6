"""Records whose report can be worked out by hand; shared by the tests of a report's numbers and of its words."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ecospec.harness.records import AR, PromptRecord
from ecospec.harness.report import MethodInfo, MethodRow, Report, summarise
from ecospec.harness.report_text import print_report

METHODS = [
    MethodInfo(AR),
    MethodInfo("confidence"),
    MethodInfo("marginal"),
    MethodInfo("oracle", true_routing=True),
]
GEOMETRY: dict[str, Any] = {"moe_layers": 2, "top_k": 2, "expert_bytes": 1_000, "always_read_bytes": 4_000}
MANIFEST: dict[str, Any] = {
    "suite": "gsm8k",
    "source": "embedded sample",
    "exemplars": "embedded",
    "target": "embedded",
    "widened": 8,
    "drafter": "embedded",
    "predictor": "learned",
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "budget": 4,
    "draft_steps": 3,
    "draft_topk": 2,
    "max_new_tokens": 128,
    "check": "all",
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "started": "2026-01-02T03:04:05+00:00",
}


def record(
    prompt: str,
    method: str,
    tokens: int,
    decode_seconds: float,
    steps: int,
    selected: int,
    expert_pairs: int,
    phases: tuple[float, float, float, float, float],
    **changes: Any,
) -> PromptRecord:
    names = ("draft", "predict", "select", "verify", "commit")
    return PromptRecord(
        prompt_id=prompt,
        method=method,
        prompt_tokens=10,
        tokens=list(range(tokens)),
        text="",
        reason="length",
        prefill_seconds=1.0,
        decode_seconds=decode_seconds,
        steps=steps,
        emitted=tokens - 1,
        selected=selected,
        expert_pairs=expert_pairs,
        phase_seconds=dict(zip(names, phases, strict=True)),
        **{"verdict": "exact", **changes},
    )


def records() -> list[PromptRecord]:
    """Two prompts of 4 and 8 decode tokens, and a third that ends at its first token."""
    return [
        record("p1", AR, 5, 4.0, 4, 4, 16, (0, 0, 0, 3.6, 0.4)),
        record("p1", "confidence", 5, 2.0, 2, 8, 14, (0.4, 0, 0.1, 1.2, 0.3)),
        record("p1", "marginal", 5, 4.0, 4, 16, 20, (0.4, 0.2, 0.1, 3.0, 0.3), predicted_overlap=0.5),
        record("p1", "oracle", 5, 4.0, 4, 16, 18, (0.4, 0, 0.1, 3.0, 0.3)),
        record("p2", AR, 9, 8.0, 8, 8, 32, (0, 0, 0, 7.2, 0.8)),
        record("p2", "confidence", 9, 4.0, 4, 16, 28, (0.8, 0, 0.2, 2.4, 0.6)),
        record("p2", "marginal", 9, 1.0, 2, 6, 16, (0.2, 0.1, 0.05, 0.6, 0.05), predicted_overlap=0.8),
        record("p2", "oracle", 9, 1.0, 2, 6, 14, (0.2, 0, 0.05, 0.6, 0.05)),
        *(record("p3", method.label, 1, 1e-7, 0, 0, 0, (0, 0, 0, 0, 0)) for method in METHODS),
    ]


def summary(
    found: list[PromptRecord], methods: list[MethodInfo] = METHODS, check: str = "all", **options: Any
) -> Report:
    return summarise(found, methods=methods, check=check, **{**GEOMETRY, **options})


def row(report: Report, label: str) -> MethodRow:
    return next(row for row in report.rows if row.label == label)


def printed(report: Report, manifest: dict[str, Any] | None = None, width: int = 20) -> str:
    """What a file gets that rich believes to be ``width`` columns wide."""
    file = io.StringIO()
    print_report(report, MANIFEST if manifest is None else manifest, Console(file=file, width=width))
    return file.getvalue()
