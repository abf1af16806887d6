"""The noisy oracle is right as often as it is asked to be, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import asked, random_tokens, random_tree, tiny_target

from ecospec.errors import UserError
from ecospec.harness.informing import true_routing
from ecospec.harness.loading import target_view
from ecospec.harness.plugins import load_plugins
from ecospec.predictors.builtin import NoisyOracle
from ecospec.predictors.noisy_oracle import degrade, least_accuracy


def random_routing(rng: np.random.Generator, layers: int, nodes: int, top_k: int, experts: int) -> np.ndarray:
    return rng.random((layers, nodes, experts)).argsort(-1)[..., :top_k]


def overlap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Common experts by layer and node."""
    return (one[..., :, None] == other[..., None, :]).any(-1).sum(-1)


@pytest.mark.parametrize("accuracy", [0.0, 0.1, 0.25, 0.5, 0.77, 1.0])
@pytest.mark.parametrize(("top_k", "experts"), [(2, 8), (8, 64), (4, 8), (1, 2)])
def test_the_mean_overlap_is_the_accuracy_and_no_expert_comes_twice(accuracy: float, top_k: int, experts: int) -> None:
    rng = np.random.default_rng(0)
    true = random_routing(rng, 4, 2000, top_k, experts)
    spoilt = degrade(true, experts, accuracy, rng)
    assert spoilt.shape == true.shape
    assert spoilt.min() >= 0
    assert spoilt.max() < experts
    assert (np.diff(np.sort(spoilt, axis=-1), axis=-1) > 0).all()
    found = overlap(true, spoilt)
    assert found.mean() / top_k == pytest.approx(accuracy, abs=0.02)
    assert found.min() >= np.floor(accuracy * top_k)
    assert found.max() <= np.ceil(accuracy * top_k)


def test_which_experts_are_kept_and_which_are_wrong_is_uniform() -> None:
    rng = np.random.default_rng(1)
    true = np.broadcast_to(np.arange(4), (1, 20_000, 4))
    spoilt = degrade(true, 12, 0.5, rng)
    share = np.bincount(spoilt.ravel(), minlength=12) / 20_000
    assert share[:4] == pytest.approx(np.full(4, 0.5), abs=0.02)
    assert share[4:] == pytest.approx(np.full(8, 0.25), abs=0.02)


def test_some_accuracies_cannot_be_had() -> None:
    assert least_accuracy(8, 2) == 0.0
    assert least_accuracy(8, 6) == pytest.approx(4 / 6)
    target = target_view(tiny_target(num_experts=3))
    with pytest.raises(UserError, match=r"accuracy 0.25 cannot be had with 2 of 3 experts; expected at least 0\.5"):
        NoisyOracle(accuracy=0.25).bind(target)
    NoisyOracle(accuracy=0.5).bind(target)
    true = random_routing(np.random.default_rng(0), 2, 500, 2, 3)
    assert (overlap(true, degrade(true, 3, 0.5, np.random.default_rng(0))) == 1).all()


@pytest.mark.parametrize("options", [{"accuracy": -0.1}, {"accuracy": 1.1}, {"accuracy": float("nan")}, {"seed": -1}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UserError, match=f"^predictor 'noisy-oracle': {name} must be"):
        load_plugins().create_predictor(f"noisy-oracle:{name}={value}")


def test_a_session_is_the_same_each_time_and_another_for_another_seed_prompt_or_step() -> None:
    rng, target = np.random.default_rng(2), tiny_target()
    prompts = [random_tokens(rng, 7), random_tokens(rng, 7)]
    tree = random_tree(rng, 8)

    def predictions(seed: int, prompt: list[int]) -> list[np.ndarray]:
        session = target.new_session(60)
        session.prefill(prompts[0])
        bound = NoisyOracle(accuracy=0.5, seed=seed).bind(target_view(target))
        oracle = bound.start(asked(prompt, 60, lambda tree: true_routing(session, tree)))
        first = oracle.predict(tree)
        oracle.commit([0])
        assert session.length == len(prompts[0])
        return [first, oracle.predict(tree), true_routing(session, tree)]

    first, second, true = predictions(0, prompts[0])
    again = predictions(0, prompts[0])
    assert np.array_equal(first, again[0])
    assert np.array_equal(second, again[1])
    assert (overlap(true, first) == 1).all()
    for other in (second, predictions(1, prompts[0])[0], predictions(0, prompts[1])[0]):
        assert not np.array_equal(first, other)
