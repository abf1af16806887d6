"""The arithmetic of one decode step: what is selected, what is accepted, and what was read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.choosing import TokenChooser
from ecospec.policies import CostModel, DraftTree, ExpertSets, Policy, SelectionRequest, run_policy
from ecospec.policies.arrays import FloatArray


def check_numbers(logits: Tensor) -> None:
    """Refuse a target whose weights give no numbers: every choice among its logits would be the same.

    Raises:
        UserError: there is one that is not a number.
    """
    if bool(logits.isnan().any()):
        raise UserError("the target's logits are not numbers; expected undamaged weights, or a wider --dtype")


def unique_pairs(routing: Tensor, experts: int) -> int:
    """Unique (layer, expert) pairs of a routing [L, n, K]; 0 of a dense model's, which has no layers."""
    return int(active_pairs(routing, experts).sum())


def active_pairs(routing: Tensor, experts: int) -> npt.NDArray[np.bool_]:
    """Which experts of each MoE layer a pass reads [L, E], from its routing [L, n, K]; [0, E] of a dense model's."""
    active = np.zeros((len(routing), experts), dtype=np.bool_)
    if len(routing):
        np.put_along_axis(active, routing.cpu().numpy().reshape(len(routing), -1), True, axis=1)
    return active


def accept(
    tree: DraftTree,
    nodes: npt.NDArray[np.int64],
    logits: Tensor,
    chooser: TokenChooser,
    position: int,
    greedy: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """Walk the selected part of the tree along the target's own choices.

    Args:
        nodes: selected nodes, ascending, root first; row i of ``logits`` [n, V] belongs to ``nodes[i]``.
        position: output position that follows the root.
        greedy: the chooser's greedy choices for all rows, where they are known already.

    Returns:
        The accepted rows (root first), and the target's choice after the last of them: the next bonus token.
    """
    row_of = {int(node): row for row, node in enumerate(nodes)}
    greedy = chooser.choose_greedy(logits) if greedy is None else greedy
    node, rows = 0, [0]
    while True:
        row = rows[-1]
        token = greedy[row] if greedy is not None else chooser.choose(logits[row], position + len(rows) - 1)
        for child in tree.children[node]:
            if child in row_of and int(tree.tokens[child]) == token:
                node = child
                rows.append(row_of[child])
                break
        else:
            return rows, token


def depths_of(tree: DraftTree, nodes: npt.NDArray[np.int64], rows: Sequence[int], taken: int) -> tuple[int, int]:
    """How deep a step had something to verify on the path that it emitted, and how deep that was accepted.

    Args:
        nodes, rows: what was selected and the accepted rows, as `accept` has them.
        taken: tokens that the stop rule let through, of the accepted draft tokens and the bonus token after them.

    Returns:
        ``(reached, accepted)``: a draft token of each depth from 1 to ``accepted`` was emitted. The path was tried
        one deeper, so that ``reached`` is ``accepted + 1``, where the last emitted node has a selected child and no
        stop came before it; else they are equal.
    """
    accepted = min(taken, len(rows) - 1)
    last = int(nodes[rows[accepted]])
    tried = taken == len(rows) and not set(tree.children[last]).isdisjoint(nodes.tolist())
    return accepted + tried, accepted


def select_rows(
    policy: Policy,
    trees: Sequence[DraftTree],
    experts: Sequence[ExpertSets] | None,
    budget: int,
    *,
    cost_model: CostModel | None = None,
    acceptance: Sequence[FloatArray] | None = None,
) -> list[npt.NDArray[np.int64]]:
    """Select for every request in turn; B₀ is what the selections before it cover already.

    The union of all selections' expert sets is what the one verification pass reads.

    Args:
        cost_model: given on to a policy that asks for one.
        acceptance: each tree's estimates, or None for the draft's own probabilities.
    """
    cost = cost_model if policy.needs_cost_model else None
    covered, selected = None, []
    for row, tree in enumerate(trees):
        request = SelectionRequest(
            tree=tree,
            budget=budget,
            experts=None if experts is None else experts[row],
            covered=covered,
            cost_model=cost,
            acceptance=None if acceptance is None else acceptance[row],
        )
        selected.append(run_policy(policy, request))
        if experts is not None and len(trees) > 1:
            own = experts[row].union(selected[-1])
            covered = own if covered is None else covered | own
    return selected


def overlap_of(
    predicted: ExpertSets | None, nodes: npt.NDArray[np.int64], routing: Tensor, experts: int
) -> float | None:
    """Mean share of the selected nodes' true experts that were predicted."""
    if predicted is None:
        return None
    true = ExpertSets.from_topk(routing.cpu().numpy(), experts)
    hits = np.bitwise_count(predicted.bits[nodes] & true.bits).sum()
    return float(hits / np.bitwise_count(true.bits).sum())
