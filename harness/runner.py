"""One run: AR, the baseline and the policies, interleaved per prompt in rotating order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ecospec.errors import UserError
from ecospec.harness.bandwidth import copy_bandwidth
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.config import CHECKS, SAMPLE_EVERY, RunConfig
from ecospec.harness.decoding import Generation, Speculation, decode_ar, decode_speculative
from ecospec.harness.eagle3 import Eagle3Head, load_eagle3
from ecospec.harness.loading import (
    DTYPES,
    LoadedTarget,
    check_folder,
    embedded_facts,
    embedded_folder,
    load_target,
    target_view,
)
from ecospec.harness.lossless import UNCHECKED, VIOLATED, LosslessCheck, check_output
from ecospec.harness.manifest import checkpoint_hash, device_facts, prompts_hash
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.records import AR, PromptRecord, append_records, read_records
from ecospec.harness.requests import Request, check_conversations, next_prompt, render_request, turn_ids
from ecospec.harness.run_folder import RECORDS, finished_prompts, rewrite_records
from ecospec.harness.stopping import StopRule
from ecospec.policies import ExpertNeed, Policy, spec_of
from ecospec.predictors.contract import BoundPredictor, Predictor
from ecospec.predictors.placing import place
from ecospec.suites import EMBEDDED, HUB, Problem, Suite, load_suite
from ecospec.suites.scoring import Scorer

WARM_UP_TOKENS = 12
MOST_THREADS = 1024
MOST_NODES = 4096
"""Largest draft tree; its ancestor matrix is quadratic in the nodes."""


Parts: TypeAlias = tuple[LoadedTarget, Eagle3Head, Path | None]
"""Target, drafter, and the folder of the embedded model where that is used."""


@dataclass(frozen=True)
class Method:
    """A column of the report: AR (no speculation) or one policy."""

    label: str
    speculation: Speculation | None = None

    @property
    def true_routing(self) -> bool:
        """Whether it looks at the target's true routing, and so has no speed-up."""
        return self.speculation is not None and self.speculation.sees_true_routing


@dataclass(frozen=True)
class Violation:
    """Where a method's output left AR's without numeric noise to explain it."""

    prompt_id: str
    method: str
    position: int
    ar_token: int | None
    method_token: int | None
    gap: float

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_id}, {self.method}, position {self.position}: AR emits token "
            f"{self.ar_token}, the method {self.method_token}; margin {self.gap:.3g}"
        )


class Bench:
    """A run that is ready to start: everything loaded and checked, nothing written yet."""

    def __init__(self, config: RunConfig, plugins: Plugins | None = None, parts: Parts | None = None) -> None:
        """Load and check all parts, the cheap ones first.

        Args:
            parts: what another bench with the same target and drafter has loaded.

        Raises:
            UserError: an unknown name, unusable data, parts that do not fit, a prompt longer than the context.
        """
        self.config = config
        self.plugins = plugins = plugins or load_plugins()
        check_options(config)
        policies = create_policies(plugins, (config.baseline, *config.policy))
        predictor: Predictor = plugins.create_predictor(config.predictor)
        self.sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
        self.suite: Suite = load_suite(config.suite, data=data_of(config), limit=config.limit, revision=config.revision)
        self.scorer = Scorer(self.suite, run_code=config.run_code)
        self.device, dtype = resolve_device(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.parts = parts or load_parts(config, self.device, dtype)
        self.loaded, self.head, self.bundle = self.parts
        target = self.loaded.target
        needs = {policy.needs for policy in policies.values()}
        bound: BoundPredictor | None = None
        if ExpertNeed.PREDICTED in needs:
            bound = predictor.bind(target_view(target, self.bundle and self.bundle / "predictor"))
        self.methods = [Method(AR)]
        for label, policy in policies.items():
            speculation = Speculation(
                policy,
                self.head,
                config.budget,
                config.draft_steps,
                config.draft_topk,
                bound,
                predictor.oracle,
            )
            self.methods.append(Method(label, speculation))
        self.requests = [self._render(problem, problem.prompt) for problem in self.suite.problems]
        check_conversations(self.requests, self.loaded.tokenizer, config.max_new_tokens, target.context)
        self.eos = eos_ids(target.model, self.loaded.tokenizer)

    def _render(self, problem: Problem, prompt: str, turn: int = 0) -> Request:
        loaded = self.loaded
        return render_request(
            problem, prompt, turn, loaded.tokenizer, loaded.target.geometry, loaded.name, self.config.max_new_tokens
        )

    def _follow(self, request: Request, answer: str) -> Request | None:
        """The next turn of a conversation after an answer; None after the last."""
        prompt = next_prompt(request, answer)
        return None if prompt is None else self._render(request.problem, prompt, request.turn + 1)

    def new_rule(self, request: Request, limit: int | None = None) -> StopRule:
        """A fresh stop rule for a request."""
        bound = request.limit if limit is None else min(limit, request.limit)
        return StopRule(self.loaded.tokenizer, bound, self.eos, request.problem.stop)

    def generate(self, request: Request, method: Method, limit: int | None = None) -> Generation:
        """Decode one request by one method."""
        chooser = TokenChooser(self.sampling, request.id)
        rule = self.new_rule(request, limit)
        if method.speculation is None:
            return decode_ar(self.loaded.target, request.ids, chooser, rule)
        return decode_speculative(self.loaded.target, method.speculation, request.ids, chooser, rule)

    def check(self, request: Request, ar: Generation, other: Generation) -> LosslessCheck:
        """Compare an output with AR's."""
        return check_output(
            self.loaded.target,
            request.ids,
            ar.tokens,
            other.tokens,
            TokenChooser(self.sampling, request.id),
            lambda: self.new_rule(request),
            self.config.budget,
        )

    def facts(self) -> dict[str, Any]:
        """The manifest's facts about this run."""
        config = asdict(self.config)
        output = config.pop("output")
        target_folder = Path(self.loaded.name)
        return {
            **config,
            "output": None if output is None else str(output),
            "policy": list(self.config.policy),
            "methods": [method.label for method in self.methods],
            "target": "embedded" if self.config.target is None else self.config.target,
            "drafter": "embedded" if self.config.drafter is None else self.config.drafter,
            "widened": self.loaded.widened,
            "source": self.suite.source,
            "exemplars": self.suite.exemplars,
            "data": data_of(self.config),
            "data_revision": self.suite.revision or None,
            "suite_note": self.suite.note,
            "score_metric": self.scorer.metric,
            "score_why_not": self.scorer.why_not,
            "data_sha256": self.suite.data_sha256,
            "prompts": len(self.requests),
            "prompts_sha256": prompts_hash(request.ids for request in self.requests),
            "checkpoint_sha256": checkpoint_hash(self.bundle or target_folder)
            if self.bundle or target_folder.is_dir()
            else None,
            "geometry": asdict(self.loaded.target.geometry),
            "copy_bytes_per_second": copy_bandwidth(self.device),
            "feature_layers": list(self.loaded.target.feature_layers),
            "dtype": str(self.loaded.target.embedding.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            **{f"device_{k}" if k != "device" else k: v for k, v in device_facts(self.device).items()},
            "eos": sorted(self.eos),
        }

    def run(
        self, folder: Path, on_progress: Callable[[int, str, PromptRecord | None], None] | None = None
    ) -> tuple[list[PromptRecord], list[Violation]]:
        """Warm up, then decode every prompt that is not finished in ``folder`` by every method."""
        path = folder / RECORDS
        records = read_records(path) if path.exists() else []
        complete = finished_prompts(records, [method.label for method in self.methods])
        done = {r.problem.id for r in self.requests if all(name in complete for name in turn_ids(r))}
        kept = {name for r in self.requests if r.problem.id in done for name in turn_ids(r)}
        records = [record for record in records if record.prompt_id in kept]
        rewrite_records(path, records)
        violations: list[Violation] = []
        note = on_progress or (lambda index, label, record: None)
        todo = [(i, r) for i, r in enumerate(self.requests) if r.problem.id not in done]
        if todo:
            for method in self.methods:
                note(todo[0][0], f"warm-up {method.label}", None)
                self.generate(todo[0][1], method, WARM_UP_TOKENS)
        for index, request in todo:
            fresh: list[PromptRecord] = []
            turn: Request | None = request
            while turn is not None:
                generations: dict[str, Generation] = {}
                for method in rotated(self.methods, index + turn.turn):
                    note(index, method.label, None)
                    generations[method.label] = self.generate(turn, method)
                ar = generations[AR]
                for method in self.methods:
                    generation = generations[method.label]
                    check = self.check(turn, ar, generation) if self._is_checked(index) else None
                    score = self.scorer.score(index, generation.text)
                    fresh.append(record_of(turn, method.label, generation, check, score))
                    violations += violations_of(fresh[-1], check)
                    note(index, method.label, fresh[-1])
                # All methods go on from AR's answer: it is theirs too, but for numeric ties on other devices.
                turn = self._follow(turn, ar.text)
            append_records(path, fresh)
            records += fresh
        return records, violations

    def _is_checked(self, index: int) -> bool:
        return self.config.check == "all" or (self.config.check == "sample" and index % SAMPLE_EVERY == 0)


def data_of(config: RunConfig) -> str:
    """Where the problems come from: what was asked for, or what goes with the target."""
    return config.data if config.data is not None else (EMBEDDED if config.target is None else HUB)


def check_options(config: RunConfig) -> None:
    """Refuse numbers and names that no run can have.

    Raises:
        UserError: naming the option, the value and what was expected.
    """
    least = {"max_new_tokens": 1, "budget": 1, "draft_steps": 1, "draft_topk": 1, "threads": 1, "widen": 1}
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected an integer of at least {bound}")
    if config.threads is not None and config.threads > MOST_THREADS:
        raise UserError(f"--threads {config.threads}: expected an integer of at most {MOST_THREADS}")
    nodes = 1 + config.draft_topk + (config.draft_steps - 1) * config.draft_topk**2
    if nodes > MOST_NODES:
        raise UserError(
            f"--draft-steps {config.draft_steps} with --draft-topk {config.draft_topk}: a draft tree of {nodes} "
            f"nodes; expected at most {MOST_NODES}"
        )
    if config.target is not None:
        if config.drafter is None:
            raise UserError("--target without --drafter: expected the folder of an EAGLE-3 head for that target")
        check_folder(config.target)
    if config.check not in CHECKS:
        raise UserError(f"--check {config.check}: expected one of {', '.join(CHECKS)}")
    if not config.policy:
        raise UserError("no policy given; expected --policy NAME (see: ecospec-bench plugins)")


def create_policies(plugins: Plugins, specs: Sequence[str]) -> dict[str, Policy]:
    """Policies by label, in the order asked for; one asked for twice is run once."""
    policies: dict[str, Policy] = {}
    for spec in specs:
        policy = plugins.create_policy(spec)
        policies.setdefault(spec_of(policy), policy)
    if AR in policies:
        raise UserError(f"a policy cannot be called {AR}, the name of plain decoding")
    return policies


def resolve_device(config: RunConfig) -> tuple[str, torch.dtype]:
    """The device and dtype that ``auto`` stands for."""
    cuda = torch.cuda.is_available()
    device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: expected cpu, cuda or cuda:N") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not cuda):
        found = "a CUDA device is present" if cuda else "no CUDA device is present"
        raise UserError(f"--device {device}: expected cpu or cuda; {found}")
    if config.dtype == "auto":
        return device, torch.float32 if kind == "cpu" or config.target is None else torch.bfloat16
    if config.dtype not in DTYPES:
        raise UserError(f"--dtype {config.dtype}: expected auto, {', '.join(DTYPES)}")
    return device, DTYPES[config.dtype]


def load_parts(config: RunConfig, device: str, dtype: torch.dtype) -> Parts:
    """Target, drafter, and the folder of the embedded model where that is used."""
    bundle = embedded_folder() if config.target is None else None
    # A target of one's own without a drafter has been refused.
    drafter = embedded_folder() / "drafter" if config.drafter is None else Path(config.drafter)
    widen = config.widen or (int(embedded_facts()["widen"]) if bundle else 1)
    name = str(bundle / "target") if bundle else str(config.target)
    loaded = load_target(name, dtype=dtype, device=device, widen=widen)
    geometry = loaded.target.geometry
    head = load_eagle3(
        drafter,
        target_vocab=geometry.vocab_size,
        target_hidden=geometry.hidden_size,
        target_layers=geometry.layers,
    )
    try:
        loaded.target.read_features(head.config.feature_layers or ())
    except UserError as error:
        raise UserError(f"drafter {drafter}: {error}") from error
    return loaded, place(head, device, dtype), bundle


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that the checkpoint or its tokenizer calls the end of a sequence."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def rotated(methods: Sequence[Method], by: int) -> list[Method]:
    """The methods in an order that starts one further on with every prompt."""
    shift = by % len(methods)
    return [*methods[shift:], *methods[:shift]]


def record_of(
    request: Request, label: str, generation: Generation, check: LosslessCheck | None, score: float | None
) -> PromptRecord:
    """What is written down of one output."""
    steps = generation.steps
    phases: dict[str, float] = {}
    for step in steps:
        for phase, seconds in step.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    overlaps = [step.predicted_overlap for step in steps if step.predicted_overlap is not None]
    differences = check.differences if check else ()
    ties = [difference for difference in differences if difference.is_tie]
    return PromptRecord(
        prompt_id=request.id,
        method=label,
        prompt_tokens=len(request.ids),
        tokens=list(generation.tokens),
        text=generation.text,
        reason=generation.reason,
        prefill_seconds=generation.prefill_seconds,
        decode_seconds=generation.decode_seconds,
        steps=len(steps),
        emitted=sum(step.emitted for step in steps),
        selected=sum(step.selected for step in steps),
        expert_pairs=sum(step.expert_pairs for step in steps),
        phase_seconds=phases,
        predicted_overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        verdict=check.verdict if check else UNCHECKED,
        ties=len(ties),
        largest_gap=max((tie.gap for tie in ties), default=0.0),
        score=score,
    )


def violations_of(record: PromptRecord, check: LosslessCheck | None) -> list[Violation]:
    """What to print of a violated output."""
    if check is None or check.verdict != VIOLATED:
        return []
    return [
        Violation(record.prompt_id, record.method, d.position, d.ar_token, d.method_token, d.gap)
        for d in check.differences
        if not d.is_tie
    ]
