"""What is asked of the target: prompts as token ids, and the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.chat import Chat
from ecospec.harness.stopping import token_limit
from ecospec.harness.target import Geometry
from ecospec.suites import Problem


@dataclass(frozen=True)
class Request:
    """One prompt of a problem.

    Attributes:
        said: what was said so far, in turn by the problem and by the model; the last is the problem's.
        prompt: all of it as the model reads it.
        ids: its tokens.
        limit: most tokens to emit.
    """

    problem: Problem
    said: tuple[str, ...]
    prompt: str
    ids: tuple[int, ...]
    limit: int

    @property
    def turn(self) -> int:
        """Which prompt of the problem it is, from 0."""
        return len(self.said) // 2

    @property
    def id(self) -> str:
        """The problem's id, with the turn of a conversation, from 1."""
        return turn_id(self.problem, self.turn)


def turn_id(problem: Problem, turn: int) -> str:
    """The id of one turn of a problem; ``turn`` counts from 0."""
    return f"{problem.id}.{turn + 1}" if problem.follow_ups else problem.id


def turn_ids(problem: Problem) -> list[str]:
    """The ids of all its turns."""
    return [turn_id(problem, turn) for turn in range(len(problem.follow_ups) + 1)]


@dataclass(frozen=True)
class Renderer:
    """Makes requests of problems for one target.

    Attributes:
        chat: None for plain prompts.
        target: its name, for messages.
    """

    tokenizer: Any
    geometry: Geometry
    target: str
    max_new_tokens: int
    chat: Chat | None = None

    def first(self, problem: Problem) -> Request:
        """The problem's prompt, or the first of its conversation.

        Raises:
            UserError: it is empty or does not fit into the context, or the tokenizer is not the target's; also when
                the last turn of its conversation might not fit.
        """
        request = self._request(problem, (self._opening(problem),))
        if problem.follow_ups:
            self._check_conversation(request)
        return request

    def follow(self, request: Request, answer: str) -> Request | None:
        """The next turn of a conversation, behind the answer exactly as emitted; None after the last.

        Raises:
            UserError: it does not fit into the context.
        """
        problem, turn = request.problem, request.turn
        if turn == len(problem.follow_ups):
            return None
        return self._request(problem, (*request.said, answer, self._further(problem)[turn]))

    def _opening(self, problem: Problem) -> str:
        return problem.turns[0] if self.chat and problem.turns else problem.prompt

    def _further(self, problem: Problem) -> tuple[str, ...]:
        return problem.turns[1:] if self.chat else problem.follow_ups

    def _ids(self, said: Sequence[str]) -> tuple[str, tuple[int, ...]]:
        prompt = self.chat.render(said) if self.chat else "".join(said)
        # A template writes its special tokens out.
        options = {"add_special_tokens": False} if self.chat else {}
        return prompt, tuple(self.tokenizer(prompt, **options)["input_ids"])

    def _request(self, problem: Problem, said: tuple[str, ...]) -> Request:
        prompt, ids = self._ids(said)
        if not ids:
            raise UserError(f"prompt {problem.id!r} has no tokens; expected a text")
        if max(ids) >= self.geometry.vocab_size:
            raise UserError(
                f"target {self.target}: its tokenizer gives token {max(ids)} for {problem.id}, but it has embeddings "
                f"for {self.geometry.vocab_size}; expected the tokenizer that belongs to it"
            )
        limit = token_limit(len(ids), self.max_new_tokens, self.geometry.context, problem.id)
        return Request(problem, said, prompt, ids, limit)

    def _check_conversation(self, request: Request) -> None:
        further = self._further(request.problem)
        said = (*request.said, *(text for question in further for text in ("", question)))
        needed = len(self._ids(said)[1]) + self.max_new_tokens * len(further)
        if needed >= self.geometry.context:
            raise UserError(
                f"prompt {request.problem.id!r}: its last turn may need {needed} tokens, the target's context is "
                f"{self.geometry.context}; expected fewer --max-new-tokens or a shorter conversation"
            )
