"""What was run, line by line, as a page says it of a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ecospec.harness.report_notes import NONE, cost_words, predictors_used


def plain(value: Any) -> str:
    """A manifest's value in a line of text."""
    if value is None or value == {}:
        return NONE
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


def _acceptance(manifest: Mapping[str, Any]) -> str:
    return str(manifest["acceptance"]) if manifest.get("estimated") else ""


def _given(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda manifest: plain(manifest[key]) if key in manifest else ""


FACTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "suite": _given("suite"),
    "data": _given("source"),
    "exemplars": _given("exemplars"),
    "target": _given("target"),
    "experts widened by": _given("widened"),
    "quantisation undone on loading": _given("unpacked"),
    "drafter": _given("drafter"),
    "predictor": lambda manifest: ", ".join(predictors_used(manifest)),
    "acceptance estimator": _acceptance,
    "cost model": cost_words,
    "budget γ": _given("budget"),
    "draft steps": _given("draft_steps"),
    "draft top-k": _given("draft_topk"),
    "most new tokens": _given("max_new_tokens"),
    "most problems": lambda manifest: str(manifest["limit"]) if manifest.get("limit") else "",
    "batch size": _given("batch_size"),
    "chat template": _given("chat_template"),
    "chat template's switches": _given("chat_switches"),
    "system prompt": _given("system_prompt"),
    "temperature": _given("temperature"),
    "top-p": _given("top_p"),
    "top-k": _given("top_k"),
    "seed": _given("seed"),
    "lossless check": _given("check"),
    "dtype": _given("dtype"),
    "device": _given("device"),
    "device name": _given("device_name"),
    "device map": _given("device_map"),
    "most memory by device": _given("max_memory"),
    "layers by device": _given("layers_by_device"),
    "processes": _given("processes"),
    "split over processes by": _given("parallel"),
    "threads": _given("threads"),
    "versions": _given("versions"),
    "started": _given("started"),
}
"""What a page says of a manifest, in this order, under these names; nothing where the text is empty."""


def run_facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of each fact that the manifest has; of predictors, estimators and cost models, what was used."""
    return [(name, text) for name, fact in FACTS.items() if (text := fact(manifest))]
