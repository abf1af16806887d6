"""ecospec as a model of lm-eval: what a task gets is what plain decoding and plain forward passes give."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from tiny_checkpoints import SHAPE, Checkpoints
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ecospec.errors import UserError
from ecospec.harness.decoding import Generation, StepRecord
from ecospec.harness.lm_eval_model import EcospecLM
from ecospec.harness.records import AR, read_records
from ecospec.suites import Suite, load_suite

SHORT = 64
CONTEXTS = ("Sam has 3 pens", "Answer: 4 + 4 =", "buys 7 more.", "\nQuestion", "Sam Sam Sam")


def rewritten(folder: Path, **facts: Any) -> None:
    """Change entries of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **facts}), encoding="utf-8")


@pytest.fixture(scope="module")
def varied(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small target with large embeddings and a head of its own, so that it does not repeat one token."""
    folder = tmp_path_factory.mktemp("varied") / "target"
    shutil.copytree(checkpoints.target, folder)
    model = AutoModelForCausalLM.from_pretrained(checkpoints.target, dtype=torch.float32)
    digits = AutoTokenizer.from_pretrained(folder)("0123456789 .#")["input_ids"]
    torch.manual_seed(0)
    head = 0.3 * torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    head[digits] *= 2
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(head)
    model.get_input_embeddings().weight.data *= 25
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def short(varied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("short") / "target"
    shutil.copytree(varied, folder)
    rewritten(folder, max_position_embeddings=SHORT)
    return folder


@pytest.fixture
def load(checkpoints: Checkpoints, varied: Path) -> Callable[..., EcospecLM]:
    def loaded(policy: str = "marginal", **options: Any) -> EcospecLM:
        given = {
            "target": str(varied),
            "drafter": str(checkpoints.drafter),
            "predictor": f"learned:path={checkpoints.learned}",
            "max_gen_toks": 12,
            **options,
        }
        return EcospecLM(policy, **given)

    return loaded


def ask(context: str, *, task: str = "mine", doc: int = 0, **settings: Any) -> Instance:
    return Instance("generate_until", {}, (context, settings), 0, (task, doc, 1))


def texts_of(model: EcospecLM, requests: Sequence[Instance]) -> list[str]:
    return model.generate_until(list(requests), disable_tqdm=True)


def pairs(model: EcospecLM, *asked: tuple[str, str]) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, 0, ("mine", i, 1)) for i, pair in enumerate(asked)]
    return model.loglikelihood(requests, disable_tqdm=True)


def rolling(model: EcospecLM, *asked: str) -> list[float]:
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0, ("mine", i, 1)) for i, text in enumerate(asked)]
    return model.loglikelihood_rolling(requests, disable_tqdm=True)


class Plain:
    """The library's own model and tokenizer in float64, one forward pass for every token."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    @torch.no_grad()
    def logits(self, context: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=torch.tensor([list(context)])).logits[0, -1]
        return logits

    def log_p(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        behind = [[*context, *tokens[:i]] for i in range(len(tokens))]
        each = zip(behind, tokens, strict=True)
        return float(sum(self.logits(before).log_softmax(-1)[token] for before, token in each))

    def greedy(self, context: Sequence[int], count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(int(self.logits([*context, *tokens]).argmax()))
        return tokens

    def greedy_continuations(self, count: int = 3) -> Iterator[tuple[str, str]]:
        """Contexts with what greedy decoding gives, where its text is read as the same tokens again."""
        for context in CONTEXTS:
            ids = self.encode(context)
            tokens = self.greedy(ids, count)
            text = self.tokenizer.decode(tokens)
            if self.encode(context + text) == [*ids, *tokens]:
                yield context, text


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"until": ["5", "Question:"]},
    {"until": "0", "max_gen_toks": 20},
    {"max_gen_toks": 3, "do_sample": False},
    {"do_sample": True, "temperature": 1.0},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_gen_toks": 7},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "until": [" "]},
)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["confidence", "marginal"])
def test_text_is_that_of_plain_decoding(load: Callable[..., EcospecLM], policy: str, batch_size: int) -> None:
    requests = [ask(CONTEXTS[i % 3], doc=i, **kind) for i, kind in enumerate(KINDS * 2)]
    plain = load(AR)
    expected = [texts_of(plain, [request])[0] for request in requests]
    assert len(set(expected)) > len(KINDS)
    model = load(policy, batch_size=batch_size)
    assert texts_of(model, requests) == expected
    steps = [step for generation in model.generations for step in generation.steps]
    assert max(step.selected for step in steps) > 1
    assert max(step.rows for step in steps) == batch_size


def test_greedy_text_is_the_librarys(load: Callable[..., EcospecLM], varied: Path) -> None:
    plain = Plain(varied)
    model = load(batch_size=5)
    texts = texts_of(model, [ask(context, doc=i) for i, context in enumerate(CONTEXTS)])
    expected = [plain.greedy(plain.encode(context), 12) for context in CONTEXTS]
    assert [generation.tokens for generation in model.generations] == expected
    assert texts == [plain.tokenizer.decode(tokens) for tokens in expected]


def test_a_stop_sequence_is_cut_off_with_all_behind_it(load: Callable[..., EcospecLM]) -> None:
    model = load()
    (whole,) = texts_of(model, [ask("Sam has")])
    stop = whole[5:7]
    assert whole.index(stop) > 0
    for until in (stop, [stop], ["never to be seen", stop], [stop, ""]):
        assert texts_of(model, [ask("Sam has", until=until)]) == [whole[: whole.index(stop)]]


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
def test_a_task_says_how_many_tokens_or_else_the_model_does(load: Callable[..., EcospecLM], name: str) -> None:
    model = load(max_gen_toks=9)
    texts_of(model, [ask("Sam", **{name: 4}), ask("Sam"), ask("Sam", **{name: 11})])
    assert [len(generation.tokens) for generation in model.generations] == [4, 9, 11]


def test_an_output_ends_with_the_context(load: Callable[..., EcospecLM], short: Path) -> None:
    model = load(target=str(short), max_gen_toks=100)
    texts_of(model, [ask("1" * 60)])
    assert len(model.generations[0].tokens) == SHORT - 60


def test_a_text_without_a_context_follows_the_prefix_token(load: Callable[..., EcospecLM], varied: Path) -> None:
    plain = Plain(varied)
    for policy in (AR, "marginal"):
        (text,) = texts_of(load(policy), [ask("")])
        assert text == plain.tokenizer.decode(plain.greedy([plain.tokenizer.eos_token_id], 12))


def test_sampled_text_is_that_of_a_run_with_the_same_seed(
    load: Callable[..., EcospecLM], bench: Callable[..., Any], varied: Path, tmp_path: Path
) -> None:
    options = ("--temperature", 0.8, "--top-p", 0.95, "--top-k", 60, "--seed", 5, "--policy", "confidence")
    ran = bench(*options, "--target", varied, "--limit", 3, "--output", "out", suite="math500")
    assert ran.code == 0, ran.err
    records = read_records(tmp_path / "out" / "prompts.jsonl")
    expected = [record.text for record in records if record.method == AR]
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 60}
    requests = [
        ask(problem.prompt, task="math500", doc=i, until=list(problem.stop), **sampling)
        for i, problem in enumerate(load_suite("math500", limit=3).problems)
    ]
    assert texts_of(load(seed=5), requests) == expected
    assert texts_of(load(seed=5, batch_size=3), requests) == expected
    assert texts_of(load(AR, seed=5), requests) == expected
    others = texts_of(load(seed=6), requests)
    assert all(other != text for other, text in zip(others, expected, strict=True))


def test_repetitions_differ_when_sampled_and_are_equal_when_not(load: Callable[..., EcospecLM]) -> None:
    model = load()
    sampled = [ask("Sam has", doc=doc, do_sample=True, temperature=1.0) for doc in (0, 0, 1, 0, 1)]
    texts = texts_of(model, sampled)
    assert len(set(texts)) == 5
    assert texts_of(model, sampled) == texts
    assert texts_of(model, [sampled[0], sampled[2]]) == [texts[0], texts[2]]
    assert len(set(texts_of(model, [ask("Sam has")] * 3))) == 1


@pytest.mark.parametrize(
    ("settings", "sampled"),
    [
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "do_sample": False}, False),
        ({"temperature": 0.0, "do_sample": True}, False),
        ({"do_sample": True}, False),
        ({"temperature": 0.0}, False),
    ],
)
def test_text_is_sampled_where_the_task_means_it(
    load: Callable[..., EcospecLM], settings: dict[str, Any], sampled: bool
) -> None:
    greedy, text = texts_of(load(), [ask("Sam has"), ask("Sam has", doc=1, **settings)])
    assert (text != greedy) == sampled


def test_log_likelihoods_are_those_of_the_librarys_model(load: Callable[..., EcospecLM], varied: Path) -> None:
    plain = Plain(varied)
    asked = [(context, continuation) for context in CONTEXTS for continuation in ("\n#### 7", " pens and", "q")]
    for (context, continuation), (found, greedy) in zip(asked, pairs(load(), *asked), strict=True):
        ids, whole = plain.encode(context), plain.encode(context + continuation)
        assert found == pytest.approx(plain.log_p(ids, whole[len(ids) :]), rel=1e-5)
        assert not greedy


def test_log_likelihood_without_a_context_is_that_behind_the_prefix_token(
    load: Callable[..., EcospecLM], varied: Path
) -> None:
    plain = Plain(varied)
    end = plain.tokenizer.eos_token_id
    tokens = plain.encode("Sam has 3")
    ((found, _),) = pairs(load(), ("", "Sam has 3"))
    assert found == pytest.approx(plain.log_p([end], tokens), rel=1e-5)
    ((again, _),) = pairs(load(), ("", f"{plain.tokenizer.eos_token}Sam has 3"))
    assert again == pytest.approx(found, rel=1e-5)


def test_a_continuation_of_no_tokens_is_certain(load: Callable[..., EcospecLM]) -> None:
    model = load()
    assert pairs(model, ("", model.tokenizer.eos_token)) == [(0.0, True)]


def test_spaces_at_the_end_of_a_context_count_with_the_continuation(
    load: Callable[..., EcospecLM], varied: Path
) -> None:
    plain = Plain(varied)
    ids, whole = plain.encode("Sam has"), plain.encode("Sam has 3 pens")
    assert whole[: len(ids)] == ids
    ((found, _),) = pairs(load(), ("Sam has ", "3 pens"))
    assert found == pytest.approx(plain.log_p(ids, whole[len(ids) :]), rel=1e-5)


def test_what_greedy_decoding_gives_is_greedy_and_nothing_else(load: Callable[..., EcospecLM], varied: Path) -> None:
    plain = Plain(varied)
    found = list(plain.greedy_continuations())
    assert found
    model = load()
    for context, continuation in found:
        last = "7" if continuation[-1] != "7" else "8"
        first = "7" if continuation[0] != "7" else "8"
        others = [first + continuation[1:], continuation[:-1] + last]
        answers = pairs(model, (context, continuation), *((context, other) for other in others))
        assert [greedy for _, greedy in answers] == [True, False, False]


def test_a_context_that_is_too_long_is_cut_from_its_front(load: Callable[..., EcospecLM], short: Path) -> None:
    plain = Plain(short)
    context, continuation = "\nQuestion: Sam has 3 pens and buys 4 more." * 8, "\n#### 7"
    whole = plain.encode(context + continuation)
    tokens = whole[len(plain.encode(context)) :]
    assert len(whole) > SHORT + len(tokens)
    kept = whole[-(SHORT + 1) :][: -len(tokens)]
    ((found, _), (longer, _)) = pairs(
        load(target=str(short)), (context, continuation), (f"1 2 3 4 {context}", continuation)
    )
    assert found == pytest.approx(plain.log_p(kept, tokens), rel=1e-5)
    assert longer == found


def test_a_continuation_may_fill_the_context_but_not_be_longer(load: Callable[..., EcospecLM], short: Path) -> None:
    plain = Plain(short)
    model = load(target=str(short))
    digits = "31415926535" * 10
    ((found, _),) = pairs(model, ("Sam has", digits[:SHORT]))
    tokens = plain.encode(digits[:SHORT])
    assert len(tokens) == SHORT
    assert found == pytest.approx(plain.log_p(plain.encode("Sam has")[-1:], tokens), rel=1e-5)
    with pytest.raises(UserError, match=rf"a continuation has 65 tokens; expected at most .* context of {SHORT}"):
        pairs(model, ("Sam has", digits[: SHORT + 1]))


@pytest.mark.parametrize("tokens", [1, SHORT - 1, SHORT, SHORT + 1, 2 * SHORT, 150])
def test_a_text_is_scored_in_windows_of_the_context(load: Callable[..., EcospecLM], short: Path, tokens: int) -> None:
    plain = Plain(short)
    text = ("Sam has 3 pens and buys 4 more." * 20)[:tokens]
    while len(plain.encode(text)) < tokens:
        text += str(len(text) % 10)
    ids = plain.encode(text)
    assert len(ids) == tokens
    expected = 0.0
    for i, token in enumerate(ids):
        end = min((i // SHORT + 1) * SHORT, len(ids))  # the last window reaches back to be as long as the others
        before = [plain.tokenizer.eos_token_id, *ids[:i]] if i < SHORT else ids[end - SHORT - 1 : i]
        assert len(before) <= SHORT
        expected += plain.log_p(before, [token])
    (found,) = rolling(load(target=str(short)), text)
    assert found == pytest.approx(expected, rel=1e-5)


def rows_with_some_right(load: Callable[..., EcospecLM], path: Path) -> Suite:
    """Rows of which the first two ask for the last number of the model's own text, and the third for another."""
    questions = [f"Sam has {n} pens and buys {n + 2} more. How many are there?" for n in (3, 5, 8)]

    def written(answers: Sequence[str]) -> Suite:
        rows = [{"question": q, "answer": f"Some.\n#### {a}"} for q, a in zip(questions, answers, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return load_suite("gsm8k", data=path)

    problems = written(["1", "1", "1"]).problems
    texts = texts_of(load(AR), [ask(each.prompt, until=list(each.stop)) for each in problems])
    right = [re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)[-1] for text in texts]
    return written([*right[:2], "123456"])


def test_lm_evals_score_of_a_suite_is_that_of_a_run(
    load: Callable[..., EcospecLM], bench: Callable[..., Any], varied: Path, tmp_path: Path
) -> None:
    suite = rows_with_some_right(load, tmp_path / "rows.jsonl")
    found = lm_eval.simple_evaluate(
        model=load(batch_size=3),
        tasks=[suite.task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    ran = bench("--target", varied, "--data", "rows.jsonl", "--policy", "confidence", "--limit", 3, "--output", "out")
    assert ran.code == 0, ran.err
    rows = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["rows"]
    score = found["results"]["gsm8k"]["exact_match,flexible-extract"]
    assert [row["score"] for row in rows] == [score, score]
    assert score == pytest.approx(2 / 3)
    records = read_records(tmp_path / "out" / "prompts.jsonl")
    samples = [sample for sample in found["samples"]["gsm8k"] if sample["filter"] == "flexible-extract"]
    texts = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
    assert texts == {int(r.prompt_id.removeprefix("gsm8k-")): r.text for r in records if r.method == AR}
    assert found["config"]["ecospec_policy"] == "marginal-cost"


def test_the_model_says_what_it_is(load: Callable[..., EcospecLM], varied: Path) -> None:
    model = load("marginal:epsilon=0.5", budget=5)
    about = {
        "ecospec_policy": "marginal-cost:epsilon=0.5",
        "ecospec_target": str(varied),
        "ecospec_budget": 5,
        "ecospec_acceptance_length": None,
    }
    assert model.get_model_info() == about
    steps = [[StepRecord(emitted, 5, 9, {}) for emitted in each] for each in ((3, 1), (4, 2, 1))]
    model.generations = [Generation([], "", "", 0.0, 0.0, each) for each in steps]
    assert model.get_model_info() == {**about, "ecospec_acceptance_length": 11 / 5}
    plain = load(AR)
    texts_of(plain, [ask("Sam")])
    assert plain.get_model_info()["ecospec_policy"] == AR
    assert plain.get_model_info()["ecospec_acceptance_length"] == 1.0


def test_lm_eval_makes_the_model_by_its_name(checkpoints: Checkpoints, varied: Path) -> None:
    given = f"policy=confidence,target={varied},drafter={checkpoints.drafter},budget=3,max_gen_toks=5"
    made = get_model("ecospec").create_from_arg_string(
        given, {"batch_size": "2", "max_batch_size": None, "device": None}
    )
    assert isinstance(made, EcospecLM)
    assert (made.config.batch_size, made.config.budget, made.label) == (2, 3, "confidence")
    assert len(texts_of(made, [ask("Sam"), ask("has", doc=1)])) == 2


def test_answers_are_handed_to_lm_evals_cache(load: Callable[..., EcospecLM]) -> None:
    kept: list[tuple[str, Any, Any]] = []

    class Hook:
        def add_partial(self, kind: str, request: Any, answer: Any) -> None:
            kept.append((kind, request, answer))

    model = load()
    model.set_cache_hook(Hook())
    requests = [ask("Sam", until=["5"]), ask("has", doc=1, max_gen_toks=3)]
    texts = texts_of(model, requests)
    pair, whole = ("Sam", " has"), "Sam has"
    (likelihood,), (total,) = pairs(model, pair), rolling(model, whole)
    assert kept == [
        *(("generate_until", request.args, text) for request, text in zip(requests, texts, strict=True)),
        ("loglikelihood", pair, likelihood),
        ("loglikelihood_rolling", (whole,), total),
    ]


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("marginal", {"tempo": 1}, "EcospecLM has no option 'tempo'; expected one of target, drafter"),
        ("marginal", {"batch_size": "auto"}, "batch_size 'auto': expected an integer"),
        ("marginal", {"batch_size": 2.5}, "batch_size 2.5: expected an integer"),
        ("marginal", {"batch_size": None}, "batch_size None: expected an integer"),
        ("marginal", {"seed": "x"}, "seed 'x': expected an integer"),
        ("marginal", {"batch_size": 0}, "--batch-size 0: expected an integer of at least 1"),
        ("marginal", {"budget": 0}, "--budget 0"),
        ("marginal", {"max_gen_toks": 0}, "--max-new-tokens 0"),
        ("marginal", {"drafter": None}, "--drafter"),
        ("marginal", {"predictor": "learnd"}, "did you mean 'learned'"),
        ("margnal", {}, "did you mean 'marginal'"),
        ("marginal:epsilom=1", {}, "epsilon"),
        ("ar", {}, "'ar'"),
    ],
)
def test_a_wrong_option_is_a_mistake_of_the_user(
    load: Callable[..., EcospecLM], policy: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        load(policy, **options)


def test_a_prompt_longer_than_the_context_is_named(load: Callable[..., EcospecLM], short: Path) -> None:
    model = load(target=str(short))
    with pytest.raises(UserError, match=rf"prompt 'mine-3' has {SHORT} tokens; .* context of {SHORT}"):
        texts_of(model, [ask("Sam"), ask("1" * SHORT, doc=3)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": 1.0, "top_p": 2.0}, "top-p 2.0"),
        ({"temperature": 1.0, "top_k": -3}, "top-k -3"),
        ({"max_gen_toks": 0}, "max_gen_toks 0: expected an integer of at least 1"),
        ({"max_gen_toks": -1}, "max_gen_toks -1"),
        ({"max_gen_toks": "x"}, "do not fit: invalid literal"),
        ({"temperature": "x"}, "do not fit: could not convert"),
        ({"temperature": 1.0, "top_p": 0}, "top-p 0.0: expected a number above 0"),
        ({"temperature": 1.0, "top_p": "x"}, "do not fit: could not convert"),
        ({"until": [5]}, "do not fit: until holds something that is no text"),
        ({"num_beams": 4}, "do not fit: num_beams is not supported"),
    ],
)
def test_settings_of_a_task_that_cannot_be_are_refused(
    load: Callable[..., EcospecLM], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        texts_of(load(), [ask("Sam", do_sample=True, **settings)])


def test_numbers_may_be_given_as_text(load: Callable[..., EcospecLM]) -> None:
    """As lm-eval hands on what was typed."""
    model = load(budget="3", draft_topk="2", batch_size="2", max_gen_toks="5")
    assert (model.config.budget, model.config.batch_size, model.config.max_new_tokens) == (3, 2, 5)


def test_half_of_a_surrogate_pair_is_no_text(load: Callable[..., EcospecLM]) -> None:
    with pytest.raises(UserError, match="cannot be tokenized"):
        texts_of(load(), [ask("Sam \ud800")])
