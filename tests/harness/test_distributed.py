"""Two processes that hold a target together decode what one does, count the same, and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import Checkpoints
from tiny_decoding import decoded, load, write_model

from ecospec.errors import UserError
from ecospec.harness import distributed, placement, processes
from ecospec.harness.config import RunConfig
from ecospec.harness.placement import placement_of

SCRIPT = Path(__file__).parents[1] / "in_processes.py"
needs_processes = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)


def in_two_processes(*arguments: object, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a script or module by torchrun, in two processes on this CPU."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(
        [*launcher, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )


def own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("ecospec-bench: ")]


@needs_processes
@pytest.mark.processes
def test_two_processes_decode_and_count_what_one_does(tmp_path: Path) -> None:
    overrides: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "mixtral": {}, "tied": {"tie_word_embeddings": True}}
    folders = {
        name: write_model(tmp_path / name, "qwen3_moe" if name == "tied" else name, **each)
        for name, each in overrides.items()
    }
    asked = [("qwen3_moe", "tensor"), ("qwen3_moe", "expert"), ("mixtral", "expert"), ("tied", "tensor")]
    pairs = [part for name, mode in asked for part in (folders[name], mode)]
    ran = in_two_processes(SCRIPT, "decode", tmp_path / "found", *pairs)
    assert ran.returncode == 0, ran.stderr
    ranks = [json.loads((tmp_path / f"found.{rank}").read_text(encoding="utf-8")) for rank in range(2)]
    assert ranks[0] == ranks[1]  # bit for bit, the logits included
    alone = {name: json.loads(json.dumps(decoded(load(folder)))) for name, folder in folders.items()}
    for (name, mode), found in zip(asked, ranks[0], strict=True):
        expected = dict(alone[name])
        torch.testing.assert_close(
            torch.tensor(found.pop("logits")), torch.tensor(expected.pop("logits")), atol=1e-4, rtol=0
        )
        assert found == expected, (name, mode)
        assert found["geometry"]["experts"] == 8  # of the whole model: each process holds four


@needs_processes
@pytest.mark.processes
def test_the_bench_in_two_processes_reports_what_it_does_in_one(
    checkpoints: Checkpoints, tmp_path: Path, bench: Callable[..., Any]
) -> None:
    assert bench("--output", tmp_path / "one").code == 0
    arguments = ["--suite", "gsm8k", "--limit", 2, "--max-new-tokens", 12, "--data", "embedded"]
    arguments += ["--target", checkpoints.target, "--drafter", checkpoints.drafter]
    arguments += ["--predictor", f"learned:path={checkpoints.learned}"]
    command = ["-m", "ecospec.harness", *arguments, "--parallel", "expert", "--output", tmp_path / "two"]
    ran = in_two_processes(*command)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("run folder:") == 1  # one process speaks
    assert own_lines(ran.stderr) == []
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("one", "two")
    )
    same = ("prompt_id", "method", "tokens", "text", "steps", "emitted", "selected", "expert_pairs", "verdict")
    assert [[record[key] for key in same] for record in two] == [[record[key] for key in same] for record in one]
    reports = [json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8")) for name in ("one", "two")]
    for key in ("active_experts", "acceptance_length", "bytes_per_step", "expert_bytes_per_step"):
        assert [row[key] for row in reports[1]["rows"]] == [row[key] for row in reports[0]["rows"]]
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["processes"], manifest["parallel"]) == (2, "expert")


@needs_processes
@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("part", "error: the processes have parted"),
        ("fail", "error: rank 1 has had enough (process 1 of 2)"),
        ("die", "error: another process has ended"),
    ],
)
def test_a_process_that_leaves_the_others_ends_all_with_one_line(tmp_path: Path, what: str, said: str) -> None:
    folder = write_model(tmp_path / "target")
    ran = in_two_processes(SCRIPT, what, tmp_path / "found", folder, "tensor", seconds=90)  # a hang raises
    assert ran.returncode != 0
    lines = own_lines(ran.stderr)
    assert len(lines) == 1, ran.stderr
    assert said in lines[0]
    assert list(tmp_path.glob("found.*")) == []


def of(**options: Any) -> RunConfig:
    return RunConfig(suite="gsm8k", policy=("marginal",), **{"target": "t", "drafter": "d", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": "auto"}, "expected one process, or no --device-map"),
        ({"target": None}, "2 processes with the embedded model"),
        ({"widen": 2}, "--widen 2 with 2 processes"),
        ({"parallel": "pipeline"}, "--parallel pipeline: expected tensor or expert"),
        ({"max_memory": "cpu=1GiB"}, "--max-memory without --device-map"),
    ],
)
def test_what_several_processes_cannot_do_is_one_line(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError) as caught:
        placement_of(of(**options))
    assert said in str(caught.value)


def test_several_processes_split_by_tensor_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for asked, found in ((None, "tensor"), ("tensor", "tensor"), ("expert", "expert")):
        made = placement_of(of(parallel=asked))
        assert made is not None
        assert made.parallel == found


def test_each_process_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    for gpus, asked, found in ((0, "auto", "cpu"), (0, "cpu", "cpu"), (4, "auto", "cuda:2"), (4, "cuda", "cuda:2")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert placement.own_device(asked) == found
    for gpus, asked, said in (
        (4, "cpu", "a GPU of its own"),
        (4, "cuda:1", "a GPU of its own"),
        (0, "cuda", "no CUDA device"),
        (2, "auto", "--nproc-per-node 2"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(UserError, match=said):
            placement.own_device(asked)


@pytest.mark.parametrize(("heads", "split", "fits"), [(4, True, True), (3, True, False), (3, False, True)])
def test_a_head_is_not_cut_in_two(monkeypatch: pytest.MonkeyPatch, heads: int, split: bool, fits: bool) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    class Model(torch.nn.Module):
        config = SimpleNamespace(num_key_value_heads=heads)

    model = Model()
    model.k_proj, model.experts = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for part in (model.k_proj, model.experts) if split else (model.experts,):
        part.weight.placements = ("a part",)  # as a tensor has of which each process holds a part
    asked = placement.Placement(parallel="tensor")
    if fits:
        asked.check("t", model)
        return
    with pytest.raises(UserError, match="3 key-value heads in 2 processes; expected"):
        asked.check("t", model)


def test_a_launcher_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    ran = command("--suite", "gsm8k")
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err
        == "ecospec-bench: error: WORLD_SIZE=many in the environment: expected an integer, as torchrun sets it\n"
    )


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (processes.process_count(), processes.process_rank(), processes.local_rank()) == (1, 0, 0)
    assert placement_of(of()) is None
    config = of(output=tmp_path)
    assert distributed.own_output(config) is config
    assert distributed.summed(2.5) == 2.5
    with pytest.raises(UserError, match="--parallel expert in one process: expected torchrun"):
        placement_of(of(parallel="expert"))
