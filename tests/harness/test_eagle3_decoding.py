"""Decoding with every kind of head is plain decoding."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from eagle3_written_out import (
    FLAG_SETS,
)
from tiny_models import (
    CONTEXT,
    random_tokens,
    rule_for,
    run_ar,
    run_speculative,
    tiny_head,
    tiny_target,
)

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Speculation, Stream, decode_speculative_batch
from ecospec.harness.eagle3 import FLAGS
from ecospec.policies import Confidence


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", FLAG_SETS, ids="+".join)
def test_sixty_steps_with_any_head_are_exact(flags: tuple[str, ...], temperature: float) -> None:
    target, head = tiny_target(), tiny_head(**dict.fromkeys(flags, True))
    method = Speculation(Confidence(), head, budget=3, draft_steps=2, draft_topk=2)
    sampling, prompt = Sampling(temperature=temperature, seed=3), random_tokens(np.random.default_rng(0), 4)
    done = run_speculative(target, method, prompt, sampling, n=90)
    assert done.tokens == run_ar(target, prompt, sampling, n=90).tokens
    assert len(done.tokens) == 90
    assert len(done.steps) >= 60


@pytest.mark.parametrize("flags", [FLAGS[:2], FLAGS])
def test_a_batch_with_such_a_head_is_exact(flags: tuple[str, ...]) -> None:
    target, head = tiny_target(), tiny_head(**dict.fromkeys(flags, True))
    method = Speculation(Confidence(), head, budget=4, draft_steps=3, draft_topk=2)
    sampling = Sampling(temperature=1.0, seed=3)
    prompts = [random_tokens(np.random.default_rng(seed), 4 + seed) for seed in (0, 1)]
    alone = [run_speculative(target, method, prompt, sampling, n=30) for prompt in prompts]
    streams = [Stream(prompt, TokenChooser(sampling, "r"), rule_for(prompt, 30)) for prompt in prompts]
    together = decode_speculative_batch(target, method, streams)
    for one, other, prompt in zip(alone, together, prompts, strict=True):
        assert one.tokens == other.tokens == run_ar(target, prompt, sampling, n=30).tokens
        assert [step.emitted for step in one.steps] == [step.emitted for step in other.steps]  # the same trees


def test_beyond_the_heads_positions_decoding_goes_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    target, prompt = tiny_target(), random_tokens(np.random.default_rng(4), 8)
    short, long = tiny_head(max_position_embeddings=20), tiny_head(max_position_embeddings=CONTEXT)
    plain = run_ar(target, prompt, n=60)
    found = []
    with caplog.at_level(logging.WARNING, "ecospec"):
        for head in (long, short, short):
            method = Speculation(Confidence(), head, budget=4, draft_steps=3, draft_topk=2)
            done = run_speculative(target, method, prompt, n=60)
            assert done.tokens == plain.tokens
            found.append([step.emitted for step in done.steps])
    assert found[0] == found[1] == found[2]  # its angles simply go on
    (record,) = caplog.records
    assert record.getMessage() == (
        "drafter: request r may take 68 positions, the head's max_position_embeddings is 20; its guesses may be "
        "accepted less often beyond"
    )
