"""What is asked of the target: prompts as token ids, and the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.stopping import token_limit
from ecospec.harness.target import Geometry
from ecospec.suites import Problem


@dataclass(frozen=True)
class Request:
    """One prompt of a problem: its text, its ids and how many tokens it may emit. ``turn`` counts from 0."""

    problem: Problem
    prompt: str
    ids: tuple[int, ...]
    limit: int
    turn: int = 0

    @property
    def id(self) -> str:
        """The problem's id, with the turn of a conversation, from 1."""
        return f"{self.problem.id}.{self.turn + 1}" if self.problem.follow_ups else self.problem.id


def render_request(
    problem: Problem,
    prompt: str,
    turn: int,
    tokenizer: Any,
    geometry: Geometry,
    target: str,
    max_new_tokens: int,
) -> Request:
    """Tokenise a prompt.

    Raises:
        UserError: it does not fit into the context, or the tokenizer is not the target's.
    """
    ids = tuple(tokenizer(prompt)["input_ids"])
    if max(ids, default=0) >= geometry.vocab_size:
        raise UserError(
            f"target {target}: its tokenizer gives token {max(ids)} for {problem.id}, but it has embeddings for "
            f"{geometry.vocab_size}; expected the tokenizer that belongs to it"
        )
    limit = token_limit(len(ids), max_new_tokens, geometry.context, problem.id)
    return Request(problem, prompt, ids, limit, turn)


def next_prompt(request: Request, answer: str) -> str | None:
    """The prompt of a conversation's next turn, the answer in it exactly as emitted; None after the last."""
    if request.turn == len(request.problem.follow_ups):
        return None
    return request.prompt + answer + request.problem.follow_ups[request.turn]


def turn_ids(request: Request) -> list[str]:
    """The ids of all turns of a request's problem."""
    return [replace(request, turn=turn).id for turn in range(len(request.problem.follow_ups) + 1)]


def check_conversations(requests: Sequence[Request], tokenizer: Any, max_new_tokens: int, context: int) -> None:
    """Refuse, before the run, a conversation whose last prompt could outgrow the context.

    Raises:
        UserError: naming it.
    """
    for request in requests:
        follow_ups = request.problem.follow_ups
        needed = len(request.ids) + sum(len(tokenizer(text)["input_ids"]) + max_new_tokens for text in follow_ups)
        if follow_ups and needed >= context:
            raise UserError(
                f"prompt {request.problem.id!r}: its last turn may need {needed} tokens, the target's context is "
                f"{context}; expected fewer --max-new-tokens or a shorter conversation"
            )
