"""Chat models: prompts as messages, rendered by the template that the tokenizer brings."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import Checkpoints
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from ecospec.errors import UserError
from ecospec.harness import runner
from ecospec.harness.chat import Chat, chat_of, template_text
from ecospec.harness.lm_eval_model import EcospecLM
from ecospec.harness.records import AR, read_records
from ecospec.harness.requests import Renderer, Request
from ecospec.harness.target import Geometry
from ecospec.suites import Problem, load_suite

EOS = "<|endoftext|>"
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
ASK = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = TURNS + ASK
THINKING = PLAIN + "{% if add_generation_prompt and SWITCH is defined and not SWITCH %}<think></think>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem here') }}{% endif %}" + PLAIN

USERS_ONLY = "{% for m in messages if m.role == 'user' %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}" + ASK


def thinking_by(name: str) -> str:
    return THINKING.replace("SWITCH", name)


@pytest.fixture
def tokenizer(checkpoints: Checkpoints) -> Any:
    return AutoTokenizer.from_pretrained(checkpoints.target)


def with_template(tokenizer: Any, template: object) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def chat_by(tokenizer: Any, mode: str = "auto", thinking: str = "auto", system: str | None = None) -> Chat | None:
    return chat_of(tokenizer, mode=mode, thinking=thinking, system=system)


def renderer(tokenizer: Any, chat: Chat | None, context: int = 400) -> Renderer:
    return Renderer(tokenizer, Geometry(320, 8, 2, 2, 4, 2, context, 1, 1), "mine", 4, chat)


def conversation(*turns: str) -> Problem:
    return Problem(
        "p-0", f"User: {turns[0]}\n\nAssistant:", (), "", {}, tuple(f"\n\nUser: {t}" for t in turns[1:]), turns
    )


@pytest.mark.parametrize(
    ("template", "mode", "used"),
    [
        (PLAIN, "auto", True),
        (PLAIN, "on", True),
        (PLAIN, "off", False),
        (None, "auto", False),
        (None, "off", False),
        ({"default": PLAIN, "tool_use": "tools"}, "auto", True),
        ({"tool_use": "tools"}, "auto", False),
    ],
)
def test_a_template_is_used_where_there_is_one_and_it_is_wanted(
    tokenizer: Any, template: object, mode: str, used: bool
) -> None:
    chat = chat_by(with_template(tokenizer, template), mode)
    assert (chat is not None) == used
    if chat is not None:
        assert chat.render(["hi"]) == "[user]hi[/][assistant]"
        assert chat.sha256 == hashlib.sha256(PLAIN.encode()).hexdigest()


@pytest.mark.parametrize(
    ("template", "mode", "thinking", "system", "said"),
    [
        (None, "on", "auto", None, "--chat-template on: the target's tokenizer has no chat template"),
        ({"tool_use": "tools"}, "on", "auto", None, "--chat-template on: the target's tokenizer has no chat template"),
        (None, "auto", "off", None, "--thinking off where the target's tokenizer has no chat template"),
        (None, "auto", "auto", "Be brief.", "--system-prompt where the target's tokenizer has no chat template"),
        (PLAIN, "off", "on", None, "--thinking on with --chat-template off"),
        (PLAIN, "off", "auto", "Be brief.", "--system-prompt with --chat-template off"),
        (
            USERS_ONLY,
            "auto",
            "auto",
            "Be brief.",
            "--system-prompt: the target's chat template leaves system messages out",
        ),
        ("hello", "auto", "auto", None, "the target's chat template leaves the user's message out"),
        (PLAIN, "yes", "auto", None, "--chat-template yes: expected auto, on or off"),
        (PLAIN, "auto", "yes", None, "--thinking yes: expected auto, on or off"),
        (PLAIN, "auto", "on", None, "no such switch (enable_thinking or thinking); expected auto"),
        (PLAIN, "auto", "off", None, "no such switch (enable_thinking or thinking); expected auto"),
    ],
)
def test_settings_that_go_with_no_template_are_refused(
    tokenizer: Any, template: object, mode: str, thinking: str, system: str | None, said: str
) -> None:
    with pytest.raises(UserError) as refused:
        chat_by(with_template(tokenizer, template), mode, thinking, system)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_switched_by_the_name_that_the_template_gives_it(tokenizer: Any, name: str) -> None:
    with_template(tokenizer, thinking_by(name))
    prompts = {}
    for thinking in ("auto", "on", "off"):
        chat = chat_by(tokenizer, thinking=thinking)
        assert chat is not None
        assert dict(chat.switches) == ({} if thinking == "auto" else {name: thinking == "on"})
        prompts[thinking] = chat.render(["hi"])
    assert prompts["auto"] == prompts["on"] == "[user]hi[/][assistant]"
    assert prompts["off"] == "[user]hi[/][assistant]<think></think>"


@pytest.mark.parametrize(
    "mention",
    [
        "{% for m in messages %}{% if m.thinking %}{{ m.thinking }}{% endif %}{% endfor %}",
        "{# thinking #}",
        "You are thinking aloud.",
        "{% set enable_thinking = true %}{% if enable_thinking %}<think>{% endif %}",
    ],
)
def test_a_template_that_only_holds_the_word_has_no_switch(tokenizer: Any, mention: str) -> None:
    with_template(tokenizer, PLAIN + mention)
    assert chat_by(tokenizer) is not None
    for thinking in ("on", "off"):
        with pytest.raises(UserError, match="no such switch"):
            chat_by(tokenizer, thinking=thinking)


def test_the_word_elsewhere_does_not_hide_the_switch(tokenizer: Any) -> None:
    with_template(tokenizer, "{% set enable_thinking = 1 %}" + thinking_by("thinking"))
    chat = chat_by(tokenizer, thinking="off")
    assert chat is not None
    assert dict(chat.switches) == {"thinking": False}


def test_a_conversation_is_messages_in_turn_behind_the_system_prompt(tokenizer: Any) -> None:
    chat = chat_by(with_template(tokenizer, PLAIN), system="Be brief.")
    assert chat is not None
    assert chat.render(["a", "b", "c"]) == "[system]Be brief.[/][user]a[/][assistant]b[/][user]c[/][assistant]"


def test_a_last_message_of_the_model_is_gone_on_with(tokenizer: Any) -> None:
    chat = chat_by(with_template(tokenizer, PLAIN))
    assert chat is not None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}]
    assert chat.render_messages(messages, add_generation_prompt=False) == "[user]a[/][assistant]So"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_SYSTEM, "no system here"),
        ("{% if %}", ""),
        ("{{ messages[0].content + 1 }}", ""),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ messages[0].content.missing() }}", ""),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_a_template_that_refuses_its_messages_is_one_line(tokenizer: Any, template: str, reason: str) -> None:
    with pytest.raises(UserError, match="the target's chat template refuses its messages") as refused:
        chat_by(with_template(tokenizer, template), system="Be brief.")
    assert reason in str(refused.value)
    assert "user, or --chat-template off" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_that_takes_no_system_prompt_does_without(tokenizer: Any) -> None:
    chat = chat_by(with_template(tokenizer, NO_SYSTEM))
    assert chat is not None
    assert chat.render(["hi"]) == "[user]hi[/][assistant]"


def test_the_second_prompt_holds_the_first_answer_as_the_models_message(tokenizer: Any) -> None:
    render = renderer(tokenizer, chat_by(with_template(tokenizer, PLAIN)))
    problem = conversation("Why?", "And then?")
    first = render.first(problem)
    assert first.prompt == "[user]Why?[/][assistant]"
    answer = "  Because\n of \t"
    second = render.follow(first, answer)
    assert second is not None
    assert second.prompt == f"[user]Why?[/][assistant]{answer}[/][user]And then?[/][assistant]"
    assert (first.id, second.id, second.turn) == ("p-0.1", "p-0.2", 1)
    assert render.follow(second, "") is None
    plain = renderer(tokenizer, None).first(problem)
    assert plain.prompt == "User: Why?\n\nAssistant:"


def test_one_question_by_itself_is_one_message(tokenizer: Any) -> None:
    render = renderer(tokenizer, chat_by(with_template(tokenizer, PLAIN)))
    assert render.first(Problem("p-0", "2 + 2 =", (), "", {})).prompt == "[user]2 + 2 =[/][assistant]"


def test_a_conversation_that_may_outgrow_the_context_is_refused_with_its_messages(tokenizer: Any) -> None:
    chat = chat_by(with_template(tokenizer, PLAIN))
    assert chat is not None
    needed = len(tokenizer(chat.render(["Why?", "", "And then?"]))["input_ids"]) + 4
    renderer(tokenizer, chat, needed + 1).first(conversation("Why?", "And then?"))
    with pytest.raises(UserError, match=f"its last turn may need {needed} tokens, the target's context is {needed}"):
        renderer(tokenizer, chat, needed).first(conversation("Why?", "And then?"))


def test_a_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    chat = Chat(with_template(tokenizer, "{# nothing #}"))
    with pytest.raises(UserError, match="prompt 'p-0' has no tokens"):
        renderer(tokenizer, chat).first(Problem("p-0", "2 + 2 =", (), "", {}))


def begins_with_bos(tokenizer: Any) -> Any:
    """A tokenizer that puts a special token before every text, with a template that writes it out."""
    token = tokenizer.eos_token_id
    tokenizer.bos_token = EOS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, token)])
    return with_template(tokenizer, "{{ bos_token }}" + PLAIN)


def test_special_tokens_are_not_added_twice(tokenizer: Any) -> None:
    begins_with_bos(tokenizer)
    bos, problem = tokenizer.bos_token_id, Problem("p-0", "2 + 2 =", (), "", {})
    plain = renderer(tokenizer, None).first(problem)
    asked = renderer(tokenizer, chat_by(tokenizer)).first(problem)
    assert plain.ids == (bos, *tokenizer("2 + 2 =", add_special_tokens=False)["input_ids"])
    assert asked.prompt == f"{EOS}[user]2 + 2 =[/][assistant]"
    assert asked.ids == (bos, *tokenizer("[user]2 + 2 =[/][assistant]", add_special_tokens=False)["input_ids"])


@pytest.fixture
def target(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    """Write a copy of the small target whose tokenizer brings a template, as a file of its own or in its config."""

    def written(template: object, name: str = "chat-target") -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoints.target, folder)
        if isinstance(template, str):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        else:
            path = folder / "tokenizer_config.json"
            facts = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**facts, "chat_template": template}), encoding="utf-8")
        return folder

    return written


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Request]:
    """What a run asks of the target, by prompt."""
    found: dict[str, Request] = {}
    real = runner.Bench.generate

    def generate(self: Any, requests: list[Request], *arguments: Any) -> Any:
        found.update((request.id, request) for request in requests)
        return real(self, requests, *arguments)

    monkeypatch.setattr(runner.Bench, "generate", generate)
    return found


SHORT_RUN = ("--policy", "confidence", "--limit", 1, "--max-new-tokens", 4)


def test_the_manifest_says_which_chat_the_prompts_are(
    bench: Callable[..., Any], target: Callable[..., Path], tmp_path: Path
) -> None:
    folder = target(thinking_by("enable_thinking"))
    runs = {
        "auto": (),
        "on": ("--chat-template", "on", "--thinking", "on"),
        "unthinking": ("--thinking", "off"),
        "system": ("--system-prompt", "Be brief."),
        "off": ("--chat-template", "off"),
    }
    facts = {}
    for name, options in runs.items():
        ran = bench("--target", folder, *SHORT_RUN, *options, "--output", name, suite="math500")
        assert ran.code == 0, ran.err
        facts[name] = manifest_of(tmp_path / name)
    unthinking, on = {"enable_thinking": False}, {"enable_thinking": True}
    said = {name: (each["chat_template"], each["chat_switches"], each["system_prompt"]) for name, each in facts.items()}
    assert said == {
        "auto": ("on", {}, None),
        "on": ("on", on, None),
        "unthinking": ("on", unthinking, None),
        "system": ("on", {}, "Be brief."),
        "off": ("off", {}, None),
    }
    hashes = {name: each["prompts_sha256"] for name, each in facts.items()}
    assert hashes["auto"] == hashes["on"]  # this template thinks by itself
    assert len(set(hashes.values())) == 4
    sha256 = hashlib.sha256(thinking_by("enable_thinking").encode()).hexdigest()
    assert facts["auto"]["chat_template_sha256"] == sha256
    assert facts["off"]["chat_template_sha256"] is None


def test_a_target_without_a_template_is_asked_in_plain_text(
    bench: Callable[..., Any], asked: dict[str, Request], tmp_path: Path
) -> None:
    assert bench(*SHORT_RUN, "--output", "out", suite="math500").code == 0
    assert manifest_of(tmp_path / "out")["chat_template"] == "off"
    assert asked["math500-0"].prompt == load_suite("math500", limit=1).problems[0].prompt


def test_a_conversation_is_run_as_messages(
    bench: Callable[..., Any], target: Callable[..., Path], asked: dict[str, Request], tmp_path: Path
) -> None:
    folder = target([{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "tools"}])
    options = ("--policy", "confidence", "--limit", 2, "--batch-size", 2, "--system-prompt", "Be brief.")
    ran = bench("--target", folder, *options, "--output", "out", suite="mtbench")
    assert ran.code == 0, ran.err
    records = read_records(tmp_path / "out" / "prompts.jsonl")
    answers = {record.prompt_id: record.text for record in records if record.method == AR}
    for problem in load_suite("mtbench", limit=2).problems:
        question, further = problem.turns
        first = f"[system]Be brief.[/][user]{question}[/][assistant]"
        assert asked[f"{problem.id}.1"].prompt == first
        second = f"{first}{answers[f'{problem.id}.1']}[/][user]{further}[/][assistant]"
        assert asked[f"{problem.id}.2"].prompt == second


def test_a_run_goes_on_with_the_same_chat_only(bench: Callable[..., Any], target: Callable[..., Path]) -> None:
    options = ("--target", target(thinking_by("thinking")), *SHORT_RUN, "--output", "out")
    assert bench(*options, "--thinking", "off", suite="math500").code == 0
    assert bench(*options, "--thinking", "off", "--resume", suite="math500").code == 0
    for other in ((), ("--thinking", "on"), ("--chat-template", "off"), ("--thinking", "off", "--system-prompt", "S")):
        ran = bench(*options, *other, "--resume", suite="math500")
        assert ran.code == 2
        assert "--resume: out was run with" in ran.err
        assert len([line for line in ran.err.strip().splitlines() if "ecospec-bench: note: " not in line]) == 1


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (PLAIN, ("--thinking", "off"), "no such switch"),
        (PLAIN, ("--chat-template", "yes"), "--chat-template yes"),
        (PLAIN, ("--chat-template", "off", "--system-prompt", "S"), "--system-prompt with --chat-template off"),
        (NO_SYSTEM, ("--system-prompt", "S"), "refuses its messages (no system here)"),
        (None, ("--chat-template", "on"), "has no chat template"),
    ],
)
def test_a_chat_that_cannot_be_ends_in_one_line_before_anything_is_written(
    bench: Callable[..., Any],
    target: Callable[..., Path],
    tmp_path: Path,
    template: str | None,
    options: tuple[str, ...],
    said: str,
) -> None:
    ran = bench("--target", target(template), *SHORT_RUN, *options, "--output", "out", suite="math500")
    assert ran.code == 2
    (line,) = ran.err.strip().splitlines()
    assert line.startswith("ecospec-bench: error: ")
    assert said in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def model(checkpoints: Checkpoints) -> Callable[..., EcospecLM]:
    def loaded(folder: Path, **options: Any) -> EcospecLM:
        return EcospecLM("confidence", target=str(folder), drafter=str(checkpoints.drafter), **options)

    return loaded


def test_lm_eval_asks_by_the_same_template(target: Callable[..., Path], model: Callable[..., EcospecLM]) -> None:
    folder = target(thinking_by("enable_thinking"))
    made = model(folder, thinking="off")
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    chat = chat_by(AutoTokenizer.from_pretrained(folder), thinking="off", system="Be brief.")
    assert chat is not None
    assert made.apply_chat_template(history) == chat.render(["hi"])
    begun = [*history, {"role": "assistant", "content": "So"}]
    gone_on = made.apply_chat_template(begun, add_generation_prompt=False)
    assert gone_on == "[system]Be brief.[/][user]hi[/][assistant]So"
    assert made.chat_template(True) == template_text(made.tokenizer) == thinking_by("enable_thinking")
    assert made.chat_template(False) is None
    assert "/" not in made.tokenizer_name


def test_lm_eval_gets_no_special_token_twice(
    checkpoints: Checkpoints, target: Callable[..., Path], model: Callable[..., EcospecLM]
) -> None:
    folder = target(None)
    begins_with_bos(AutoTokenizer.from_pretrained(checkpoints.target)).save_pretrained(folder)
    made = model(folder)
    bos = made.tokenizer.bos_token_id
    assert made.tok_encode("hi")[0] == bos
    prompt = made.apply_chat_template([{"role": "user", "content": "hi"}])
    assert made.tok_encode(prompt) == [bos, *made.tok_encode(prompt.removeprefix(EOS), add_special_tokens=False)]


def test_lm_eval_is_told_of_a_template_that_is_not_there(
    checkpoints: Checkpoints, model: Callable[..., EcospecLM]
) -> None:
    made = model(checkpoints.target)
    with pytest.raises(UserError, match="the target's tokenizer has no chat template"):
        made.apply_chat_template([{"role": "user", "content": "hi"}])
    for thinking, said in (("off", "no chat template"), ("maybe", "expected auto, on or off")):
        with pytest.raises(UserError, match=said):
            model(checkpoints.target, thinking=thinking)
