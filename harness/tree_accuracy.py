"""How often a predictor is right about what is drafted, and how far off the costs are by which nodes are selected.

A predictor is used on draft trees, most of whose nodes the target never writes. So the target is run over whole
trees, step by step of a real decoding, and what it routes their nodes to is compared with what was predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from ecospec.errors import UserError
from ecospec.harness.accuracy import plain_table
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_speculative_batch
from ecospec.harness.drafting import DrafterSession, DraftHead
from ecospec.harness.informing import true_routing
from ecospec.harness.loading import LoadedTarget
from ecospec.harness.stopping import StopRule
from ecospec.harness.target import Target, TargetSession
from ecospec.policies import DraftTree, ExpertSets
from ecospec.policies.experts import count_pairs
from ecospec.predictors.contract import NodeStates
from ecospec.predictors.traces import TracedText


@dataclass
class TreeAccuracy:
    """What one predictor said of draft trees.

    Attributes:
        shares: by depth, for each drafted node the share of its true experts that were predicted, over all layers.
        costs: for each selected node but the roots its marginal cost, predicted and true, in pairs.
    """

    shares: dict[int, list[float]] = field(default_factory=dict)
    costs: list[tuple[int, int]] = field(default_factory=list)

    def add(self, tree: DraftTree, predicted: ExpertSets, true: ExpertSets, nodes: npt.NDArray[np.int64]) -> None:
        """Count a step: its whole tree, and the selected nodes, root first."""
        hits = count_pairs(predicted.bits & true.bits) / true.counts()
        for depth, share in zip(tree.depths.tolist(), hits.tolist(), strict=True):
            self.shares.setdefault(depth, []).append(share)
        pairs = zip(marginal_costs(predicted, nodes), marginal_costs(true, nodes), strict=True)
        self.costs += list(pairs)[1:]

    @property
    def predicted_cost(self) -> float:
        """Mean predicted marginal cost."""
        return fmean(predicted for predicted, _ in self.costs)

    @property
    def true_cost(self) -> float:
        """Mean true marginal cost."""
        return fmean(true for _, true in self.costs)

    @property
    def cost_error(self) -> float:
        """Mean of |predicted − true|."""
        return fmean(abs(predicted - true) for predicted, true in self.costs)


def marginal_costs(sets: ExpertSets, nodes: npt.NDArray[np.int64]) -> list[int]:
    """The pairs that each of some nodes adds to those before it.

    Args:
        nodes: ascending and prefix-closed, so that what a node adds is what its path footprint adds.
    """
    covered, costs = sets.empty_buffer(), []
    for node in nodes.tolist():
        costs.append(int(count_pairs(sets.bits[node] & ~covered)))
        covered = covered | sets.bits[node]
    return costs


def tree_accuracy_of(
    loaded: LoadedTarget, method: Speculation, texts: Iterable[TracedText], eos: frozenset[int]
) -> TreeAccuracy:
    """Decode texts' prompts anew, greedily and as far as their answers go, and look at every draft tree.

    Raises:
        UserError: no text has a prompt and an answer of at least two tokens.
    """
    found, target = TreeAccuracy(), loaded.target

    def observe(
        tree: DraftTree, predicted: ExpertSets | None, nodes: npt.NDArray[np.int64], session: TargetSession
    ) -> None:
        assert predicted is not None  # the policy asks for it
        found.add(tree, predicted, ExpertSets.from_topk(true_routing(session, tree), target.geometry.experts), nodes)

    for text in texts:
        answer = len(text.tokens) - text.prompt_tokens
        rule = StopRule(loaded.tokenizer, answer, eos)
        stream = Stream(tuple(text.tokens[: text.prompt_tokens].tolist()), TokenChooser(Sampling(), text.id), rule)
        decode_speculative_batch(target, method, [stream], observe)
    if not found.costs:
        raise UserError("the texts give no draft trees; expected prompts with answers of several tokens")
    return found


def answered(texts: Iterable[TracedText], most: int) -> list[TracedText]:
    """The first texts that the target wrote a part of."""
    return [text for text in texts if 0 < text.prompt_tokens < len(text.tokens)][:most]


def states_of_text(target: Target, head: DraftHead, text: TracedText, tree: DraftTree) -> NodeStates:
    """The drafter's own states for the last tokens of a text, given as a tree of a single path."""
    tokens = text.tokens.tolist()
    features = target.new_session(len(tokens)).prefill(tokens).features
    states = DrafterSession(head, target.embedding, len(tokens)).extend(tokens[1:], features[:-1])
    return NodeStates(states, np.arange(len(states) - tree.size, len(states)), np.ones(tree.size, dtype=bool))


def tree_tables(found: Mapping[str, TreeAccuracy]) -> list[Table]:
    """Accuracy by depth, the predictors across; and the marginal costs of the selected nodes, a line a predictor."""
    trees = "each predictor in a decoding of its own"
    depths = sorted(set().union(*(each.shares for each in found.values())))
    by_depth = []
    for depth in depths:
        nodes = " / ".join(str(len(each.shares.get(depth, ()))) for each in found.values())
        by_depth.append([str(depth), *(_share(each.shares.get(depth)) for each in found.values()), nodes])
    costs = [
        [
            name,
            str(len(each.costs)),
            *(f"{value:.2f}" for value in (each.predicted_cost, each.true_cost, each.cost_error)),
        ]
        for name, each in found.items()
    ]
    return [
        plain_table(["depth", *found, "nodes"], by_depth, f"accuracy over all nodes of draft trees, by depth; {trees}"),
        plain_table(
            ["predictor", "nodes", "predicted", "true", "mean |error|"],
            costs,
            f"marginal cost of a selected node, in (layer, expert) pairs, roots left out; {trees}",
        ),
    ]


def tree_accuracy_json(found: TreeAccuracy | None) -> dict[str, Any]:
    """The same as plain values; nothing of nothing."""
    if found is None:
        return {}
    return {
        "by_depth": {depth: fmean(shares) for depth, shares in sorted(found.shares.items())},
        "nodes_by_depth": {depth: len(shares) for depth, shares in sorted(found.shares.items())},
        "marginal_cost": {
            "nodes": len(found.costs),
            "predicted": found.predicted_cost,
            "true": found.true_cost,
            "mean_absolute_error": found.cost_error,
        },
    }


def _share(shares: list[float] | None) -> str:
    return "–" if not shares else f"{100 * fmean(shares):.1f} %"
