"""How a prompt reaches a chat model: as messages, rendered by the template that its tokenizer brings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ecospec.errors import UserError, one_line

AUTO, ON, OFF = "auto", "on", "off"
MODES = (AUTO, ON, OFF)
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking on and off."""


@dataclass(frozen=True)
class Chat:
    """A template with its settings.

    Attributes:
        system: the system prompt; None for none of ours.
        switches: variables given to the template, such as enable_thinking.
    """

    tokenizer: Any
    system: str | None = None
    switches: tuple[tuple[str, bool], ...] = ()

    def render(self, said: Sequence[str]) -> str:
        """The prompt for the model's next message.

        Args:
            said: what user and model have said in turn, the user first and last.

        Raises:
            UserError: the template refuses it.
        """
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        return self.render_messages(messages)

    def render_messages(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Messages with a role and content each; the last is the model's to go on with, or to answer.

        Raises:
            UserError: the template refuses them.
        """
        ending = {"add_generation_prompt": True} if add_generation_prompt else {"continue_final_message": True}
        try:
            prompt: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **ending, **dict(self.switches))
        except Exception as error:  # a template is a program of somebody else's
            reason = one_line(error) or type(error).__name__
            raise UserError(
                f"the target's chat template refuses its messages ({reason}); expected a template for "
                f"{', '.join(dict.fromkeys(message['role'] for message in messages))}, or --chat-template off"
            ) from error
        return prompt

    @property
    def sha256(self) -> str:
        """SHA-256 of the template's text."""
        return hashlib.sha256(template_text(self.tokenizer).encode()).hexdigest()


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, of several the one called default; empty where there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return str(template.get("default", "")) if isinstance(template, dict) else str(template)


def chat_of(tokenizer: Any, *, mode: str, thinking: str, system: str | None) -> Chat | None:
    """The chat template to use, or None for plain prompts.

    Args:
        mode: on, off, or auto for on where the tokenizer has a template.
        thinking: on, off, or auto for what the template does by itself.

    Raises:
        UserError: a value is none of these, there is no such template, it has no such switch, or it
            refuses the question that is to find one.
    """
    for name, value in (("chat-template", mode), ("thinking", thinking)):
        if value not in MODES:
            raise UserError(f"--{name} {value}: expected {', '.join(MODES[:-1])} or {MODES[-1]}")
    text = template_text(tokenizer)
    if mode == ON and not text:
        raise UserError("--chat-template on: the target's tokenizer has no chat template; expected auto or off")
    if mode == OFF or not text:
        why = "with --chat-template off" if text else "where the target's tokenizer has no chat template"
        if thinking != AUTO:
            raise UserError(f"--thinking {thinking} {why}: only a chat template has such a switch; expected auto")
        if system is not None:
            raise UserError(f"--system-prompt {why}: plain prompts have no place for it; expected none")
        return None
    if Chat(tokenizer).render(["?"]) == Chat(tokenizer).render(["!"]):
        raise UserError("the target's chat template leaves the user's message out; expected --chat-template off")
    if system is not None and Chat(tokenizer, system).render(["?"]) == Chat(tokenizer).render(["?"]):
        raise UserError("--system-prompt: the target's chat template leaves system messages out; expected none")
    if thinking == AUTO:
        return Chat(tokenizer, system)
    found = next((name for name in THINKING_SWITCHES if _switches(tokenizer, system, name)), None)
    if found is None:
        raise UserError(
            f"--thinking {thinking}: the target's chat template has no such switch "
            f"({' or '.join(THINKING_SWITCHES)}); expected auto"
        )
    return Chat(tokenizer, system, ((found, thinking == ON),))


def _switches(tokenizer: Any, system: str | None, name: str) -> bool:
    """Whether a prompt depends on this variable; a template may hold its name and mean something else."""
    prompts = {Chat(tokenizer, system, ((name, value),)).render(["?"]) for value in (True, False)}
    return len(prompts) > 1
