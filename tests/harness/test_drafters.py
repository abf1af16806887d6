"""The drafter hook: somebody else's drafter end to end, what is refused of one, and what ``--drafter`` takes."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_deepseek
import torch
from tiny_backbones import write_backbone
from tiny_checkpoints import SHAPE, Checkpoints
from tiny_drafters import PROMPT, Batch, Bound, right, target_of
from tiny_models import random_tokens, run_ar, run_speculative, tiny_head, tiny_predictor, tiny_target

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling
from ecospec.harness.decoding import Speculation
from ecospec.harness.drafters.builtin import Eagle3, LanguageModel, Mtp, Ngram
from ecospec.harness.drafters.contract import BoundDrafter, Drafter, DrafterTarget
from ecospec.harness.drafters.heads import BoundEagle3
from ecospec.harness.drafters.loading import create_drafter, load_drafter
from ecospec.harness.drafting import DrafterSession
from ecospec.harness.loading import LoadedTarget, load_target, target_view
from ecospec.harness.plugins import load_plugins
from ecospec.policies import Confidence, MarginalCost, hookimpl
from ecospec.predictors.token_frequency import build_table, save_table

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"


@pytest.fixture(scope="module")
def guide() -> Iterator[Any]:
    """The code in docs/drafters.md, as a module."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    module = types.ModuleType("their_drafters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "their_drafters", module)  # where dataclasses look up annotations
        exec(code, vars(module))
        yield module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a module as a plugin with an entry point."""

    def install(module: types.ModuleType) -> None:
        monkeypatch.setitem(sys.modules, "their_drafters", module)
        point = importlib.metadata.EntryPoint("theirs", "their_drafters", "ecospec")
        points = importlib.metadata.EntryPoints([point])
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **wanted: points)
        monkeypatch.setenv("ECOSPEC_PLUGINS", "theirs")

    return install


def test_somebody_elses_drafter_decodes_what_plain_decoding_does(guide: Any) -> None:
    target, bound = target_of(guide.Repeat())
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        method = Speculation(MarginalCost(), bound, 4, 3, 2, tiny_predictor(target), drafter_name="repeat")
        plain = run_ar(target, PROMPT, sampling, n=60)
        ours = run_speculative(target, method, PROMPT, sampling, n=60)
        assert ours.tokens == plain.tokens
    greedy = run_speculative(target, Speculation(Confidence(), bound, 4, 3, 2), PROMPT, n=60)
    assert len(greedy.steps) < 59  # some of it was right


def test_it_is_listed_and_run_from_the_command_line(
    guide: Any,
    installed: Callable[..., None],
    bench: Callable[..., Any],
    command: Callable[..., Any],
    tmp_path: Path,
) -> None:
    installed(guide)
    ran = bench("--policy", "marginal,confidence", "--drafter", "repeat:chance=0.25", "--output", "out")
    assert (ran.code, ran.err) == (0, "")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["drafter"], manifest["drafter_spec"]) == ("repeat:chance=0.25", "repeat:chance=0.25")
    assert manifest["drafter_sha256"] is None
    verdicts = {json.loads(line)["verdict"] for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()}
    assert verdicts == {"exact"}
    listed = command("plugins").out
    for name in ("eagle3", "mtp", "lm", "ngram", "repeat"):
        assert f"│ {name} " in listed or f" {name} " in listed
    assert "The last tokens again, as a chain." in listed


def test_a_broken_class_is_left_out_and_named(guide: Any, installed: Callable[..., None]) -> None:
    class Nameless(guide.Repeat):  # type: ignore[misc]
        pass

    class Taken(guide.Repeat):  # type: ignore[misc]
        name = "ngram"

    module = types.ModuleType("their_drafters")
    classes = [Nameless, Taken, guide.Repeat]
    module.ecospec_drafters = hookimpl(lambda: classes, specname="ecospec_drafters")  # type: ignore[attr-defined]
    installed(module)
    plugins = load_plugins()
    assert "repeat" in plugins.drafters
    said = [str(each) for each in plugins.broken]
    assert any("Nameless" in each and "has no name of its own" in each for each in said)
    assert any("the drafter name 'ngram' of" in each and "is already taken by ecospec" in each for each in said)
    with pytest.raises(UserError, match="Taken of plugin 'theirs'"):
        create_drafter(plugins, "ngram")


# --- states and features that are asked for


def test_a_drafter_gets_the_features_it_asks_for_and_what_was_emitted() -> None:
    """Tokens and states line up: the state in a row is the target's of the token before the row's."""
    target = tiny_target(vocab_size=8, feature_layers=())
    seen: list[tuple[list[int], torch.Tensor]] = []

    class Noting(Batch):
        def start(self, index: int, tokens: Sequence[int], features: Any) -> None:
            seen.append((list(tokens), features))

        def extend(self, blocks: Sequence[Sequence[int]], features: Sequence[Any]) -> None:
            seen.append((list(blocks[0]), features[0]))

    class Wanting(Bound):
        features = (1, "final")

    class Mine(Drafter):
        name = "mine"

        def bind(self, found: DrafterTarget) -> BoundDrafter:
            assert (found.vocab_size, found.hidden_size, found.layers) == (8, 32, 3)
            assert found.head(found.final_norm(found.embedding)).shape == (8, 8)
            return Wanting(lambda: Noting(right))

    bound = load_drafter(Mine(), LoadedTarget(target, None, "target", 1, Path("target")), None)
    found = run_speculative(target, Speculation(Confidence(), bound, 4, 3, 2), PROMPT, n=30)
    text = [*PROMPT, *found.tokens]
    assert [token for tokens, _ in seen for token in tokens] == text[: sum(len(tokens) for tokens, _ in seen)]
    given = torch.cat([features for _, features in seen])
    whole = target.new_session(80).prefill(text).features[: len(given)]
    assert given.shape[1] == 64
    torch.testing.assert_close(given, whole, atol=1e-4, rtol=1e-4)


def test_a_bare_head_and_a_bound_one_draft_the_same() -> None:
    target, head = tiny_target(vocab_size=8), tiny_head(target_vocab=8)
    sampled = Sampling(temperature=1.0, seed=3)
    found = [
        run_speculative(target, Speculation(Confidence(), drafter, 4, 3, 2), PROMPT, sampled)
        for drafter in (head, BoundEagle3(head, target.embedding))
    ]
    assert found[0].tokens == found[1].tokens
    assert [s.emitted for s in found[0].steps] == [s.emitted for s in found[1].steps]


def test_a_head_is_given_each_token_with_the_state_before_it() -> None:
    target, head = tiny_target(), tiny_head()
    text = random_tokens(np.random.default_rng(2), 9)
    features = target.new_session(20).prefill(text[:-1]).features
    by_hand = DrafterSession(head, target.embedding, 40)
    by_hand.extend(text[1:], features)
    batch = BoundEagle3(head, target.embedding).open([40])
    batch.start(0, text, features)
    ours, theirs = batch.draft([text[-1]], [3], 2)[0], by_hand.draft(text[-1], 3, 2)
    assert np.array_equal(ours.tokens, theirs.tokens)
    assert np.array_equal(ours.probs, theirs.probs)
    states = batch.node_states(0)
    assert states is not None
    assert torch.equal(states(ours).states, by_hand.node_states(theirs).states)


# --- what the user types


def test_a_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ngram", "mine"):
        (tmp_path / name).mkdir()
    plugins = load_plugins()
    assert create_drafter(plugins, None) == Eagle3()
    assert create_drafter(plugins, "ngram") == Ngram()
    assert create_drafter(plugins, "ngram:longest=5") == Ngram(5)
    assert create_drafter(plugins, "./ngram") == Eagle3(Path("ngram"))
    assert create_drafter(plugins, "mine") == Eagle3(Path("mine"))
    assert create_drafter(plugins, "some/where") == Eagle3(Path("some/where"))
    assert create_drafter(plugins, "eagle3:path=mine") == Eagle3(Path("mine"))
    assert create_drafter(plugins, "mtp") == Mtp()
    assert create_drafter(plugins, "lm:path=a/b") == LanguageModel(Path("a/b"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ngrm", "unknown drafter 'ngrm': did you mean 'ngram'?"),
        ("ngrm", "or the folder of an EAGLE-3 head"),
        ("ngram:longst=3", "drafter 'ngram' has no parameter 'longst': did you mean 'longest'?"),
        ("ngram:longest=0", "drafter 'ngram': longest must be from 1 to 64, got 0"),
        ("ngram:longest=1000000000000", "longest must be from 1 to 64, got 1000000000000"),
        ("ngram:longest=x", "longest is 'x', expected int"),
        ("lm", "drafter 'lm' needs path: write lm:path=<Path>"),
        ("eagle3", "drafter 'eagle3': no head belongs to this target"),
        ("mtp", "it has no multi-token-prediction layer (no tensor model.layers.3.*)"),
        ("./ngram", "drafter ./ngram: no such folder"),
        ("lm:path=nothing/at/all", "drafter nothing/at/all: no such folder"),
    ],
)
def test_what_cannot_draft_is_one_line(given: str, said: str, bench: Callable[..., Any]) -> None:
    ran = bench("--drafter", given, "--policy", "confidence")
    assert ran.code == 2
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_feature_predictor_beside_a_drafter_without_states_is_one_line(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = command("--suite", "gsm8k", "--limit", 1, "--drafter", "ngram", "--widen", 1)
    assert ran.code == 2
    assert len(ran.err.strip().splitlines()) == 1
    assert "it was trained on the states of an EAGLE-3 head, which drafter 'ngram' has not" in ran.err
    assert "such as learned" in ran.err


@pytest.mark.parametrize("predictor", ["learned", "token-frequency"])
def test_prompt_lookup_runs_end_to_end_in_a_batch(
    predictor: str, bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = {"learned": checkpoints.learned, "token-frequency": checkpoints.token_frequency}[predictor]
    chosen = ("--predictor", f"{predictor}:path={folder}")
    ran = bench("--drafter", "ngram:longest=2", "--batch-size", 2, "--policy", "marginal", "--output", "out", *chosen)
    assert (ran.code, ran.err) == (0, "")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["drafter_spec"], manifest["feature_layers"]) == ("ngram:longest=2", [])


def test_a_language_model_runs_end_to_end(bench: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = write_backbone(tmp_path / "small", "llama", vocab_size=SHAPE.vocab_size, positions=4096)
    for path in checkpoints.target.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    ran = bench("--drafter", f"lm:path={folder}", "--policy", "marginal", "--output", "out")
    assert (ran.code, ran.err) == (0, "")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["drafter_spec"] == f"lm:path={folder}"
    assert len(manifest["drafter_sha256"]) == 64
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    again = bench("--drafter", f"lm:path={folder}", "--policy", "marginal", "--output", "out", "--resume")
    assert again.code == 2
    assert "was run with drafter_sha256 = " in again.err


def test_the_targets_own_layer_runs_end_to_end(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecospec.harness.runner.copy_bandwidth", lambda device: 2.0e10)
    target = tiny_deepseek.write_deepseek(tmp_path / "target", max_position_embeddings=4096)
    table = tmp_path / "table"
    view = target_view(load_target(str(target), dtype=torch.float32, device="cpu").target)
    counts = np.random.default_rng(0).integers(0, 9, (view.vocab_size, view.moe_layers, view.experts))
    save_table(table, build_table(counts, view.top_k), view)
    common = ("--suite", "aime25", "--data", "embedded", "--limit", 1, "--max-new-tokens", 12, "--target", target)
    chosen = ("--drafter", "mtp", "--predictor", f"token-frequency:path={table}", "--output", "out")
    ran = command(*common, *chosen, "--policy", "marginal")
    assert (ran.code, ran.err) == (0, "")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["drafter_spec"], manifest["feature_layers"]) == ("mtp", ["final"])


def test_training_a_feature_predictor_wants_a_head(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "Sam has 3 pens. " * 40}) + "\n")
    ran = command(
        "train", "predictor", "--kind", "feature", "--target", checkpoints.target, "--drafter", "ngram",
        "--corpus", "corpus.jsonl", "--output", "trained", "--steps", 1,
    )  # fmt: skip
    assert ran.code == 2
    assert "drafter ngram: no config.json; expected an EAGLE-3 head's folder" in ran.err.strip().splitlines()[-1]


def test_predictors_are_judged_beside_any_drafter(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    common = ("--target", checkpoints.target)
    text = ("--suite", "gsm8k", "--data", "embedded", "--limit", 2, "--max-new-tokens", 12, "--output", "trace")
    assert command("trace", *common, *text).code == 0
    learned = ("--predictor", f"learned:path={checkpoints.learned}")
    ran = command("evaluate", "--trace", "trace", *common, "--drafter", "ngram", *learned, "--trees", 2)
    assert (ran.code, ran.err) == (0, "")
    assert "marginal cost of a selected node" in ran.out
