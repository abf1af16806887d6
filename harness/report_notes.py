"""What a reader of a report must not miss: its headline, and a note for each thing to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ecospec.harness.records import AR
from ecospec.harness.report import Lossless, MethodRow, Report
from ecospec.harness.stats import Ratio

NONE = "–"
NOT_APPLICABLE = "n/a"
FEW_PROMPTS = 20
"""Below this number of prompts, a bootstrap over prompts gives intervals that are too narrow."""
EMBEDDED = "embedded"
LARGE_TIE = 1.0
"""A tie of a larger gap, in logits, is pointed out: what excuses it is measured with the passes themselves."""
LOW_BANDWIDTH_SHARE = 0.5
"""Below this share of the copy bandwidth, a pass is said not to be bound by reading weights."""
INTERVAL = (
    "A 95 % interval is a paired bootstrap over prompts (over batches, where prompts are decoded together): how far "
    "the figure would move with other prompts of the same kind."
)
"""Said once on every page that has intervals."""
OVERHEAD_SHARE = 0.30
"""Above this share of a step outside the target's forward pass, a row is said to measure overhead."""


def headline(report: Report, manifest: Mapping[str, Any]) -> str:
    """Where the data come from, and what was run on what; the first line a reader sees."""
    threads = manifest.get("threads")
    parts = [
        str(manifest.get("source") or "data source not recorded"),
        str(manifest.get("suite") or ""),
        f"target {manifest.get('target') or 'not recorded'}{widening(manifest)}",
        f"drafter {manifest['drafter']}" if manifest.get("drafter") not in (None, EMBEDDED) else "",
        "as chat messages" if manifest.get("chat_template") == "on" else "",
        f"{report.prompts} prompt{'s' if report.prompts != 1 else ''}",
        f"batches of {manifest['batch_size']}" if manifest.get("batch_size", 1) > 1 else "",
        f"γ = {manifest['budget']}" if "budget" in manifest else "",
        f"T = {manifest['temperature']:g}" if "temperature" in manifest else "",
        _predictors(report, manifest),
        f"acceptance {manifest['acceptance']}" if manifest.get("estimated") else "",
        str(manifest.get("dtype") or ""),
        str(manifest.get("device") or ""),
        f"spread by --device-map {manifest['device_map']}" if manifest.get("device_map") else "",
        f"{manifest['processes']} processes, split by {manifest.get('parallel')}" if manifest.get("processes") else "",
        f"{threads} thread{'s' if threads != 1 else ''}" if threads else "",
    ]
    return " · ".join(part for part in parts if part)


def _predictors(report: Report, manifest: Mapping[str, Any]) -> str:
    """The predictors, where a method uses any; with several, the methods' labels say which."""
    used = any(row.predicted_overlap is not None for row in report.rows)
    names = predictors_used(manifest)
    return f"predictor {', '.join(names)}" if used and names else ""


def predictors_used(manifest: Mapping[str, Any]) -> list[str]:
    """The predictors that some method looks at; others may have been named."""
    return list(dict.fromkeys(each["predictor"] for each in manifest.get("method_parts", ()) if each.get("predictor")))


def widening(manifest: Mapping[str, Any]) -> str:
    """What to say after the target's name where its experts were made larger."""
    widened = manifest.get("widened") or 1
    if widened <= 1:
        return ""
    return (
        f" (experts widened ×{widened} without changing the function, so that reading them takes a "
        "larger part of a verification step)"
    )


def notes(report: Report, manifest: Mapping[str, Any]) -> list[str]:
    """One line for each thing that a reader of the table must know."""
    return [
        *_prompt_notes(report),
        *_batch_notes(report, manifest),
        *_cost_notes(manifest),
        *caution_notes(report, manifest),
        *_lossless_notes(report, str(manifest.get("dtype") or "")),
        *_score_notes(report, manifest),
        *_verification_only_notes(report),
        *_headroom_notes(report),
        *_interval_notes(report),
        *_dense_notes(report),
        *_overhead_notes(report),
    ]


def _prompt_notes(report: Report) -> Iterator[str]:
    if report.prompts < report.prompts_begun:
        yield (
            f"{report.prompts} of {report.prompts_begun} prompts were finished by every method; only these are counted"
        )
    if report.prompts_without_step:
        yield (
            f"{report.prompts_without_step} of {report.prompts} prompts ended at the first token, which the "
            "prefill gives: they have no decode step and are in the end-to-end figures alone"
        )


def _cost_notes(manifest: Mapping[str, Any]) -> Iterator[str]:
    cost = manifest.get("cost_model")
    if not cost:
        return
    yield f"policies that weigh time use the cost model of this target on this device ({cost_words(manifest)})"
    for warning in cost.get("warnings", ()):
        yield f"cost model: {warning}"
    if manifest.get("batch_size", 1) > 1:
        yield "cost model: it was measured with one request at a time, and these passes are over several"


def cost_words(manifest: Mapping[str, Any]) -> str:
    """Which cost model a run's policies weigh time with; empty where none does."""
    cost = manifest.get("cost_model")
    if not cost:
        return ""
    what = f"a projection, {cost['projection']}" if cost.get("projection") else f"measured {cost.get('measured', '')}"
    return what if cost.get("r_squared") is None else f"{what}, R² {cost['r_squared']:.3f}"


def _batch_notes(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    size = manifest.get("batch_size", 1)
    if not report.in_batches and size > 1:
        yield f"batches of {size} were asked for, but no step had more than one prompt"
    if report.in_batches:
        reference = (
            ", and the lossless check's reference is plain decoding of each prompt by itself, outside all timing"
            if report.check != "none"
            else ""
        )
        yield (
            f"batches of {size}: speed-ups are over plain decoding in the same batches, intervals resample whole "
            f"batches{reference}"
        )


def caution_notes(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    """What a run cannot tell, whatever its figures."""
    if 0 < report.units < FEW_PROMPTS:
        unit = "batch" if report.in_batches else "prompt"
        several = f"{unit}{'es' if report.in_batches else 's'} are" if report.units > 1 else f"{unit} is"
        yield (
            f"{report.units} {several} too few to compare methods by; intervals over fewer than {FEW_PROMPTS} are too "
            "narrow"
        )
    if manifest.get("suite_note"):
        yield str(manifest["suite_note"])
    if manifest.get("target") == EMBEDDED:
        yield "the embedded model is test equipment: it compares policies, and says nothing about a large model's speed"
    brought = [place for place in manifest.get("layers_by_device") or () if place == "disk"]
    if not str(manifest.get("device") or "").startswith("cpu"):
        brought += [place for place in manifest.get("layers_by_device") or () if place == "cpu"]
    if brought:
        yield (
            f"layers on the {' and the '.join(brought)} are brought in whole for every pass: their times are those of "
            "copying, and fewer active experts save nothing there"
        )
    if manifest.get("unpacked"):
        yield (
            f"the checkpoint's {manifest['unpacked']} weights are unpacked to {manifest.get('dtype')} in memory, as "
            "there is no kernel for them here: bytes and times are those of the unpacked ones"
        )


def _lossless_notes(report: Report, dtype: str) -> Iterator[str]:
    rows = [row for row in report.rows if row.label != AR]
    said: dict[str, list[str]] = {}
    for row in rows:
        said.setdefault(_lossless_sentence(row.lossless, report.check, dtype), []).append(row.label)
    for sentence, labels in said.items():
        yield f"lossless: {sentence}" if len(said) == 1 else f"lossless, {', '.join(labels)}: {sentence}"


def _lossless_sentence(found: Lossless, check: str, dtype: str) -> str:
    if not found.checked:
        return f"not checked (--check {check})"
    scope = f"the {found.checked} of {found.prompts} prompts that were checked"
    if found.checked == found.prompts:
        scope = f"all {found.prompts} prompts" if found.prompts > 1 else "the one prompt"
    tail = f" ({dtype})" if dtype else ""
    if found.verdict == "exact":
        return f"every token equals AR's for {scope}{tail}"
    if found.verdict == "ties":
        return (
            f"ties: {found.ties} token(s) differ from AR's over {scope}, each where AR's two best choices "
            f"are closer than the measured numeric noise; the largest gap is {found.largest_gap:.2g}{tail}"
            + (
                ". That is more than rounding makes: the two shapes of pass may not compute the same; compare with "
                "--dtype float32"
                if found.largest_gap > LARGE_TIE
                else ""
            )
        )
    return f"VIOLATED: {found.violated} of {found.checked} prompts checked emit tokens that AR does not{tail}"


def _score_notes(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    for row in report.rows:
        if row.score_differs:
            yield f"{row.label}: {row.score_differs} text(s) score otherwise than AR's"
    if report.any_score:
        yield f"score: {manifest.get('score_metric') or 'by the suite'}, of texts cut at --max-new-tokens"
    elif manifest.get("score_why_not"):
        yield f"score: {manifest['score_why_not']}"


def _verification_only_notes(report: Report) -> Iterator[str]:
    labels = [row.label for row in report.rows if row.true_routing]
    if labels:
        yield (
            f"{', '.join(labels)}: verification metrics only. What is selected rests on what an extra pass outside all "
            "timing tells (the target's true routing, or what it will accept), so that a speed-up would be false"
        )


def _headroom_notes(report: Report) -> Iterator[str]:
    without = dict.fromkeys(name for row in report.rows for name, share in row.headroom.items() if share is None)
    if without:
        yield (
            f"{', '.join(without)}: not 2 % above {report.baseline} in α · ρ here, so that there is no headroom to "
            "share out; optimal chooses by estimates of acceptance, and by the time of whole steps"
        )


def _interval_notes(report: Report) -> Iterator[str]:
    missing: dict[str, dict[str, None]] = {}
    level: dict[str, list[str]] = {}
    for row in report.rows:
        for kind, ratio in _ratios(row, report.baseline):
            if ratio.why is not None:
                missing.setdefault(ratio.why, {})[row.label] = None
            elif ratio.value is not None and ratio.interval is not None and 1.0 in ratio.interval:
                level.setdefault(kind, []).append(row.label)
    for kind, names in level.items():
        yield f"{kind} not distinguishable from 1.0 (it lies within the interval): {', '.join(names)}"
    for why, labels in missing.items():
        yield f"{', '.join(labels)}: no interval can be given ({why})"


def _ratios(row: MethodRow, baseline: str) -> Iterator[tuple[str, Ratio]]:
    if row.label == AR:
        return
    kinds = (
        ("end-to-end speed-up", row.speedup),
        ("decode-only speed-up", row.decode_speedup),
        (f"decode-only speed-up over {baseline}", row.over_baseline),
    )
    for kind, ratio in kinds:
        if ratio is not None:
            yield kind, ratio


def _dense_notes(report: Report) -> Iterator[str]:
    if not report.moe_layers:
        yield "the target is dense: it has no experts, so that E and the bytes of experts are not applicable"


def _overhead_notes(report: Report) -> Iterator[str]:
    shares = [row.bandwidth_share for row in report.rows if row.bandwidth_share is not None and row.label != AR]
    if shares and max(shares) < LOW_BANDWIDTH_SHARE:
        yield (
            f"verification reaches {percent(max(shares))} of the copy bandwidth at most: it is not bound by reading "
            "weights here, so that fewer experts save less time than where it is"
        )
    for row in report.rows:
        if row.outside_target is not None and row.outside_target > OVERHEAD_SHARE:
            yield (
                f"{row.label}: {percent(row.outside_target)} of a step is outside the target's forward "
                "pass: this row measures overhead more than experts"
            )


def percent(value: float | None) -> str:
    """A share in percent, or a dash."""
    return NONE if value is None else f"{100 * value:.1f} %"
