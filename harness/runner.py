"""One run: AR, the baseline and the policies, interleaved per prompt in rotating order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ecospec.harness.activations import (
    ACTIVATIONS,
    PromptActivations,
    append_activations,
    keep_activations,
)
from ecospec.harness.bandwidth import copy_bandwidth
from ecospec.harness.chat import chat_of
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.config import SAMPLE_EVERY, RunConfig
from ecospec.harness.costs.preparing import cost_model_for, resumed_cost_model, with_costs
from ecospec.harness.costs.saved import SavedCostModel
from ecospec.harness.decoding import Generation, Speculation, Stream, decode_ar_batch, decode_speculative_batch
from ecospec.harness.distributed import summed
from ecospec.harness.drafters.loading import choose_drafter
from ecospec.harness.lossless import LosslessCheck, check_output
from ecospec.harness.manifest import checkpoint_hash, device_facts, folder_hash, prompts_hash, text_hash
from ecospec.harness.outcomes import Violation, activations_of, record_of, violations_of
from ecospec.harness.placement import TENSOR, Placement
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.preparing import (
    Parts,
    check_options,
    create_policies,
    create_predictors,
    data_of,
    eos_ids,
    estimators_of,
    load_parts,
    load_speculations,
    method_parts,
    resolve_device,
)
from ecospec.harness.processes import process_count
from ecospec.harness.records import AR, PromptRecord, append_records, read_records
from ecospec.harness.requests import Renderer, Request, turn_ids
from ecospec.harness.resuming import options_of
from ecospec.harness.run_folder import RECORDS, finished_prompts, rewrite_records
from ecospec.harness.stopping import StopRule
from ecospec.policies import AcceptanceNeed, spec_of
from ecospec.predictors.acceptance.folder import prompt_key
from ecospec.suites import Suite, load_suite
from ecospec.suites.scoring import Scorer

WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Method:
    """A column of the report: AR (no speculation) or one policy."""

    label: str
    speculation: Speculation | None = None

    @property
    def true_routing(self) -> bool:
        """Whether it looks at what only an extra pass can tell, and so has no speed-up."""
        return self.speculation is not None and self.speculation.sees_ahead


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
        self.predictors = create_predictors(plugins, config.predictor)
        self.estimator = plugins.create_estimator(config.acceptance)
        self.chosen = choose_drafter(plugins, config.drafter, config.drafter_revision)
        self.sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
        plugins.find_suite(config.suite)
        self.suite: Suite = load_suite(
            config.suite,
            data=data_of(config),
            limit=config.limit,
            revision=config.revision,
            more=plugins.suites.paths,
        )
        self.scorer = Scorer(self.suite, run_code=config.run_code)
        self.device, dtype = resolve_device(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.parts = parts or load_parts(config, self.chosen.drafter, self.device, dtype)
        self.loaded, self.bundle = self.parts.loaded, self.parts.bundle
        target = self.loaded.target
        self.method_parts = method_parts(policies, self.predictors)
        speculations = load_speculations(config, policies, self.predictors, self.estimator, self.parts)
        self.chat = chat_of(
            self.loaded.tokenizer, mode=config.chat_template, thinking=config.thinking, system=config.system_prompt
        )
        self.renderer = Renderer(
            self.loaded.tokenizer, target.geometry, self.loaded.name, config.max_new_tokens, self.chat
        )
        self.requests = [self.renderer.first(problem) for problem in self.suite.problems]
        estimators = {method.estimator for method in speculations.values() if method.estimator is not None}
        self.saved_estimator = next((each.saved for each in estimators), None)
        for estimator in estimators:
            estimator.check_prompts({prompt_key(request.ids): request.id for request in self.requests})
        self.cost_model: SavedCostModel | None = None
        if any(policy.needs_cost_model for policy in policies.values()):
            self.cost_model = resumed_cost_model(config) or cost_model_for(
                config,
                self.parts,
                self.chosen,
                self.device,
                self.predictors,
                config.cost_model,
                estimators_of(speculations),
            )
            speculations = with_costs(speculations, self.method_parts, self.cost_model)
        self.methods = [Method(AR), *(Method(label, method) for label, method in speculations.items())]
        self.eos = eos_ids(target.model, self.loaded.tokenizer)

    def new_rule(self, request: Request, limit: int | None = None) -> StopRule:
        """A fresh stop rule for a request."""
        bound = request.limit if limit is None else min(limit, request.limit)
        stop = request.problem.stop if self.chat is None else request.problem.chat_stop
        return StopRule(self.loaded.tokenizer, bound, self.eos, stop)

    def generate(self, requests: Sequence[Request], method: Method, limit: int | None = None) -> list[Generation]:
        """Decode requests together by one method."""
        streams = [
            Stream(request.ids, TokenChooser(self.sampling, request.id), self.new_rule(request, limit))
            for request in requests
        ]
        if method.speculation is None:
            return decode_ar_batch(self.loaded.target, streams)
        return decode_speculative_batch(self.loaded.target, method.speculation, streams)

    def check(self, request: Request, ar: Generation, other: Generation) -> LosslessCheck:
        """Compare an output with AR's."""
        return check_output(
            self.loaded.target,
            request.ids,
            ar.tokens,
            other.tokens,
            TokenChooser(self.sampling, request.id),
            lambda: self.new_rule(request),
            self.largest_pass,
        )

    @property
    def largest_pass(self) -> int:
        """Most tokens that one verification pass can have."""
        sizes = [method.speculation.tree_size for method in self.methods if method.speculation is not None]
        return min(self.config.budget, *sizes) * min(self.config.batch_size, len(self.requests))

    @property
    def prompt_ids(self) -> set[str]:
        """The ids that the records of this run will have."""
        return names_of(self.requests)

    @cached_property
    def predictor_sha256(self) -> dict[str, str | None]:
        """Hashes of the predictors' folders, by label; None for those that have none of their own."""
        return {label: folder_hash(getattr(each, "path", None)) for label, each in self.predictors.items()}

    def method_facts(self) -> list[dict[str, str | None]]:
        """What each method but AR is made of."""
        return [
            {**asdict(each), "predictor_sha256": self.predictor_sha256.get(each.predictor or "")}
            for each in self.method_parts
        ]

    def costs_hash(self) -> str | None:
        """A hash of what the methods are given of the cost model; what it says of others is nothing to this run."""
        given = {
            m.label: asdict(m.speculation.cost_model)
            for m in self.methods
            if m.speculation and m.speculation.cost_model
        }
        return text_hash(json.dumps(given, sort_keys=True)) if given else None

    def facts(self) -> dict[str, Any]:
        """The manifest's facts about this run."""
        return {**self.identity(), "copy_bytes_per_second": summed(copy_bandwidth(self.device))}

    def identity(self) -> dict[str, Any]:
        """The facts but for what is measured: what was asked for, what of, and on what."""
        config = asdict(self.config)
        output = config.pop("output")
        cost_model = None if self.cost_model is None else self.cost_model.manifest()
        return {
            **config,
            "suite": self.suite.name,
            "suite_sha256": self.suite.task_file.sha256 if self.suite.task_file else None,
            "suite_file": str(self.suite.task_file.path)
            if self.suite.task_file and not self.suite.task_file.builtin
            else None,
            "options": options_of(self.config),
            "output": None if output is None else str(output),
            "policy": list(self.config.policy),
            "methods": [method.label for method in self.methods],
            "true_routing": [method.label for method in self.methods if method.true_routing],
            "method_parts": self.method_facts(),
            "target": "embedded" if self.config.target is None else self.config.target,
            "drafter": "embedded" if self.config.drafter is None else self.config.drafter,
            "widened": self.loaded.widened,
            "unpacked": self.loaded.unpacked,
            "processes": process_count() if process_count() > 1 else None,
            "parallel": (self.config.parallel or TENSOR) if process_count() > 1 else None,
            "layers_by_device": Placement.layers(self.loaded.target.model),
            "source": self.suite.source,
            "exemplars": self.suite.exemplars,
            "chat_template": "off" if self.chat is None else "on",
            "chat_template_sha256": None if self.chat is None else self.chat.sha256,
            "chat_switches": {} if self.chat is None else dict(self.chat.switches),
            "data": data_of(self.config),
            "data_revision": self.suite.revision or None,
            "suite_note": self.suite.note,
            "score_metric": self.scorer.metric + (f" after {self.scorer.filter}" if self.scorer.filter else ""),
            "score_why_not": self.scorer.why_not,
            "data_sha256": self.suite.data_sha256,
            "prompts": len(self.requests),
            "outputs": len(self.prompt_ids),
            "prompts_sha256": prompts_hash(request.ids for request in self.requests),
            "checkpoint_sha256": checkpoint_hash(self.bundle or self.loaded.folder),
            "target_commit": self.loaded.commit,
            "drafter_spec": self.chosen.spec,
            "drafter_sha256": folder_hash(getattr(self.chosen.drafter, "path", None)),
            "drafter_commit": self.chosen.commit,
            "predictor": list(self.config.predictor),
            "cost_model": cost_model,
            "cost_model_sha256": self.costs_hash(),
            "acceptance": spec_of(self.estimator),
            "estimated": any(
                method.speculation is not None and method.speculation.policy.acceptance is AcceptanceNeed.ESTIMATED
                for method in self.methods
            ),
            "acceptance_folder": None if self.saved_estimator is None else str(self.saved_estimator.folder),
            "acceptance_sha256": folder_hash(getattr(self.estimator, "path", None))
            if self.saved_estimator is None
            else self.saved_estimator.sha256,
            "predictor_sha256": list(self.predictor_sha256.values()),
            "geometry": asdict(self.loaded.target.geometry),
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
        groups = [(at, self.requests[at : at + self.config.batch_size]) for at in self._starts()]
        todo = [(at, group) for at, group in groups if not names_of(group) <= complete]
        unfinished = {name for _, group in todo for name in names_of(group)}
        records = [record for record in records if record.prompt_id in complete - unfinished]
        rewrite_records(path, records)
        keep_activations(folder / ACTIVATIONS, complete - unfinished)
        violations: list[Violation] = []
        note = on_progress or (lambda index, label, record: None)
        if todo:
            for method in self.methods:
                note(todo[0][0], f"warm-up {method.label}", None)
                self.generate(todo[0][1], method, WARM_UP_TOKENS)
        for at, group in todo:
            fresh: list[PromptRecord] = []
            active: list[PromptActivations] = []
            turns = list(enumerate(group, at))
            while turns:
                requests = [request for _, request in turns]
                generations: dict[str, list[Generation]] = {}
                for method in rotated(self.methods, at // self.config.batch_size + requests[0].turn):
                    note(at, method.label, None)
                    generations[method.label] = self.generate(requests, method)
                for row, (index, request) in enumerate(turns):
                    outputs = {label: found[row] for label, found in generations.items()}
                    found = self._judge(index, request, outputs, requests[0].id if len(group) > 1 else "")
                    for record, check in found:
                        fresh.append(record)
                        violations += violations_of(record, check)
                        note(index, record.method, record)
                    active += activations_of(request, outputs)
                # All methods go on from AR's answer: it is theirs too, but for numeric ties on other devices.
                answers = [generation.text for generation in generations[AR]]
                following = [(i, self.renderer.follow(r, text)) for (i, r), text in zip(turns, answers, strict=True)]
                turns = [(index, request) for index, request in following if request is not None]
            # A prompt is finished by its records: what belongs to it is on disk before them.
            append_activations(folder / ACTIVATIONS, active)
            append_records(path, fresh)
            records += fresh
        return records, violations

    def _starts(self) -> range:
        return range(0, len(self.requests), self.config.batch_size)

    def _judge(
        self, index: int, request: Request, outputs: Mapping[str, Generation], batch: str
    ) -> Iterator[tuple[PromptRecord, LosslessCheck | None]]:
        """Check and score one prompt's outputs by all methods.

        The reference is plain decoding of this prompt by itself; for a batch that is one more run, not timed.
        """
        checked = self._is_checked(index)
        reference = self.generate([request], self.methods[0])[0] if batch and checked else outputs[AR]
        for method in self.methods:
            output = outputs[method.label]
            check = self.check(request, reference, output) if checked else None
            yield record_of(request, method.label, output, check, self.scorer.score(index, output.text), batch), check

    def _is_checked(self, index: int) -> bool:
        return self.config.check == "all" or (self.config.check == "sample" and index % SAMPLE_EVERY == 0)


def rotated(methods: Sequence[Method], by: int) -> list[Method]:
    """The methods in an order that starts one further on with every prompt."""
    shift = by % len(methods)
    return [*methods[shift:], *methods[:shift]]


def names_of(group: Sequence[Request]) -> set[str]:
    """The ids of all turns of some requests."""
    return {name for request in group for name in turn_ids(request.problem)}
