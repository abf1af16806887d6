"""Recording: plain decoding's output, and at every position of it what a speculative step would meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ecospec.errors import UserError
from ecospec.harness.choosing import TokenChooser
from ecospec.harness.config import RunConfig
from ecospec.harness.decoding import decode_ar
from ecospec.harness.drafters.asking import AskedDrafts, note_positions
from ecospec.harness.informing import true_routing
from ecospec.harness.loading import check_experts
from ecospec.harness.manifest import checkpoint_hash, folder_hash
from ecospec.harness.plugins import Plugins, load_plugins
from ecospec.harness.preparing import Parts, bound_estimator, bound_predictor, create_predictors, view_of
from ecospec.harness.recording.folder import RecordingWriter, recording_into
from ecospec.harness.recording.steps import RecordedRequest
from ecospec.harness.requests import Request
from ecospec.harness.runner import Bench
from ecospec.harness.steps import check_numbers
from ecospec.policies import DraftTree, ExpertSets, spec_of
from ecospec.predictors.acceptance.asking import AskedEstimator
from ecospec.predictors.acceptance.folder import drafter_facts, prompt_key
from ecospec.predictors.asking import AskedBatch
from ecospec.predictors.checkpoint import target_facts
from ecospec.predictors.contract import BoundPredictor, NodeStates, PredictionRequest, Predictor
from ecospec.predictors.traces import expert_dtype

FACTS = (
    *("suite", "suite_sha256", "source", "exemplars", "data_sha256", "prompts", "prompts_sha256"),
    *("target", "widened", "checkpoint_sha256", "drafter", "drafter_spec", "drafter_sha256", "geometry", "dtype"),
    *("chat_template", "chat_template_sha256", "chat_switches", "system_prompt", "max_new_tokens"),
    *("draft_steps", "draft_topk", "temperature", "top_p", "top_k", "seed", "eos", "predictor", "predictor_sha256"),
)
"""Facts of a run that are facts of a recording too."""


@dataclass
class _Gathered:
    """The arrays of a request while they are collected, one entry a position."""

    trees: list[DraftTree] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)
    predicted: dict[str, list[np.ndarray]] = field(default_factory=dict)
    estimated: dict[str, list[np.ndarray]] = field(default_factory=dict)
    entropies: list[np.ndarray] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    state_rows: list[np.ndarray] = field(default_factory=list)
    met: int = 0
    distributions: bool = True

    def known(self, tree: DraftTree, states: NodeStates, keep_states: bool) -> None:
        """Add what the drafter knows at the nodes of a tree."""
        rows = states.rows[np.maximum(tree.parents, 0)]
        if tree.size == 1:  # nothing was drafted
            self.entropies.append(np.zeros(1, dtype=np.float32))
        elif states.entropies is None:
            self.distributions = False
        else:
            entropies = states.entropies().float().cpu().numpy()[rows]
            entropies[0] = 0.0
            self.entropies.append(entropies.astype(np.float32))
        if keep_states:
            half = states.states.to(torch.float16).cpu().numpy()
            if not np.isfinite(half).all():
                raise UserError(
                    "the drafter's states are too large for what a recording keeps; record without --states"
                )
            self.states.append(half)
            self.state_rows.append((rows + self.met).astype(np.int32))
            self.met += len(states.states)


class Recorder:
    """A recording that is ready to start: everything loaded and checked, nothing written yet."""

    def __init__(
        self,
        config: RunConfig,
        estimators: Sequence[str],
        *,
        states: bool,
        parts: Parts | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        """Load and check all parts.

        Args:
            estimators: specs of acceptance estimators to ask, by label later on.
            states: whether the drafter's hidden states are kept, for fitting an estimator that reads them.
            parts: what another recorder has loaded for the same options.

        Raises:
            UserError: as of a run; also for a predictor that looks at the true routing, which is recorded as it is.
        """
        if config.batch_size != 1:
            raise UserError(f"--batch-size {config.batch_size}: a recording is of single requests; expected 1")
        plugins = plugins or load_plugins()
        asked_for = [plugins.create_estimator(spec) for spec in estimators]
        _refuse_oracles(create_predictors(plugins, config.predictor))
        self.bench = Bench(replace(config, policy=("confidence",), baseline="confidence"), plugins, parts)
        parts = self.bench.parts
        check_experts(parts.loaded.target, "a recording")
        self.states = states
        self.predictors: dict[str, BoundPredictor] = {}
        for label, predictor in self.bench.predictors.items():
            self.predictors[label] = bound_predictor(label, predictor, parts)
        self.estimators: dict[str, AskedEstimator] = {}
        self.estimators_sha256: list[str | None] = []
        self.estimators_folders: list[str | None] = []
        for estimator in asked_for:
            asked = bound_estimator(estimator, parts, config.temperature)
            asked.check_prompts({prompt_key(request.ids): request.id for request in self.bench.requests})
            self.estimators[spec_of(estimator)] = asked
            saved = asked.saved
            own = folder_hash(getattr(estimator, "path", None))
            self.estimators_sha256.append(own if saved is None else saved.sha256)
            self.estimators_folders.append(None if saved is None else str(saved.folder))

    def facts(self) -> dict[str, Any]:
        """What the manifest says."""
        identity = self.bench.identity()
        view = view_of(self.bench.parts)
        return {
            **{name: identity[name] for name in FACTS},
            "predictors": list(self.predictors),
            "estimators": list(self.estimators),
            "estimators_sha256": self.estimators_sha256,
            "estimators_folders": self.estimators_folders,
            "states": self.states,
            "target_sha256": checkpoint_hash(self.bench.loaded.folder),
            "outputs": len(self.bench.prompt_ids),
            "target_facts": target_facts(view),
            "drafter_facts": drafter_facts(view),
        }

    def record(self, folder: Path, *, resume: bool, on_request: Callable[[str], None]) -> RecordingWriter:
        """Record every request that is not in the folder yet."""
        with recording_into(folder, self.facts(), resume=resume) as writer:
            for first in self.bench.requests:
                request: Request | None = first
                while request is not None:
                    chooser = TokenChooser(self.bench.sampling, request.id)
                    plain = decode_ar(self.bench.loaded.target, request.ids, chooser, self.bench.new_rule(request))
                    if request.id not in writer.done:
                        recorded, ties = self._steps(request, plain.tokens)
                        writer.add(request.id, prompt_key(request.ids), len(request.ids), recorded, ties)
                    on_request(request.id)
                    request = self.bench.renderer.follow(request, plain.text)
        return writer

    def _steps(self, request: Request, output: Sequence[int]) -> tuple[RecordedRequest, int]:
        """Walk along an output, a token a pass over the whole draft tree; also how often a pass chose otherwise."""
        bench, target = self.bench, self.bench.loaded.target
        rule, chooser = bench.new_rule(request), TokenChooser(bench.sampling, request.id)
        steps, top_k = bench.config.draft_steps, bench.config.draft_topk
        size = 1 + top_k + max(0, steps - 1) * top_k**2
        capacity = len(request.ids) + rule.limit + size
        note_positions(bench.parts.drafter_name, bench.parts.drafter, capacity - size, request.id)
        session = target.new_session(capacity)
        drafter = AskedDrafts(
            bench.parts.drafter_name, bench.parts.drafter, [capacity], vocab=target.geometry.vocab_size, nodes=size
        )
        geometry = target.geometry
        shape = (geometry.moe_layers, geometry.experts, geometry.top_k)
        node_states = drafter.node_states(0)
        asked = {
            label: AskedBatch(
                label,
                bound,
                shape,
                [PredictionRequest(request.ids, capacity, partial(true_routing, session), node_states)],
                oracle=False,
            )
            for label, bound in self.predictors.items()
        }
        prefill = session.prefill(request.ids)
        rule.take([output[0]])
        gathered = _Gathered()
        ties = int(chooser.choose(prefill.logits[-1], 0) != output[0])
        if rule.remaining > 0:
            drafter.start(0, [*request.ids, output[0]], prefill.features)
        kind = expert_dtype(geometry.experts)
        while rule.remaining > 0:
            at = len(rule.tokens)
            tree = drafter.draft([rule.tokens[-1]], [min(steps, rule.remaining - 1)], top_k)[0]
            for label, predictor in asked.items():
                sets = predictor.predict([tree])[0]
                gathered.predicted.setdefault(label, []).append(top_experts_of(sets, geometry.top_k).astype(kind))
            for label, estimator in self.estimators.items():
                gathered.estimated.setdefault(label, []).append(estimator.estimate(tree, node_states))
            if bench.parts.drafter.view is not None:
                gathered.known(tree, node_states(tree), self.states)
            step = session.verify(tree, np.arange(tree.size))
            check_numbers(step.logits)
            greedy = chooser.choose_greedy(step.logits)
            depths = tree.depths.tolist()
            choices = greedy or [
                chooser.choose(row, at + depth) for row, depth in zip(step.logits, depths, strict=True)
            ]
            ties += choices[0] != output[at]
            choices[0] = output[at]
            gathered.trees.append(tree)
            gathered.choices.append(choices)
            gathered.routing.append(np.sort(step.routing.cpu().numpy(), axis=-1).astype(kind))
            rule.take([output[at]])
            session.commit([0])
            for predictor in asked.values():
                predictor.commit([[0]])
            if rule.remaining > 0:
                drafter.extend([[output[at]]], [step.features[:1]])
        return _packed(gathered, output, (geometry.moe_layers, geometry.top_k), kind), ties


def _refuse_oracles(predictors: Mapping[str, Predictor]) -> None:
    for label, predictor in predictors.items():
        if predictor.oracle:
            raise UserError(
                f"predictor {label!r} looks at the true routing, which is recorded anyway; expected one that predicts"
            )


def top_experts_of(sets: ExpertSets, top_k: int) -> np.ndarray:
    """The experts [L, N, K], ascending, of sets that hold K of each layer."""
    experts = np.nonzero(sets.to_mask())[2]
    return experts.reshape(sets.size, sets.num_layers, top_k).transpose(1, 0, 2)


def _packed(gathered: _Gathered, output: Sequence[int], shape: tuple[int, int], kind: type) -> RecordedRequest:
    def joined(parts: Sequence[Any], dtype: Any) -> np.ndarray:
        return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if parts else np.zeros(0, dtype=dtype)

    def routed(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=1) if parts else np.zeros((shape[0], 0, shape[1]), dtype=kind)

    trees = gathered.trees
    return RecordedRequest(
        tokens=np.asarray(output, dtype=np.int32),
        sizes=np.array([tree.size for tree in trees], dtype=np.int32),
        node_tokens=joined([tree.tokens for tree in trees], np.int32),
        parents=joined([tree.parents for tree in trees], np.int32),
        probs=joined([tree.probs for tree in trees], np.float64),
        choices=joined(gathered.choices, np.int32),
        routing=routed(gathered.routing),
        predicted={label: routed(parts) for label, parts in gathered.predicted.items()},
        estimated={label: joined(parts, np.float64) for label, parts in gathered.estimated.items()},
        entropies=joined(gathered.entropies, np.float32) if gathered.entropies and gathered.distributions else None,
        states=np.concatenate(gathered.states) if gathered.states else None,
        state_rows=joined(gathered.state_rows, np.int32) if gathered.state_rows else None,
    )


def labels_of(facts: Mapping[str, Any], kind: str) -> list[str]:
    """The predictors or estimators that a recording has, by label."""
    found = facts.get(kind)
    return [str(each) for each in found] if isinstance(found, list) else []
