"""Prompt lookup: what followed the last n tokens, of which the bonus token is the last, where they stood before.

Of n = longest, …, 1 the first is taken whose n-gram stands anywhere before in prompt and output. The tree holds the
latest distinct continuations, at most k of them, merged where they begin alike. With c(node) the occurrences that go on
by a node's path, among the latest `LATEST`, and c(root) all of these, the probability of a child is
c(child) / (c(parent) + 1): the one more stands for what has not been seen, so that it is above 0 and those of all
children of a node sum to less than 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ecospec.harness.drafters.contract import BoundDrafter, DraftBatch
from ecospec.policies import DraftTree

LATEST = 64
"""Occurrences that are looked at, the latest; bounds the time for a token that stands everywhere."""


class NgramSession:
    """One request: its text, and where each of its n-grams ends."""

    def __init__(self, longest: int) -> None:
        self.text: list[int] = []
        self._longest = longest
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            self.text.append(int(token))
            end = len(self.text)
            for n in range(1, min(self._longest, end) + 1):
                self._ends.setdefault(tuple(self.text[end - n :]), []).append(end)

    def occurrences(self) -> list[int]:
        """Ends of the longest n-gram of the text's end where it stood before, the latest first."""
        for n in range(min(self._longest, len(self.text)), 0, -1):
            before = self._ends[tuple(self.text[-n:])][:-1]
            if before:
                return before[: -LATEST - 1 : -1]
        return []

    def draft(self, depth: int, top_k: int) -> DraftTree:
        """The tree under the text's last token."""
        tokens, parents = [self.text[-1]], [-1]
        found = [tuple(self.text[end : end + depth]) for end in self.occurrences()] if depth > 0 else []
        # A dict keeps the order in which the latest of each came.
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for continuation in list(dict.fromkeys(found))[:top_k]:
            for length in range(1, len(continuation) + 1):
                path = continuation[:length]
                if path not in nodes:
                    nodes[path] = len(tokens)
                    tokens.append(path[-1])
                    parents.append(nodes[path[:-1]])
        counts = [0] * len(tokens)
        for continuation in found:
            for length in range(len(continuation) + 1):
                node = nodes.get(continuation[:length])
                if node is not None:
                    counts[node] += 1
        probs = [1.0] + [counts[node] / (counts[parents[node]] + 1) for node in range(1, len(tokens))]
        return DraftTree(np.array(tokens), np.array(parents), np.array(probs))


class NgramBatch(DraftBatch):
    """Its requests, one after another."""

    def __init__(self, longest: int, size: int) -> None:
        self._sessions = [NgramSession(longest) for _ in range(size)]

    def start(self, index: int, tokens: Sequence[int], features: Any) -> None:
        """Take in the prompt and the bonus token."""
        self._sessions[index].extend(tokens)

    def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Any]) -> None:
        """Take in what was emitted."""
        for session, block in zip(self._sessions, blocks, strict=True):
            session.extend(block)

    def draft(self, bonuses: Sequence[int], depths: Sequence[int], top_k: int) -> list[DraftTree]:
        """A tree for every request."""
        return [session.draft(depth, top_k) for session, depth in zip(self._sessions, depths, strict=True)]

    def leave(self, index: int) -> None:
        """Drop a session."""
        del self._sessions[index]


class BoundNgram(BoundDrafter):
    """Knows nothing of the target."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def open(self, capacities: Sequence[int]) -> DraftBatch:
        """As many empty texts."""
        return NgramBatch(self._longest, len(capacities))
