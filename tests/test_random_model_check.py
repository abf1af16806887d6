"""The example that decodes with random models of published shapes, at a small shape."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "random_model_check.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("shape", ["tiny", "tiny-gpt-oss"])
def test_it_prints_the_verdict_and_each_phase(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], shape: str
) -> None:
    given = ["--shape", shape, "--device", "cpu", "--dtype", "float32", "--prompts", "1", "--tokens", "24"]
    assert script["main"](given) == 0
    out = capsys.readouterr().out
    assert "lossless: 1 exact" in out
    names = ("AR", "confidence")
    rows = {
        line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] and line.split()[0] in names
    }
    top_k = str(script["SHAPES"][shape]["num_experts_per_tok"])
    assert rows["AR"][1:4] == ["1.000", f"{float(top_k):.2f}", "0.00"]
    assert float(rows["confidence"][2]) > float(top_k)
    assert all(float(row[5]) > 0 for row in rows.values())


def test_published_shapes_are_those_of_their_models(script: dict[str, Any]) -> None:
    """Bytes of an expert in bfloat16: three matrices of 2048 by 768, and of 2880 by 2880 with biases."""
    sizes = {}
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        with torch.device("meta"):
            geometry = script["build_target"](script["SHAPES"][name], "meta", torch.bfloat16).geometry
        sizes[name] = (geometry.moe_layers, geometry.experts, geometry.top_k, geometry.expert_bytes)
    assert sizes == {
        "qwen3-30b-a3b": (48, 128, 8, 3 * 2048 * 768 * 2),
        "gpt-oss-20b": (24, 32, 4, (3 * 2880 * 2880 + 3 * 2880) * 2),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", ["tiny", "tiny-gpt-oss"])
def test_it_runs_on_a_gpu(script: dict[str, Any], shape: str) -> None:
    assert script["main"](["--shape", shape, "--device", "cuda"]) == 0
