"""Random draft trees small enough for a brute-force twin, and hard on ties, zeros and rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ecospec.policies import DraftTree, ExpertSets, SelectionRequest

SHAPES = {
    "chain": lambda rng, size: [-1, *range(size - 1)],
    "star": lambda rng, size: [-1, *([0] * (size - 1))],
    "binary": lambda rng, size: [-1, *((node - 1) // 2 for node in range(1, size))],
    "random": lambda rng, size: [-1, *(int(rng.integers(0, node)) for node in range(1, size))],
}
PROBABILITIES = {
    "spread": lambda rng, size: rng.random(size),
    "tied": lambda rng, size: rng.integers(0, 5, size) / 4,  # exact zeros and ones among them
    "certain": lambda rng, size: np.ones(size),
    "underflowing": lambda rng, size: rng.choice([1e-300, 1e-160, 1.0 - 2**-53], size),
}


@pytest.fixture(autouse=True)
def _no_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_PLUGINS", "")


def random_requests(seed: int, count: int) -> Iterator[SelectionRequest]:
    """`count` requests, cycling through all shapes and kinds of probabilities, B₀ empty in half."""
    rng = np.random.default_rng(seed)
    shapes, probabilities = list(SHAPES.values()), list(PROBABILITIES.values())
    for case in range(count):
        size = int(rng.integers(1, 14))
        layers, experts = int(rng.integers(1, 4)), int(rng.integers(1, 40))
        probs = probabilities[case // len(shapes) % len(probabilities)](rng, size)
        probs[0] = 1.0
        tree = DraftTree(rng.integers(0, 100, size), shapes[case % len(shapes)](rng, size), probs)
        density = rng.choice([0.0, 0.1, 0.5])
        covered = ExpertSets.from_mask(rng.random((1, layers, experts)) < 0.3).bits[0]
        yield SelectionRequest(
            tree=tree,
            budget=int(rng.integers(1, size + 3)),
            experts=ExpertSets.from_mask(rng.random((size, layers, experts)) < density),
            covered=covered if rng.random() < 0.5 else None,
        )


@pytest.fixture(scope="session")
def requests() -> list[SelectionRequest]:
    """Three thousand random requests."""
    return list(random_requests(seed=0, count=3000))
