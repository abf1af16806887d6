"""The draft tree against one fresh pass per path, and the head's memory against a fresh one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    CONTEXT,
    HIDDEN,
    VOCAB,
    path_to,
    random_selection,
    random_tokens,
    tiny_head,
    tiny_target,
)
from torch import Tensor

import ecospec.harness.drafting as drafting
from ecospec.errors import UserError
from ecospec.harness.drafting import DrafterBatch, DrafterSession
from ecospec.harness.eagle3 import FLAGS, Eagle3Head
from ecospec.harness.training.drafter import unrolled_states
from ecospec.policies import DraftTree
from ecospec.predictors.kv_cache import SlotCache

COMMITTED = 7


class Setting:
    """A head with some committed entries: what followed each token, and the target's states of the tokens."""

    def __init__(self, draft_vocab: int | None = None, seed: int = 0, **facts: Any) -> None:
        torch.manual_seed(seed)
        self.head = tiny_head(seed, draft_vocab=draft_vocab, **facts)
        self.embedding = torch.randn(VOCAB, HIDDEN)
        self.following = random_tokens(np.random.default_rng(seed), COMMITTED)
        self.features = torch.randn(COMMITTED, 3 * HIDDEN)

    def session(self) -> DrafterSession:
        session = DrafterSession(self.head, self.embedding, capacity=80)
        session.extend(self.following, self.features)
        return session

    @torch.no_grad()
    def path_state(self, drafted: Sequence[int]) -> Tensor:
        """The state [H] after the committed entries and a drafted path, each pass over everything anew."""
        entries, hidden = list(self.following), self.head.fuse(self.features)
        state = self._last(entries, hidden)
        for token in drafted:
            entries.append(token)
            hidden = torch.cat((hidden, state[None]))
            state = self._last(entries, hidden)
        return state

    def _last(self, entries: list[int], hidden: Tensor) -> Tensor:
        positions = torch.arange(len(entries))[None]
        fresh = SlotCache(1, len(entries))
        states: Tensor = self.head(
            self.embedding[entries][None], hidden[None], self.head.rotary(self.embedding, positions), fresh, None
        )
        return states[0, -1]

    def children(self, drafted: Sequence[int], top_k: int) -> list[tuple[int, float]]:
        """The likeliest next tokens after a drafted path, with their probabilities."""
        probs = self.head.logits(self.path_state(drafted)).softmax(-1)
        best = probs.topk(top_k)
        ids = self.head.to_target_ids(best.indices)
        return list(zip(ids.tolist(), best.values.tolist(), strict=True))


def brute_force(setting: Setting, steps: int, top_k: int) -> dict[tuple[int, ...], float]:
    """Paths of token ids below the root, with the conditional probability of the last token."""
    paths: dict[tuple[int, ...], float] = {}
    beam: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(steps):
        grown = []
        for path, likelihood in beam:
            for token, prob in setting.children(path, top_k):
                paths[(*path, token)] = prob
                grown.append(((*path, token), likelihood * prob))
        beam = sorted(grown, key=lambda entry: -entry[1])[:top_k]
    return paths


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    tokens = tree.tokens.tolist()
    found = {tuple(tokens[n] for n in path_to(tree, node)[1:]): float(tree.probs[node]) for node in range(1, tree.size)}
    assert len(found) == tree.size - 1  # no path twice
    return found


@pytest.mark.parametrize(("steps", "top_k"), [(1, 3), (2, 4), (3, 2), (4, 1), (4, 3)])
@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_the_tree_holds_the_likeliest_paths_with_their_probabilities(
    steps: int, top_k: int, draft_vocab: int | None
) -> None:
    setting = Setting(draft_vocab)
    session = setting.session()
    tree = session.draft(setting.following[-1], steps, top_k)
    expected, found = brute_force(setting, steps, top_k), paths_of(tree)
    assert set(found) == set(expected)
    for path, prob in expected.items():
        assert found[path] == pytest.approx(prob, abs=1e-5)
    assert min(expected.values()) < 0.9 * max(expected.values())
    assert tree.tokens[0] == setting.following[-1]
    assert session.cache.length == COMMITTED  # nothing drafted is kept
    again = session.draft(setting.following[-1], steps, top_k)
    assert np.array_equal(again.tokens, tree.tokens)


def test_three_steps_of_two_are_eleven_nodes_in_levels_of_two_four_four() -> None:
    setting = Setting()
    tree = setting.session().draft(setting.following[-1], 3, 2)
    assert tree.size == 11
    assert np.bincount(tree.depths).tolist() == [1, 2, 4, 4]
    level_two = [node for node in range(tree.size) if tree.depths[node] == 2]
    best = sorted(level_two, key=lambda node: -tree.path_probs[node])[:2]
    assert {node for node in level_two if tree.children[node]} == set(best)


def test_drafted_tokens_are_target_ids() -> None:
    setting = Setting(draft_vocab=20)
    reachable = setting.head.to_target_ids(torch.arange(20)).tolist()
    assert reachable != list(range(20))
    tree = setting.session().draft(setting.following[-1], 3, 4)
    assert set(tree.tokens[1:].tolist()) <= set(reachable)
    assert not set(tree.tokens[1:].tolist()) <= set(range(20))


def test_more_children_than_the_draft_vocabulary_has_are_all_of_it() -> None:
    setting = Setting(draft_vocab=5)
    tree = setting.session().draft(setting.following[-1], 2, 9)
    assert np.bincount(tree.depths).tolist() == [1, 5, 25]
    assert tree.probs[1:6].sum() == pytest.approx(1.0)


def test_no_steps_are_the_bonus_token_alone() -> None:
    setting = Setting()
    tree = setting.session().draft(5, 0, 2)
    assert tree.tokens.tolist() == [5]


def test_damaged_weights_are_named_and_not_drafted_with() -> None:
    setting = Setting()
    session = setting.session()
    with torch.no_grad():
        setting.head.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the drafter gives probabilities that are no numbers"):
        session.draft(5, 2, 2)


def test_drafting_before_the_prompt_is_an_error() -> None:
    setting = Setting()
    with pytest.raises(RuntimeError, match="extend the drafter with the prompt before drafting"):
        DrafterSession(setting.head, setting.embedding, 10).draft(0, 2, 2)


def test_committing_in_parts_equals_committing_at_once() -> None:
    setting = Setting()
    parts = DrafterSession(setting.head, setting.embedding, 80)
    for start, end in ((0, 3), (3, 4), (4, COMMITTED)):
        parts.extend(setting.following[start:end], setting.features[start:end])
    for ours, theirs in zip(parts.cache.kept(0), setting.session().cache.kept(0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours, theirs = parts.draft(5, 3, 2), setting.session().draft(5, 3, 2)
    assert np.array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-5)


def test_after_any_history_the_heads_memory_is_that_of_the_emitted_tokens_and_true_states() -> None:
    rng = np.random.default_rng(1)
    target, head = tiny_target(), tiny_head()
    prompt, bonus = random_tokens(rng, 6), 9
    session = target.new_session(CONTEXT + 8)
    drafter = DrafterSession(head, target.embedding, CONTEXT + 16)
    drafter.extend([*prompt[1:], bonus], session.prefill(prompt).features)
    kept = list(prompt)
    while len(kept) < 70:
        tree = drafter.draft(bonus, int(rng.integers(1, 4)), 2)
        nodes = random_selection(rng, tree, int(rng.integers(1, 7)))
        result = session.verify(tree, nodes)
        row_of = {int(node): row for row, node in enumerate(nodes)}
        path = path_to(tree, int(rng.choice(nodes)))
        rows = [row_of[node] for node in path]
        session.commit(rows)
        kept += [int(tree.tokens[node]) for node in path]
        bonus = int(rng.integers(0, VOCAB))
        drafter.extend([*(int(tree.tokens[node]) for node in path[1:]), bonus], result.features[rows])
    fresh = DrafterSession(head, target.embedding, CONTEXT + 16)
    fresh.extend([*kept[1:], bonus], target.new_session(CONTEXT).prefill(kept).features)
    assert drafter.cache.length == fresh.cache.length == len(kept)
    for ours, theirs in zip(drafter.cache.kept(0), fresh.cache.kept(0), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    ours, theirs = drafter.draft(bonus, 3, 2), fresh.draft(bonus, 3, 2)
    assert np.array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.probs, theirs.probs, atol=1e-5)


@pytest.mark.parametrize(
    "flags", [(), *((flag,) for flag in FLAGS), FLAGS], ids=lambda flags: "+".join(flags) or "plain"
)
def test_what_is_trained_is_what_runs(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The states unrolled over whole sequences in training are those of a running session, after any prefix.

    A session drafts a chain of three from every position; its choices are replaced by the sequence's own
    tokens, since these are what training feeds the head.
    """
    steps, n = 3, 10
    setting = Setting(**dict.fromkeys(flags, True))
    torch.manual_seed(2)
    rows = torch.randint(0, VOCAB, (2, n + 1))
    features = torch.randn(2, n, 3 * HIDDEN)
    with torch.no_grad():
        unrolled = unrolled_states(setting.head, setting.embedding[rows[:, 1:]], features, steps)
    assert [state.shape for state in unrolled] == [(2, n, HIDDEN)] * steps
    for row in range(2):
        tokens = rows[row].tolist()
        for position in range(n - steps + 1):
            states_seen: list[Tensor] = []

            def forced(
                head: Eagle3Head,
                states: Tensor,
                top_k: int,
                tokens: list[int] = tokens,
                position: int = position,
                seen: list[Tensor] = states_seen,
            ) -> tuple[Tensor, Tensor, Tensor]:
                seen.append(states[0])
                # beyond the end of the sequence nothing is fed any more
                following = torch.tensor([[[*tokens, 0][position + 1 + len(seen)]]])
                return torch.zeros(1, 1), following, torch.zeros(1, 1)

            monkeypatch.setattr(drafting, "_top_children", forced)
            session = DrafterSession(setting.head, setting.embedding, 20)
            session.extend(tokens[1 : position + 2], features[row, : position + 1])
            session.draft(tokens[position + 1], steps, 1)
            assert len(states_seen) == steps
            for k, state in enumerate(states_seen):
                torch.testing.assert_close(unrolled[k][row, position + k], state, atol=1e-4, rtol=1e-4)
    assert (unrolled[1][0, 3] - unrolled[0][0, 3]).abs().max() > 0.1  # the steps do differ


# --- the states that a predictor may read


@pytest.mark.parametrize(("steps", "top_k"), [(1, 3), (2, 4), (3, 2), (4, 3), (5, 1)])
def test_every_node_has_its_own_state_or_its_parents(steps: int, top_k: int) -> None:
    setting = Setting()
    session = setting.session()
    tree = session.draft(setting.following[-1], steps, top_k)
    found = session.node_states(tree)
    assert found.own.tolist() == [node == 0 or bool(tree.children[node]) for node in range(tree.size)]
    for node in range(tree.size):
        path = path_to(tree, node if found.own[node] else int(tree.parents[node]))
        expected = setting.path_state([int(tree.tokens[n]) for n in path[1:]])
        assert torch.allclose(found.states[found.rows[node]], expected, atol=1e-4), node


def test_a_tree_of_the_root_alone_has_the_roots_state() -> None:
    setting = Setting()
    session = setting.session()
    assert session.root_state is not None
    found = session.node_states(session.draft(setting.following[-1], 0, 2))
    assert (found.own.tolist(), found.rows.tolist()) == ([True], [0])
    assert torch.equal(found.states, session.root_state)
    with pytest.raises(ValueError, match="for the tree that it drafted last"):
        setting.session().node_states(DraftTree.chain(np.array([1]), np.ones(1)))


@pytest.mark.parametrize("depths", [(3, 2, 1), (1, 4, 0), (2, 2, 2)])
def test_a_tree_has_the_same_states_in_a_batch_as_alone(depths: tuple[int, ...]) -> None:
    """In a batch all trees grow as deep as the deepest; a leaf of a shallower one has its parent's state even so."""
    setting = Setting()
    batch = DrafterBatch(setting.head, setting.embedding, [80] * 3)
    for row in range(3):
        batch.start(row, setting.following[row:], setting.features[row:])
    bonuses = [setting.following[-1]] * 3
    for row, tree in enumerate(batch.draft(bonuses, depths, 2)):
        single = DrafterSession(setting.head, setting.embedding, 80)
        single.extend(setting.following[row:], setting.features[row:])
        expected = single.node_states(single.draft(bonuses[row], depths[row], 2))
        found = batch.sessions[row].node_states(tree)
        assert np.array_equal(found.own, expected.own)
        assert torch.allclose(found.states[found.rows], expected.states[expected.rows], atol=1e-5)


def test_there_are_states_for_the_tree_that_was_drafted_last_only() -> None:
    setting = Setting()
    session = setting.session()
    first = session.draft(setting.following[-1], 3, 2)
    session.node_states(first)
    session.draft(setting.following[-1], 2, 2)
    with pytest.raises(ValueError, match="for the tree that it drafted last"):
        session.node_states(first)


def test_extending_gives_the_states_of_what_was_added() -> None:
    setting = Setting()
    session = DrafterSession(setting.head, setting.embedding, capacity=80)
    first = session.extend(setting.following[:3], setting.features[:3])
    rest = session.extend(setting.following[3:], setting.features[3:])
    assert (first.shape, rest.shape) == ((3, HIDDEN), (COMMITTED - 3, HIDDEN))
    assert torch.allclose(rest[-1], setting.path_state([]), atol=1e-5)
    assert session.root_state is not None
    assert torch.equal(session.root_state, rest[-1:])
