"""The AR baseline is no slower than the library's own generate(): a slow baseline is a false speed-up."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import decode_ar
from ecospec.harness.experts import widen_experts
from ecospec.harness.loading import embedded_facts, embedded_folder, load_target
from ecospec.harness.stopping import StopRule
from ecospec.suites import load_suite

TOKENS, PAIRS = 32, 7


@pytest.fixture(autouse=True)
def _only_when_benchmarking(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--benchmark-enable"):
        pytest.skip("a benchmark: give --benchmark-enable")


def test_ar_is_at_least_as_fast_as_generate(benchmark: Any) -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    folder, widen = embedded_folder() / "target", int(embedded_facts()["widen"])
    loaded = load_target(str(folder), dtype=torch.float32, device="cpu", widen=widen)
    library: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    widen_experts(library, widen)
    ids = loaded.tokenizer(load_suite("gsm8k", limit=1).problems[0].prompt)["input_ids"]
    prompt = torch.tensor([ids])

    def ours() -> list[int]:
        rule = StopRule(loaded.tokenizer, TOKENS, frozenset())
        return decode_ar(loaded.target, ids, TokenChooser(Sampling(), "r"), rule).tokens

    def theirs() -> list[int]:
        with torch.inference_mode():
            out = library.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in out[0, len(ids) :]]

    assert ours() == theirs()  # also the warm-up
    ratios = []
    for pair in range(PAIRS):
        seconds = {}
        for decode in (ours, theirs) if pair % 2 else (theirs, ours):
            began = time.perf_counter()
            decode()
            seconds[decode] = time.perf_counter() - began
        ratios.append(seconds[theirs] / seconds[ours])
    benchmark.extra_info["generate_seconds_over_ours"] = ratios
    benchmark.pedantic(ours, rounds=1)
    print(f"generate() seconds over ours, {PAIRS} interleaved pairs: median {statistics.median(ratios):.2f} {ratios}")
    assert statistics.median(ratios) >= 1.0
