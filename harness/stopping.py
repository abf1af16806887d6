"""Where an output ends: EOS, a stop sequence, the token limit or the context; the same rule for all methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ecospec.errors import UserError

# A stop sequence of n characters is looked for in the last n tokens plus these: a token can be part of a
# character, or a special one without text.
EXTRA_TOKENS = 8


def token_limit(prompt_tokens: int, max_new_tokens: int, context: int, prompt_id: str) -> int:
    """How many tokens a request may emit: prompt and output together stay within the context.

    Raises:
        UserError: the prompt leaves no room for a single token.
    """
    if prompt_tokens >= context:
        raise UserError(
            f"prompt {prompt_id!r} has {prompt_tokens} tokens; expected fewer than the target's context of {context}"
        )
    return min(max_new_tokens, context - prompt_tokens)


@dataclass
class StopRule:
    """Decides, token by token, whether an output is complete.

    Attributes:
        limit: most tokens to emit.
        eos: ids that end the output; they are emitted.
        stop: strings that end it; the token that completes one is emitted, the text is cut before it.
    """

    tokenizer: Any
    limit: int
    eos: frozenset[int]
    stop: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return 0 if self.reason else self.limit - len(self.tokens)

    def take(self, block: Sequence[int]) -> int:
        """Append tokens until the output is complete; returns how many were taken."""
        for taken, token in enumerate(block, 1):
            self.tokens.append(token)
            self.reason = self._ends()
            if self.reason:
                return taken
        return len(block)

    def _ends(self) -> str | None:
        if self.tokens[-1] in self.eos:
            return "eos"
        if self.stop:
            window = max(map(len, self.stop)) + EXTRA_TOKENS
            tail = self.tokenizer.decode(self.tokens[-window:])
            if any(s in tail for s in self.stop):
                return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def text(self) -> str:
        """The output's text, cut before EOS or the first stop sequence."""
        kept = self.tokens[:-1] if self.reason == "eos" else self.tokens
        text: str = self.tokenizer.decode(kept)
        ends = [at for s in self.stop if (at := text.find(s)) >= 0]
        return text[: min(ends)] if ends else text
