"""Growing a draft tree with an EAGLE-3 head, and keeping the head's KV memory true.

The entry at position t is (embedding of token t+1, state of token t). Committed entries hold the target's
own states; entries of draft nodes hold the head's recurrent ones and are dropped after drafting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.eagle3 import Eagle3Head
from ecospec.policies import DraftTree
from ecospec.predictors.kv_cache import SlotCache


class DrafterSession:
    """One request of an EAGLE-3 head. Call `extend` with what was emitted, then `draft`."""

    def __init__(self, head: Eagle3Head, embedding: Tensor, capacity: int) -> None:
        """Open a request.

        Args:
            embedding: the target's input embedding [V, H]; a head with its own does not use it.
            capacity: the most entries, draft ones included.
        """
        self._head = head
        self._embedding = embedding if head.own_embedding is None else head.own_embedding
        self.cache = SlotCache(1, capacity)
        self._root_state: Tensor | None = None
        every = torch.arange(capacity, device=embedding.device)[None]
        with torch.inference_mode():
            self._cosines, self._sines = head.rotary(embedding, every)

    def _rotary(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions from ``start`` to before ``end``."""
        return self._cosines[:, start:end], self._sines[:, start:end]

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], features: Tensor) -> None:
        """Add committed entries.

        Args:
            tokens: n ids; the i-th *follows* the token of the i-th state. The last is the bonus token.
            features: [n, 3·Ht], the target's three states of the tokens before them.
        """
        device = self._embedding.device
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=device)
        base, n = self.cache.length, len(tokens)
        mask = None
        if n > 1 and base:
            mask = torch.ones(n, base + n, dtype=torch.bool, device=device).tril(base)[None, None]
        hidden = self._head.fc(features)[None]
        states = self._head(self._embedding[ids][None], hidden, self._rotary(base, base + n), self.cache, mask)
        self.cache.advance(n)
        self._root_state = states[0, -1:]

    @torch.inference_mode()
    def draft(self, bonus: int, steps: int, top_k: int) -> DraftTree:
        """A dynamic tree under the bonus token: root, k children, then k children of each of the k best.

        With ``steps`` s and ``top_k`` k the tree has 1 + k + (s − 1)·k² nodes. The probabilities are the
        head's own conditional ones, over its draft vocabulary.
        """
        head, device = self._head, self._embedding.device
        if self._root_state is None:
            raise RuntimeError("extend the drafter with the prompt before drafting")
        if steps < 1:
            return DraftTree(tokens=np.array([bonus]), parents=np.array([-1]), probs=np.array([1.0]))
        top_k = min(top_k, head.config.draft_vocab_size)
        base = self.cache.length
        log_probs, ids = _top_children(head, self._root_state, top_k)
        tokens, parents, scores = [ids[0]], [torch.zeros_like(ids[0])], [log_probs[0]]
        beam_tokens, beam_paths = ids[0], log_probs[0]
        beam_nodes = torch.arange(1, top_k + 1, device=device)
        hidden = self._root_state.expand(top_k, -1)
        seen = torch.eye(top_k, dtype=torch.bool, device=device)
        count = 1 + top_k
        for depth in range(1, steps):
            mask = torch.cat((seen.new_ones(top_k, base), seen), dim=1)[None, None]
            rotary = self._rotary(base + depth - 1, base + depth)
            states = head(self._embedding[beam_tokens][None], hidden[None], rotary, self.cache, mask)[0]
            self.cache.advance(top_k)
            log_probs, ids = _top_children(head, states, top_k)
            tokens.append(ids.flatten())
            parents.append(beam_nodes.repeat_interleave(top_k))
            scores.append(log_probs.flatten())
            if depth + 1 < steps:
                paths = (beam_paths[:, None] + log_probs).flatten()
                beam_paths, best = paths.topk(top_k)
                beam_tokens, beam_nodes = ids.flatten()[best], count + best
                source = torch.div(best, top_k, rounding_mode="floor")
                hidden = states[source]
                seen = torch.cat((seen[source], torch.eye(top_k, dtype=torch.bool, device=device)), dim=1)
            count += top_k * top_k
        self.cache.truncate(base)
        drafted = torch.cat(tokens).cpu().numpy()
        parent_ids = torch.cat(parents).cpu().numpy()
        probs = torch.cat(scores).double().exp().clamp(max=1.0).cpu().numpy()
        if not np.isfinite(probs).all():
            raise UserError("the drafter gives probabilities that are no numbers; its weights are damaged")
        return DraftTree(
            tokens=np.concatenate(([bonus], drafted)),
            parents=np.concatenate(([-1], parent_ids)),
            probs=np.concatenate(([1.0], probs)),
        )


def _top_children(head: Eagle3Head, states: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and target ids [n, k] of the k likeliest children of n states."""
    log_probs = head.logits(states).float().log_softmax(-1)
    best, draft_ids = log_probs.topk(top_k, dim=-1)
    return best, head.to_target_ids(draft_ids)
