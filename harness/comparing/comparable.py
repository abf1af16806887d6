"""What two runs must have in common so that a difference between them is the code's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ecospec.harness.comparing.runs import Method, Run
from ecospec.harness.run_folder import first_difference

MUST_AGREE = [
    *("suite", "suite_sha256", "data_sha256", "max_new_tokens", "prompts_sha256"),
    *("checkpoint_sha256", "drafter_sha256", "widened"),
    *("chat_template_sha256", "chat_switches", "system_prompt"),
    *("budget", "draft_steps", "draft_topk", "batch_size"),
    *("temperature", "top_p", "top_k", "seed"),
    *("acceptance", "acceptance_sha256", "cost_model_sha256"),
    *("dtype", "check", "run_code"),
]
"""Each decides which tokens are emitted, or what of them is counted."""

BY_METHOD = ["baseline", "policy", "predictor", "methods", "predictor_sha256"]
"""Compared for each method that both runs have."""

BY_CONTENT = ["target", "drafter", "suite_file", "chat_template"]
"""Names and paths: what they stand for is compared by its hash."""

MACHINE = [
    *("device", "device_name", "device_cores", "device_memory_bytes", "device_cuda", "device_platform"),
    *("threads", "device_map", "max_memory", "processes", "parallel", "layers_by_device"),
]
"""Each decides how long it takes; some, in which order numbers are added up as well."""

ROUNDING = ["device", "device_name", "threads", "device_map", "processes", "parallel"]
"""Of these, the ones that decide in which order numbers are added up, so that a choice between equals can differ."""

KEPT_FACTS = [
    *MUST_AGREE,
    *MACHINE,
    *("limit", "drafter_spec", "versions", "git_revision", "started", "copy_bytes_per_second"),
]
"""What a saved baseline keeps of a manifest."""

OWN = "ecospec"
"""The version that a comparison is about; those of the other packages are the machine's."""


def why_not_comparable(base: Run, new: Run) -> str | None:
    """In words, the first thing that makes every figure of two runs differ for another reason; None for nothing."""
    difference = first_difference(base.facts, new.facts, MUST_AGREE)
    hashes = [run.facts.get("drafter_sha256") for run in (base, new)]
    if difference is None and None in hashes:
        difference = first_difference(base.facts, new.facts, ["drafter_spec"])
    if difference is not None:
        return _of_two(difference)
    for label in (method.label for method in base.methods):
        pair = [_method(run, label) for run in (base, new)]
        if pair[0] is None or pair[1] is None:
            continue
        if pair[0].predictor_sha256 != pair[1].predictor_sha256 or (
            pair[0].predictor_sha256 is None and pair[0].predictor != pair[1].predictor
        ):
            said = [each.predictor_sha256 or each.predictor for each in pair if each is not None]
            return f"the predictor of {label} = {said[0]!r} in BASE and {said[1]!r} in NEW"
    for label in (method.label for method in base.methods if _method(new, method.label)):
        before, now = base.outputs.get(label, {}), new.outputs.get(label, {})
        if set(before) != set(now):
            only = sorted(set(before) ^ set(now))
            where = "BASE" if only[0] in before else "NEW"
            return f"prompt {only[0]} of {label} is in {where} alone"
    return None


def machine_difference(base: Run, new: Run) -> str | None:
    """In words, why the times of two runs say nothing about the code; None where they do."""
    return _difference(base, new, MACHINE)


def rounding_difference(base: Run, new: Run) -> str | None:
    """In words, why deterministic figures of two runs may differ by rounding; None where they may not."""
    return _difference(base, new, ROUNDING)


def _difference(base: Run, new: Run, keys: Sequence[str]) -> str | None:
    difference = first_difference(base.facts, new.facts, keys)
    if difference is None:
        before, now = _others(base.facts), _others(new.facts)
        difference = first_difference(before, now, sorted({*before, *now}))
    return None if difference is None else _of_two(difference)


def _others(facts: Mapping[str, Any]) -> dict[str, Any]:
    versions = facts.get("versions")
    return {key: value for key, value in versions.items() if key != OWN} if isinstance(versions, dict) else {}


def _method(run: Run, label: str) -> Method | None:
    return next((method for method in run.methods if method.label == label), None)


def _of_two(difference: str) -> str:
    return f"{difference.replace(', now it is ', ' in BASE and ')} in NEW"
