"""A predictor of somebody else's that breaks its contract ends in one line with its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import asked, random_tokens, random_tree, rule_for, tiny_head, tiny_target

from ecospec.errors import UserError
from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_ar_batch, decode_speculative_batch
from ecospec.harness.loading import target_view
from ecospec.policies import DraftTree, MarginalCost
from ecospec.predictors.asking import AskedBatch, PredictorError, bind
from ecospec.predictors.contract import BoundPredictor, EachAlone, PredictionRequest, Predictor, PredictorSession

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def right(tree: DraftTree) -> Any:
    return np.broadcast_to(np.arange(TOP_K), (LAYERS, tree.size, TOP_K)).copy()


class Session(PredictorSession):
    """Right, but for what it is told to do."""

    def __init__(self, predict: Callable[[DraftTree], Any] = right, commit: Callable[..., Any] | None = None) -> None:
        self._predict, self._commit = predict, commit

    def predict(self, tree: DraftTree) -> Any:
        return self._predict(tree)

    def commit(self, nodes: Sequence[int]) -> None:
        if self._commit is not None:
            self._commit(nodes)


class Bound(BoundPredictor):
    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start

    def start(self, request: PredictionRequest) -> Any:
        return self._start(request.true_routing)


def opened(bound: BoundPredictor, size: int = 2, *, oracle: bool = False) -> AskedBatch:
    requests = [asked([1], 9, right)] * size
    return AskedBatch("mine", bound, (LAYERS, EXPERTS, TOP_K), requests, oracle=oracle)


def trees(count: int = 2) -> list[DraftTree]:
    rng = np.random.default_rng(0)
    return [random_tree(rng, 4 + i) for i in range(count)]


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(PredictorError) as refused:
        act()
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith("predictor 'mine'")
    return message


class Odd(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [ValueError("two\nlines"), SystemExit(0), Odd(), StopIteration(), AssertionError()])
def test_whatever_it_raises_is_one_line(error: BaseException) -> None:
    act = raising(error)
    kind = type(error).__name__
    assert f"raised {kind} (test_asking.py, line" in refusal(lambda: opened(Bound(act)))
    batch = opened(Bound(lambda truth: Session(predict=act)))
    assert f"raised {kind}" in refusal(lambda: batch.predict(trees()))
    batch = opened(Bound(lambda truth: Session(commit=act)))
    batch.predict(trees())
    assert f"raised {kind}" in refusal(lambda: batch.commit([[0], [0]]))

    class Binding(Predictor):
        name = "mine"

        def bind(self, target: Any) -> Any:
            raise error

    assert f"raised {kind}" in refusal(lambda: bind(Binding(), target_view(tiny_target())))


def test_a_mistake_of_the_users_and_a_lack_of_memory_pass() -> None:
    for error in (UserError("no such file"), torch.OutOfMemoryError("of 9 GiB"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            opened(Bound(raising(error)))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        opened(Bound(raising(RuntimeError("can't allocate memory"))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: r[:-1],
            "predict returned int64 of shape (2, 4, 2); expected integers (3, 4, 2) [MoE layers, nodes, K]",
        ),
        (lambda r: r[:, :-1], "shape (3, 3, 2)"),
        (lambda r: r[..., :1], "shape (3, 4, 1)"),
        (lambda r: r.astype(float), "float64 of shape"),
        (lambda r: r.astype(object), "object of shape"),
        (lambda r: None, "predict returned a NoneType"),
        (lambda r: r.tolist(), "predict returned a list"),
        (lambda r: torch.from_numpy(r), "predict returned a Tensor"),
        (lambda r: r + 7, "predict's routing names experts 7 to 8, expected values from 0 to 7"),
        (lambda r: r - 1, "predict's routing names experts -1 to 0"),
        (lambda r: r * 0, "named an expert twice for a node and layer"),
    ],
)
def test_what_is_no_routing_of_the_tree_is_refused(change: Callable[[Any], Any], said: str) -> None:
    batch = opened(Bound(lambda truth: Session(lambda tree: change(right(tree)))))
    assert said in refusal(lambda: batch.predict(trees()))


class Trapped(np.ndarray):
    """Leaves the process when it is looked at."""

    @property
    def shape(self) -> Any:
        raise SystemExit(0)


def test_an_array_of_a_kind_of_its_own_is_the_predictors_fault() -> None:
    batch = opened(Bound(lambda truth: Session(lambda tree: right(tree).view(Trapped))))
    assert "raised SystemExit" in refusal(lambda: batch.predict(trees()))


@pytest.mark.parametrize("returned", [None, [], [1, 2, 3], {}])
def test_a_batch_has_one_entry_for_each_request(returned: Any) -> None:
    class Short(EachAlone):
        def predict(self, trees: Sequence[DraftTree]) -> Any:
            return returned

    class Starts(Bound):
        def start_batch(self, requests: Any) -> Any:
            return Short([Session(), Session()])

    assert "for 2 requests" in refusal(lambda: opened(Starts(raising(ValueError()))).predict(trees()))


def test_what_opens_nothing_is_refused() -> None:
    class Starts(Bound):
        def start_batch(self, requests: Any) -> Any:
            return None

    assert "start_batch returned a NoneType" in refusal(lambda: opened(Starts(right)))

    class Binding(Predictor):
        name = "mine"

        def bind(self, target: Any) -> Any:
            return None

    assert "bind returned a NoneType" in refusal(lambda: bind(Binding(), target_view(tiny_target())))


def test_only_an_oracle_may_ask_for_the_true_routing() -> None:
    cheat = Bound(lambda truth: Session(truth))
    assert "it asked for the true routing" in refusal(lambda: opened(cheat).predict(trees()))
    assert [sets.size for sets in opened(cheat, oracle=True).predict(trees())] == [4, 5]


def test_what_it_does_to_its_list_of_trees_does_no_harm() -> None:
    class Clearing(EachAlone):
        def predict(self, trees: Any) -> Any:
            found = super().predict(trees)
            trees.clear()
            return found

    class Starts(Bound):
        def start_batch(self, requests: Any) -> Any:
            return Clearing([Session(), Session()])

    assert len(opened(Starts(right)).predict(trees())) == 2


def test_it_is_asked_this_way_while_decoding() -> None:
    """The third request of a batch is the one that fails; without it all is well and lossless."""
    target = tiny_target(vocab_size=8)
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, n, 8) for n in (3, 5, 2)]
    opened_sessions: list[int] = []

    def start(truth: Any) -> Session:
        opened_sessions.append(1)
        return Session(raising(ZeroDivisionError("row")) if len(opened_sessions) == 3 else right)

    def streams(count: int) -> list[Stream]:
        return [
            Stream(prompt, TokenChooser(Sampling(), f"r{i}"), rule_for(prompt, 12)) for i, prompt in enumerate(prompts)
        ][:count]

    head = tiny_head(target_vocab=8)
    method = Speculation(MarginalCost(), head, 4, 3, 2, Bound(start), predictor_name="mine")
    together = decode_speculative_batch(target, method, streams(2))
    assert [g.tokens for g in together] == [g.tokens for g in decode_ar_batch(target, streams(2))]
    opened_sessions.clear()
    assert "raised ZeroDivisionError" in refusal(lambda: decode_speculative_batch(target, method, streams(3)))
