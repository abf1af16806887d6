"""Growing draft trees with a head that reads the target's states, and keeping the head's KV memory true.

The entry at position t is (embedding of token t+1, state of token t). Committed entries hold the target's
own states; entries of draft nodes hold the head's recurrent ones and are dropped after drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.policies import DraftTree
from ecospec.predictors.contract import NodeStates
from ecospec.predictors.kv_cache import SlotCache
from ecospec.predictors.packing import PackedPass, SlotPool


class Proposer(Protocol):
    """What proposes the next tokens from the states of draft nodes."""

    @property
    def draft_vocab_size(self) -> int:
        """D, tokens that it can propose."""

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits [..., D] of states [..., H]."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids."""


class DraftHead(Proposer, Protocol):
    """One decoder layer that goes on from a state of the target, then from its own: an EAGLE-3 head, an MTP layer.

    Attributes:
        own_embedding: [V, H] that it reads in place of the target's, if it has one.
    """

    own_embedding: Tensor | None

    @property
    def rotary(self) -> Any:
        """A module that gives cosines and sines [1, n, ...] of positions [1, n], like a tensor."""

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [n, H] of the target's features [n, F · Ht]."""

    def __call__(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: SlotCache | PackedPass,
        mask: Tensor | None,
    ) -> Tensor:
        """States [B, n, H] of n entries: (embedding of token t+1, hidden state of token t)."""


@dataclass(frozen=True)
class Expansion:
    """The head's states at the nodes that were expanded while a tree grew, the root first.

    Attributes:
        nodes: int64 [M]. states: [M, H].
        log_probs: of what was drafted from them, [m, D] a level, M in all.
    """

    nodes: np.ndarray
    states: Tensor
    log_probs: Sequence[Tensor] = ()

    def node_states(self, tree: DraftTree) -> NodeStates:
        """The states for all nodes of the tree that grew."""
        # Plain lists: a dozen nodes are sooner gone through than handed to array functions.
        place = {node: row for row, node in enumerate(self.nodes.tolist())}
        parents = tree.parents.tolist()
        rows = np.array([place[node if node in place else parents[node]] for node in range(len(parents))])
        own = np.array([node in place for node in range(len(parents))])
        return NodeStates(self.states, rows, own, self._entropies if self.log_probs else None)

    def _entropies(self) -> Tensor:
        """[M], in nats."""
        probs = torch.cat(list(self.log_probs)).exp()
        entropies: Tensor = torch.special.entr(probs).sum(-1)
        return entropies


Run: TypeAlias = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""One pass over k draft nodes of each of R requests: their tokens [R·k], hidden states [R·k, H], their depth, and
bool [R, k, w], which of a request's last w nodes each sees; gives their states [R·k, H]."""


class DrafterSession:
    """One request of a head. Call `extend` with what was emitted, then `draft`."""

    def __init__(self, head: DraftHead, embedding: Tensor, capacity: int, cache: SlotCache | None = None) -> None:
        """Open a request.

        Args:
            embedding: the target's input embedding [V, H]; a head with its own does not use it.
            capacity: the most entries, draft ones included.
            cache: KV memory to use instead of a new one.
        """
        self.head = head
        self.embedding = embedding if head.own_embedding is None else head.own_embedding
        self.cache = SlotCache(1, capacity) if cache is None else cache
        self.root_state: Tensor | None = None
        self.drafted: tuple[DraftTree, Expansion] | None = None
        every = torch.arange(capacity, device=embedding.device)[None]
        with torch.inference_mode():
            self._cosines, self._sines = head.rotary(embedding, every)

    def _rotary(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions from ``start`` to before ``end``."""
        return self._cosines[:, start:end], self._sines[:, start:end]

    def rotary_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, n, head_dim] of positions [n]."""
        return self._cosines[:, positions], self._sines[:, positions]

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Add committed entries.

        Args:
            tokens: n ids; the i-th *follows* the token of the i-th state. The last is the bonus token.
            features: [n, F · Ht], the target's states of the tokens before them.

        Returns:
            The head's states [n, H] of these tokens; the last is the root's.
        """
        device = self.embedding.device
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=device)
        base, n = self.cache.length, len(tokens)
        mask = None
        if n > 1 and base:
            mask = torch.ones(n, base + n, dtype=torch.bool, device=device).tril(base)[None, None]
        hidden = self.head.fuse(features)[None]
        states: Tensor = self.head(self.embedding[ids][None], hidden, self._rotary(base, base + n), self.cache, mask)[0]
        self.cache.advance(n)
        self.root_state = states[-1:]
        return states

    @torch.inference_mode()
    def draft(self, bonus: int, steps: int, top_k: int) -> DraftTree:
        """A dynamic tree under the bonus token: root, k children, then k children of each of the k best.

        With ``steps`` s and ``top_k`` k the tree has 1 + k + (s − 1)·k² nodes. The probabilities are the
        head's own conditional ones, over its draft vocabulary.
        """
        if self.root_state is None:
            raise RuntimeError("extend the drafter with the prompt before drafting")
        base = self.cache.length

        def run(tokens: Tensor, hidden: Tensor, depth: int, seen: Tensor) -> Tensor:
            width = seen.shape[1]
            mask = torch.cat((seen.new_ones(width, base), seen[0]), dim=1)[None, None]
            rotary = self._rotary(base + depth - 1, base + depth)
            states: Tensor = self.head(self.embedding[tokens][None], hidden[None], rotary, self.cache, mask)[0]
            self.cache.advance(width)
            return states

        grown = draft_trees(self.head, self.root_state, [bonus], [steps], top_k, run)
        self.cache.truncate(base)
        self.drafted = grown[0]
        return grown[0][0]

    def node_states(self, tree: DraftTree) -> NodeStates:
        """The head's states for the nodes of the tree that `draft` gave last.

        Raises:
            ValueError: it is another tree.
        """
        if self.drafted is None or tree is not self.drafted[0]:
            raise ValueError("the drafter has states for the tree that it drafted last, and for no other")
        return self.drafted[1].node_states(tree)


class DrafterBatch:
    """Several requests of one head, drafted for together: one pass a level over the nodes of all of them.

    With a single request left it is that one's `DrafterSession`.
    """

    def __init__(self, head: DraftHead, embedding: Tensor, capacities: Sequence[int]) -> None:
        """Open the requests, with the most entries that each can come to."""
        capacity = max(capacities)
        self._pool: SlotPool | None = None
        if len(capacities) == 1:
            self.sessions = [DrafterSession(head, embedding, capacity)]
        else:
            self._pool = SlotPool(1, capacity, len(capacities))
            self.sessions = [DrafterSession(head, embedding, capacity, cache) for cache in self._pool.caches]

    def start(self, index: int, tokens: Sequence[int], features: Tensor) -> None:
        """Add the entries of one request's prompt; see `DrafterSession.extend`."""
        self.sessions[index].extend(tokens, features)

    @torch.inference_mode()
    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        """Add committed entries to every request, each as in `DrafterSession.extend`."""
        if self._pool is None or len(self.sessions) == 1:
            for session, block, states in zip(self.sessions, blocks, features, strict=True):
                session.extend(block, states)
            return
        first = self.sessions[0]
        device, counts = first.embedding.device, [len(block) for block in blocks]
        ids = torch.tensor([token for block in blocks for token in block], device=device)
        starts = [session.cache.length for session in self.sessions]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        width = max(counts)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(len(counts), -1, -1)
        packed = PackedPass(self._pool, counts, causal)
        states = first.head(
            first.embedding[ids][None],
            first.head.fuse(torch.cat(list(features)))[None],
            first.rotary_at(torch.tensor(positions, device=device)),
            packed,
            packed.mask,
        )[0]
        ends = np.cumsum(counts)
        for session, count, end in zip(self.sessions, counts, ends, strict=True):
            session.cache.advance(count)
            session.root_state = states[end - 1 : end]

    @torch.inference_mode()
    def draft(self, bonuses: Sequence[int], steps: Sequence[int], top_k: int) -> list[DraftTree]:
        """A tree for every request, each as `DrafterSession.draft` gives it."""
        if self._pool is None or len(self.sessions) == 1:
            return [
                session.draft(bonus, depth, top_k)
                for session, bonus, depth in zip(self.sessions, bonuses, steps, strict=True)
            ]
        pool, first, device = self._pool, self.sessions[0], self.sessions[0].embedding.device
        bases = [session.cache.length for session in self.sessions]
        roots = [session.root_state for session in self.sessions if session.root_state is not None]
        ends = torch.tensor(bases, device=device)

        def run(tokens: Tensor, hidden: Tensor, depth: int, seen: Tensor) -> Tensor:
            packed = PackedPass(pool, [seen.shape[1]] * len(bases), seen)
            positions = (ends + (depth - 1)).repeat_interleave(seen.shape[1])
            states: Tensor = first.head(
                first.embedding[tokens][None], hidden[None], first.rotary_at(positions), packed, packed.mask
            )[0]
            for cache in pool.caches:
                cache.advance(seen.shape[1])
            return states

        grown = draft_trees(first.head, torch.cat(roots), bonuses, steps, top_k, run)
        for session, base, drafted in zip(self.sessions, bases, grown, strict=True):
            session.cache.truncate(base)
            session.drafted = drafted
        return [tree for tree, _ in grown]

    def leave(self, index: int) -> None:
        """Drop the request at ``index``; those behind it move up."""
        del self.sessions[index]
        if self._pool is not None:
            self._pool.leave(index)


def draft_trees(
    head: Proposer, roots: Tensor, bonuses: Sequence[int], steps: Sequence[int], top_k: int, run: Run
) -> list[tuple[DraftTree, Expansion]]:
    """Dynamic trees for R requests at once, and the states of the nodes that were expanded.

    All grow as deep as the deepest is to be; a tree's nodes are in order of depth, so a shallower one is the
    first part of it.

    Args:
        roots: [R, H], the head's state at every root.
        bonuses, steps: root token and depth of each tree.

    Raises:
        UserError: the head's probabilities are no numbers.
    """
    if max(steps) < 1:
        root = np.zeros(1, dtype=np.int64)
        alone = [_rooted(bonus, np.array([], int), np.array([], int), np.array([])) for bonus in bonuses]
        return [(tree, Expansion(root, roots[row : row + 1])) for row, tree in enumerate(alone)]
    top_k = min(top_k, head.draft_vocab_size)
    size, device = len(bonuses), roots.device
    log_probs, ids, every = _top_children(head, roots, top_k)
    distributions = [every.unflatten(0, (size, 1))]
    tokens, parents, scores = [ids], [torch.zeros_like(ids)], [log_probs]
    beam_tokens, beam_paths = ids, log_probs
    beam_nodes = torch.arange(1, top_k + 1, device=device).expand(size, -1)
    hidden = roots.repeat_interleave(top_k, dim=0)
    own = torch.eye(top_k, dtype=torch.bool, device=device).expand(size, -1, -1)
    expanded = [roots[:, None]]
    seen, count = own, 1 + top_k
    first_of = torch.arange(size, device=device)[:, None] * top_k
    for depth in range(1, max(steps)):
        states = run(beam_tokens.flatten(), hidden, depth, seen)
        expanded.append(states.view(size, top_k, -1))
        log_probs, ids, every = _top_children(head, states, top_k)
        distributions.append(every.unflatten(0, (size, top_k)))
        children, grown = ids.view(size, -1), log_probs.view(size, -1)
        tokens.append(children)
        parents.append(beam_nodes.repeat_interleave(top_k, dim=1))
        scores.append(grown)
        if depth + 1 < max(steps):
            paths = beam_paths.repeat_interleave(top_k, dim=1) + grown
            beam_paths, best = paths.topk(top_k, dim=1)
            beam_tokens, beam_nodes = children.gather(1, best), count + best
            source = torch.div(best, top_k, rounding_mode="floor")
            hidden = states[(first_of + source).flatten()]
            before = seen.gather(1, source[..., None].expand(-1, -1, seen.shape[2]))
            seen = torch.cat((before, own), dim=2)
        count += top_k * top_k
    drafted = torch.cat(tokens, dim=1).cpu().numpy()
    parent_ids = torch.cat(parents, dim=1).cpu().numpy()
    probs = torch.cat(scores, dim=1).double().exp().clamp(max=1.0).cpu().numpy()
    if not np.isfinite(probs).all():
        raise UserError("the drafter gives probabilities that are no numbers; its weights are damaged")
    nodes = [top_k + (depth - 1) * top_k**2 if depth > 0 else 0 for depth in steps]
    states = torch.cat(expanded, dim=1)
    grown_trees = []
    for row, (bonus, depth, n) in enumerate(zip(bonuses, steps, nodes, strict=True)):
        tree = _rooted(bonus, drafted[row, :n], parent_ids[row, :n], probs[row, :n])
        # A node's children stand together, in the order in which the nodes were expanded; those of the last level of a
        # shallower tree were expanded for its neighbours alone.
        count = 1 + top_k * max(0, depth - 1)
        levels = [level[row] for level in distributions[: max(1, depth)]]
        grown_trees.append((tree, Expansion(parent_ids[row, ::top_k][:count], states[row, :count], levels)))
    return grown_trees


def _rooted(bonus: int, tokens: np.ndarray, parents: np.ndarray, probs: np.ndarray) -> DraftTree:
    return DraftTree(
        tokens=np.concatenate(([bonus], tokens)),
        parents=np.concatenate(([-1], parents)),
        probs=np.concatenate(([1.0], probs)),
    )


def _top_children(head: Proposer, states: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and target ids [n, k] of the k likeliest children of n states, and all log-probabilities."""
    log_probs = head.logits(states).float().log_softmax(-1)
    best, draft_ids = log_probs.topk(top_k, dim=-1)
    return best, head.to_target_ids(draft_ids), log_probs
