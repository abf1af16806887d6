"""The oracle predictor says what the target then does."""

from __future__ import annotations

import numpy as np
from tiny_models import asked, random_tokens, random_tree, tiny_target

from ecospec.harness.informing import true_routing
from ecospec.harness.loading import target_view
from ecospec.predictors.builtin import Oracle


def test_the_oracle_predicts_the_targets_own_routing_and_leaves_no_trace() -> None:
    rng = np.random.default_rng(0)
    target = tiny_target()
    session = target.new_session(60)
    prompt = random_tokens(rng, 7)
    session.prefill(prompt)
    oracle = Oracle().bind(target_view(target)).start(asked(prompt, 60, lambda tree: true_routing(session, tree)))
    for _ in range(4):
        tree = random_tree(rng, 8)
        predicted = oracle.predict(tree)
        assert session.length == len(prompt)
        verified = session.verify(tree, np.arange(tree.size)).routing.numpy()
        assert np.array_equal(predicted, verified)
        session.commit([0])
        oracle.commit([0])
        prompt.append(int(tree.tokens[0]))
    assert len(np.unique(verified)) > 2
