"""Whatever a drafter of somebody else's does or gives back ends in one line with its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_drafters import PROMPT, Batch, Bound, chain, right, target_of
from tiny_models import rule_for, run_ar, run_speculative, tiny_target

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_speculative_batch
from ecospec.harness.drafters.asking import AskedDrafts, DrafterError
from ecospec.harness.drafters.builtin import Ngram
from ecospec.harness.drafters.contract import BoundDrafter, DraftBatch, Drafter, DrafterTarget
from ecospec.policies import Confidence, DraftTree, MarginalCost
from ecospec.predictors.contract import BoundPredictor, PredictorSession


def refusal(opened: Callable[[], Any]) -> str:
    """What decoding two requests with this drafter ends with."""
    target = tiny_target(vocab_size=8, feature_layers=())
    method = Speculation(Confidence(), Bound(opened), 4, 3, 2, drafter_name="mine")
    streams = [Stream(PROMPT, TokenChooser(Sampling(), "r"), rule_for(PROMPT, n)) for n in (9, 12)]
    with pytest.raises(DrafterError) as refused:
        decode_speculative_batch(target, method, streams)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith("drafter 'mine'")
    return message


def raising() -> Any:
    raise ValueError("two\nlines")


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (lambda bonuses, depths: raising(), "raised ValueError (test_drafter_contract.py, line"),
        (lambda bonuses, depths: None, "draft returned a NoneType for 2 requests"),
        (lambda bonuses, depths: right(bonuses, depths)[:1], "draft returned 1 entries for 2 requests"),
        (lambda bonuses, depths: [*right(bonuses, depths), chain([1])], "draft returned 3 entries for 2 requests"),
        (lambda bonuses, depths: [[bonus] for bonus in bonuses], "draft returned a list; expected a DraftTree"),
        (lambda bonuses, depths: [chain([(b + 1) % 8]) for b in bonuses], "expected the bonus token"),
        (lambda bonuses, depths: [chain([b, 8]) for b in bonuses], "a tree with token 8; expected 0 to 7"),
        (lambda bonuses, depths: [chain([b, -1]) for b in bonuses], "a tree with token -1; expected 0 to 7"),
        (lambda bonuses, depths: [chain([b, 1, 1, 1, 1]) for b in bonuses], "a tree of depth 4; expected at most 3"),
        (
            lambda bonuses, depths: [DraftTree([b] + [1] * 11, [-1] + [0] * 11, [1.0] + [0.05] * 11) for b in bonuses],
            "a tree of 12 nodes; expected at most 11",
        ),
    ],
)
def test_trees_that_break_the_contract_end_in_one_line(draft: Callable[..., Any], said: str) -> None:
    assert said in refusal(lambda: Batch(draft))


@pytest.mark.parametrize("method", ["start", "extend", "leave"])
def test_what_any_other_method_raises_is_one_line(method: str) -> None:
    said = refusal(lambda: Batch(right, **{method: raising}))
    assert "raised ValueError (test_drafter_contract.py, line" in said
    assert "two lines" in said


def test_opening_and_binding_are_checked_too() -> None:
    assert "open returned a NoneType; expected a DraftBatch" in refusal(lambda: None)
    assert "raised ValueError" in refusal(raising)

    def binding(found: Callable[[], Any]) -> Drafter:
        class Mine(Drafter):
            name = "mine"

            def bind(self, target: DrafterTarget) -> Any:
                return found()

        return Mine()

    class Strange(Bound):
        features: Any = 0

    class Beyond(Bound):
        features = (0, 9)

    with pytest.raises(DrafterError, match=r"drafter 'mine': bind returned a int; expected a BoundDrafter"):
        target_of(binding(lambda: 3))
    with pytest.raises(DrafterError, match=r"drafter 'mine' raised ValueError"):
        target_of(binding(raising))
    with pytest.raises(DrafterError, match=r"its features are 0; expected a tuple"):
        target_of(binding(lambda: Strange(raising)))
    with pytest.raises(UserError, match=r"drafter 'mine': feature layers \[9\] do not exist; the target has 3 layers"):
        target_of(binding(lambda: Beyond(raising)))


def test_the_users_mistakes_and_a_lack_of_memory_pass() -> None:
    for error in (UserError("no such file"), torch.OutOfMemoryError("of 9 GiB"), KeyboardInterrupt()):

        def act(error: BaseException = error) -> Any:
            raise error

        with pytest.raises(type(error)):
            AskedDrafts("mine", Bound(act), [9], vocab=8, nodes=11)


class Reading(BoundPredictor):
    """Asks for the drafter's states."""

    def start(self, request: Any) -> PredictorSession:
        class Session(PredictorSession):
            def predict(self, tree: DraftTree) -> Any:
                return request.drafter_states(tree)

            def commit(self, nodes: Sequence[int]) -> None:
                pass

        return Session()


def test_a_predictor_that_reads_the_states_of_a_drafter_without_any_ends_in_one_line() -> None:
    target, bound = target_of(Ngram())
    method = Speculation(MarginalCost(), bound, 4, 3, 2, Reading(), drafter_name="ngram")
    with pytest.raises(DrafterError, match=r"^drafter 'ngram': it has no states that a predictor could read"):
        run_speculative(target, method, PROMPT)


class Greedy(DraftBatch):
    """Does with what it is given as it likes."""

    def start(self, index: int, tokens: Any, features: Any) -> None:
        tokens.clear()

    def extend(self, blocks: Any, features: Any) -> None:
        for block in blocks:
            block.extend([1] * 5)
        features.clear()

    def draft(self, bonuses: Any, depths: Any, top_k: int) -> list[DraftTree]:
        return [DraftTree([bonus], [-1], [1.0]) for bonus in bonuses]

    def leave(self, index: int) -> None:
        pass


class GreedyBound(BoundDrafter):
    def open(self, capacities: Any) -> DraftBatch:
        return Greedy()


def test_what_a_drafter_does_with_its_lists_is_not_counted() -> None:
    target = tiny_target(feature_layers=())
    method = Speculation(Confidence(), GreedyBound(), 4, 3, 2)
    generation = run_speculative(target, method, PROMPT, n=12)
    assert generation.tokens == run_ar(target, PROMPT, n=12).tokens
    assert [step.emitted for step in generation.steps] == [1] * 11


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(0), StopIteration()])
def test_a_drafter_that_raises_when_it_is_told_the_length_ends_in_one_line(error: BaseException) -> None:
    class Raises(GreedyBound):
        def note_positions(self, count: int, request: str) -> None:
            raise error

    method = Speculation(Confidence(), Raises(), 4, 3, 2, drafter_name="theirs")
    with pytest.raises(DrafterError, match="drafter 'theirs'"):
        run_speculative(tiny_target(feature_layers=()), method, PROMPT, n=4)


def test_features_that_raise_and_trees_of_another_kind_are_blamed_on_the_drafter() -> None:
    @dataclass(frozen=True)
    class Theirs(Drafter):
        name = "theirs"

        def bind(self, target: DrafterTarget) -> BoundDrafter:
            return Features()

    class Features(GreedyBound):
        @property
        def features(self) -> tuple[int, ...]:  # type: ignore[override]
            raise ValueError("not today")

    with pytest.raises(DrafterError, match=r"drafter 'theirs' .*not today"):
        target_of(Theirs())

    class Other(DraftTree):
        pass

    class Trees(Greedy):
        def draft(self, bonuses: Any, depths: Any, top_k: int) -> list[DraftTree]:
            return [Other([bonus], [-1], [1.0]) for bonus in bonuses]

    class Bound(GreedyBound):
        def open(self, capacities: Any) -> DraftBatch:
            return Trees()

    with pytest.raises(DrafterError, match="draft returned a Other; expected a DraftTree"):
        run_speculative(tiny_target(feature_layers=()), Speculation(Confidence(), Bound(), 4, 3, 2), PROMPT, n=4)
