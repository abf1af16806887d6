"""The doctor on the paper's three configurations without weights, on whole small checkpoints, and on what is amiss."""

from __future__ import annotations

import json
import math
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_configs import PAPER, write_config
from safetensors.torch import load_file, save_file
from tiny_checkpoints import SHAPE, Checkpoints
from transformers import AutoConfig, AutoModelForCausalLM

from ecospec.harness.doctor.headers import read_headers
from ecospec.harness.doctor.storage import checkpoint_tensors, declared_experts, stored_experts
from ecospec.harness.experts import find_experts
from ecospec.harness.loading import embedded_folder

PROBLEM_EXIT = 2


@pytest.fixture
def doctor(command: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Run it and return what it says as JSON, its exit code checked against its own verdict."""

    def run(*arguments: object) -> dict[str, Any]:
        ran = command("doctor", "--json", "--device", "cpu", *arguments)
        said: dict[str, Any] = json.loads(ran.out)
        assert ran.code == (0 if said["fits"] else PROBLEM_EXIT)
        assert said["fits"] == (not problems(said))
        assert all("\n" not in finding["text"] for finding in said["findings"])
        return said

    return run


def problems(said: dict[str, Any]) -> list[str]:
    return [finding["text"] for finding in said["findings"] if finding["level"] == "problem"]


def notes(said: dict[str, Any]) -> list[str]:
    return [finding["text"] for finding in said["findings"] if finding["level"] == "note"]


def parts_of(checkpoints: Checkpoints) -> tuple[object, ...]:
    return ("--target", checkpoints.target, "--drafter", checkpoints.drafter)


def learned_of(checkpoints: Checkpoints) -> tuple[str, str]:
    return ("--predictor", f"learned:path={checkpoints.learned}")


def test_the_embedded_model_fits(command: Callable[..., Any]) -> None:
    ran = command("doctor", "--device", "cpu")
    assert ran.code == 0, ran.out
    assert "all parts fit" in ran.out
    assert "union" in ran.out
    assert "ecospec_sdpa" in ran.out


# Worked out by hand from the configs. Scales: one float32 for every 128 × 128 weights of each of an FP8 expert's three
# matrices, one byte for every 32 weights of an MXFP4 expert; its biases are 2 · 2880 + 2880 numbers in bfloat16.
GPT_OSS_WEIGHTS, GPT_OSS_BIASES = 3 * 2880 * 2880, 3 * 2880
EXPECTED = {
    "qwen3-235b": {
        "layers": (94, 94, 0),
        "experts": (128, 0, 8),
        "vocabulary": 151936,
        "expert": (37.75, 3 * 4096 * 1536 * 2, 0, 0),
        "ids": [1, 46, 90],
        "parameters": 235.09e9,
        "kv": 94 * 2 * 4 * 128 * 2,
    },
    "gpt-oss-120b": {
        "layers": (36, 36, 0),
        "experts": (128, 0, 4),
        "vocabulary": 201088,
        "expert": (12.45, GPT_OSS_WEIGHTS // 2, GPT_OSS_WEIGHTS // 32, 2 * GPT_OSS_BIASES),
        "ids": [1, 17, 33],
        "parameters": 116.83e9,
        "kv": 36 * 2 * 8 * 64 * 2,
    },
    "deepseek-v3.1": {
        "layers": (61, 58, 3),
        "experts": (256, 1, 8),
        "vocabulary": 129280,
        "expert": (44.04, 3 * 7168 * 2048, 4 * 3 * (7168 // 128) * (2048 // 128), 0),
        "ids": [1, 29, 57],
        "parameters": 671.03e9,
        "kv": None,  # the compressed states or the heads' keys and values, as the library has it
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_configurations_are_read_without_weights(
    name: str, doctor: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    raw, head = PAPER[name]
    folders = (write_config(tmp_path / "target", raw), write_config(tmp_path / "head", head))
    began, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = doctor(
        *("--target", folders[0], "--drafter", folders[1], "--predictor", "oracle"),
        *("--dtype", "bfloat16", "--max-context", 4096, "--batch-size", 2),
    )
    assert time.perf_counter() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2_000_000  # kB; its weights are 65 GB and more
    target, expected = said["target"], EXPECTED[name]
    assert (target["layers"], target["MoE layers"], target["dense layers"]) == expected["layers"]
    found = tuple(target[key] for key in ("experts per MoE layer", "shared experts", "K, experts per token"))
    assert found == expected["experts"]
    assert target["vocabulary"] == expected["vocabulary"]
    assert target["hidden size"] == raw["hidden_size"]
    assert target["context"] == raw["max_position_embeddings"]
    assert target["parameters"] == pytest.approx(expected["parameters"], rel=1e-4)
    published, weights, scales, biases = expected["expert"]
    assert round(target["bytes per expert"] / 1e6, 2) == published
    assert target["weights, stored"] == weights
    assert target["scales, stored"] == scales
    assert target["biases, stored"] == biases
    assert target["bytes per expert, stored"] == weights + scales + biases
    experts = math.prod((expected["layers"][1], expected["experts"][0], weights + scales + biases))
    assert experts < target["checkpoint bytes"] < 1.1 * experts
    if any("are turned into bfloat16" in line for line in notes(said)) or "quantization_config" not in raw:
        # A family may keep its routers in float32.
        assert said["memory"]["target's weights"] == pytest.approx(2 * target["parameters"], rel=1e-3)
    else:
        assert said["memory"]["target's weights"] == target["checkpoint bytes"]
    assert said["drafter"]["feature layers"] == expected["ids"]
    assert said["drafter"]["vocabulary"] == 32000
    if expected["kv"] is not None:
        assert said["memory"]["KV cache per token"] == expected["kv"]
    assert said["memory"]["target's KV cache"] == 2 * 4096 * said["memory"]["KV cache per token"]
    missing = problems(said)
    assert any("no tokenizer" in line for line in missing)
    assert any(line.startswith(f"target {folders[0]}: no weights") for line in missing)
    assert any(line.startswith(f"drafter {folders[1]}: no weights") for line in missing)
    if "quantization_config" in raw:
        assert any("weights" in line and raw["quantization_config"]["quant_method"] in line for line in notes(said))


def test_gpt_oss_head_is_shorter_than_its_target(doctor: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    raw, head = PAPER["gpt-oss-120b"]
    folders = (write_config(tmp_path / "target", raw), write_config(tmp_path / "head", head))
    said = doctor("--target", folders[0], "--drafter", folders[1], "--policy", "confidence")
    assert any("max_position_embeddings 4096 is below the target's context 131072" in line for line in notes(said))
    write_config(folders[1], {**head, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}})
    said = doctor("--target", folders[0], "--drafter", folders[1], "--policy", "confidence")
    assert said["drafter"]["feature layers"] == [23, 29, 35]  # boundaries


def test_a_whole_small_checkpoint_fits_and_its_sizes_are_exact(
    doctor: Callable[..., dict[str, Any]], checkpoints: Checkpoints
) -> None:
    for predictor in (learned_of(checkpoints), ("--predictor", f"token-frequency:path={checkpoints.token_frequency}")):
        said = doctor(*parts_of(checkpoints), *predictor, "--dtype", "float32", "--max-context", 512)
        assert said["fits"], problems(said)
    target, memory = said["target"], said["memory"]
    tensors = load_file(checkpoints.target / "model.safetensors")
    assert target["checkpoint bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    one = 3 * SHAPE.hidden_size * SHAPE.expert_size * next(iter(tensors.values())).element_size()
    assert target["bytes per expert"] == target["bytes per expert, stored"] == one
    assert memory["target's weights"] == 4 * sum(t.numel() for t in tensors.values())
    assert memory["KV cache per token"] == SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4
    head = load_file(checkpoints.drafter / "model.safetensors")
    floats = sum(t.numel() for name, t in head.items() if name not in ("d2t", "t2d"))
    assert memory["drafter's weights"] == 4 * floats
    assert memory["predictor token-frequency:path=" + str(checkpoints.token_frequency)] == 8 * math.prod(
        (SHAPE.vocab_size, SHAPE.layers, SHAPE.top_k)
    )


@pytest.fixture
def copies(checkpoints: Checkpoints, tmp_path: Path) -> Checkpoints:
    """Folders that a test may spoil."""
    names = ("target", "drafter", "learned", "token_frequency")
    return Checkpoints(
        **{name: Path(shutil.copytree(getattr(checkpoints, name), tmp_path / "copy" / name)) for name in names}
    )


def edit(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**raw, **changes}), encoding="utf-8")


def drop(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if name not in names}, path, {"format": "pt"})


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def shard(folder: Path, *, forget: bool = False) -> None:
    """Split the weights over two files under an index; ``forget`` the second."""
    path = folder / "model.safetensors"
    tensors = sorted(load_file(path).items())
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = (dict(tensors[::2]), dict(tensors[1::2]))
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name, {"format": "pt"})
    places = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    path.unlink()
    if forget:
        (folder / names[1]).unlink()


def stretch(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] = torch.zeros(3, 5)
    tensors["left.over"] = torch.zeros(2)
    save_file(tensors, path, {"format": "pt"})


SPOILT: dict[str, tuple[Callable[[Checkpoints], object], str]] = {
    "head of another hidden size": (
        lambda c: edit(c.drafter, target_hidden_size=48),
        "target_hidden_size is 48, expected 32",
    ),
    "head of another vocabulary": (lambda c: edit(c.drafter, vocab_size=400), "vocab_size is 400, expected 320"),
    "draft vocabulary without map": (lambda c: drop(c.drafter, "d2t", "t2d"), "no d2t tensor"),
    "head without a tensor": (lambda c: drop(c.drafter, "norm.weight"), "tensor norm.weight has shape nothing"),
    "head of another shape": (lambda c: stretch(c.drafter), "tensor fc.weight has shape (3, 5)"),
    "head with another's tensor": (lambda c: stretch(c.drafter), "tensor left.over has shape (2,)"),
    "layers that are not there": (
        lambda c: edit(c.drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
        "has 3 layers",
    ),
    "truncated head": (lambda c: cut(c.drafter), "model.safetensors is truncated"),
    "truncated target": (lambda c: cut(c.target), "model.safetensors is truncated"),
    "missing shard": (lambda c: shard(c.target, forget=True), "no model-00002-of-00002.safetensors; its index names"),
    "target without a tensor": (
        lambda c: drop(c.target, "model.layers.1.mlp.experts.3.up_proj.weight"),
        "lacks model.layers.1.mlp.experts.3.up_proj.weight; expected all",
    ),
    "target of another shape": (
        lambda c: edit(c.target, moe_intermediate_size=16),
        "has shape (32, 8), expected (32, 16)",
    ),
    "target without config": (lambda c: (c.target / "config.json").unlink(), "no config.json"),
    "target without tokenizer": (
        lambda c: [path.unlink() for path in c.target.glob("tokenizer*")],
        "no tokenizer",
    ),
    "predictor of another target": (
        lambda c: edit(
            c.learned, target={**json.loads((c.learned / "config.json").read_text())["target"], "experts": 16}
        ),
        "trained for experts = 16, but the target has 8",
    ),
    "predictor without a tensor": (lambda c: drop(c.learned, "head.weight"), "tensor head.weight has shape nothing"),
    "predictor without files": (lambda c: shutil.rmtree(c.learned), "no config.json"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_amiss_is_named_in_a_line(
    what: str, doctor: Callable[..., dict[str, Any]], copies: Checkpoints
) -> None:
    spoil, expected = SPOILT[what]
    spoil(copies)
    found = problems(doctor(*parts_of(copies), *learned_of(copies)))
    assert any(expected in line for line in found), found


def test_several_findings_are_a_line_each(doctor: Callable[..., dict[str, Any]], copies: Checkpoints) -> None:
    cut(copies.target)
    drop(copies.drafter, "norm.weight")
    shutil.rmtree(copies.learned)
    assert len(problems(doctor(*parts_of(copies), *learned_of(copies)))) == 3


def test_shards_and_pickles_are_read_like_one_file(
    doctor: Callable[..., dict[str, Any]], copies: Checkpoints, checkpoints: Checkpoints
) -> None:
    whole = doctor(*parts_of(checkpoints), *learned_of(checkpoints))
    shard(copies.target)
    head = load_file(copies.drafter / "model.safetensors")
    (copies.drafter / "model.safetensors").unlink()
    torch.save(head, copies.drafter / "pytorch_model.bin")
    split = doctor(*parts_of(copies), *learned_of(copies))
    assert split["fits"], problems(split)
    for said in (whole, split):
        for part in ("target", "drafter"):
            del said[part]["checkpoint"]
    assert split["target"] == whole["target"]
    assert split["drafter"] == whole["drafter"]
    (copies.drafter / "pytorch_model.bin").write_bytes(b"no pickle")
    assert any("pytorch_model.bin is not readable" in line for line in problems(doctor(*parts_of(copies))))


def test_memory_that_is_not_there_is_a_problem(
    doctor: Callable[..., dict[str, Any]], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*parts_of(checkpoints), "--policy", "confidence")
    needed = doctor(*arguments)["memory"]["total"]
    monkeypatch.setattr("ecospec.harness.doctor.memory.free_bytes", lambda device: needed)
    assert doctor(*arguments)["fits"]
    monkeypatch.setattr("ecospec.harness.doctor.memory.free_bytes", lambda device: needed - 1)
    assert any(line.startswith("memory: ") for line in problems(doctor(*arguments)))


def test_a_predictor_is_looked_at_only_where_a_policy_asks_for_one(
    doctor: Callable[..., dict[str, Any]], checkpoints: Checkpoints
) -> None:
    assert doctor(*parts_of(checkpoints), "--policy", "confidence")["fits"]
    without = doctor(*parts_of(checkpoints), "--policy", "marginal", "--predictor", "learned")
    assert any("learned:path=FOLDER" in line for line in problems(without))


def test_a_feature_predictor_of_another_drafter_is_named(doctor: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    own = embedded_folder()
    head = Path(shutil.copytree(own / "drafter", tmp_path / "head"))
    predictor = ("--predictor", f"feature:path={own / 'predictor' / 'feature'}")
    arguments = ("--target", own / "target", "--drafter", head, *predictor)
    assert doctor(*arguments)["fits"]
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1}, head / "model.safetensors")
    assert any("weights_sha256" in line for line in problems(doctor(*arguments)))


def test_options_that_mean_nothing_are_refused(command: Callable[..., Any], checkpoints: Checkpoints) -> None:
    for arguments, said in (
        (("--max-context", "0"), "--max-context 0"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--policy", "margnal"), "did you mean 'marginal'"),
        (("--target", "./nowhere"), "no such folder"),
    ):
        ran = command("doctor", *arguments)
        assert ran.code == PROBLEM_EXIT
        assert said in ran.err
        assert len(ran.err.splitlines()) == 1
    ran = command("doctor", "--target", checkpoints.target)
    assert "--drafter" in ran.out


def test_quantised_tensors_are_told_apart_by_their_headers(tmp_path: Path) -> None:
    """One MXFP4 and one FP8 layer as published, with the bytes of each kind counted by hand."""
    small = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    for name, changes in (
        ("gpt-oss-120b", {"intermediate_size": 128, "num_local_experts": 4, "layer_types": ["full_attention"]}),
        ("deepseek-v3.1", {"moe_intermediate_size": 128, "n_routed_experts": 8, "first_k_dense_replace": 0}),
    ):
        folder = write_config(tmp_path / name, {**PAPER[name][0], **small, **changes})
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        module = find_experts(model)[0]
        tensors: dict[str, torch.Tensor] = {}
        if name == "gpt-oss-120b":
            at = "model.layers.0.mlp.experts."
            for matrix, rows, columns in (("gate_up_proj", 256, 256), ("down_proj", 256, 128)):
                tensors[f"{at}{matrix}_blocks"] = torch.zeros(4, rows, columns // 32, 16, dtype=torch.uint8)
                tensors[f"{at}{matrix}_scales"] = torch.zeros(4, rows, columns // 32, dtype=torch.uint8)
                tensors[f"{at}{matrix}_bias"] = torch.zeros(4, rows, dtype=torch.bfloat16)
            expected = (3 * 256 * 128 // 2, 3 * 256 * 128 // 32, 2 * (256 + 256))
        else:
            for expert in range(8):
                for matrix, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
                    at = f"model.layers.0.mlp.experts.{expert}.{matrix}_proj.weight"
                    tensors[at] = torch.zeros(shape).to(torch.float8_e4m3fn)
                    tensors[f"{at}_scale_inv"] = torch.zeros(shape[0] // 128, shape[1] // 128)
            expected = (3 * 256 * 128, 4 * 6, 0)
        tensors["model.layers.0.mlp.shared_experts.gate_proj.weight"] = torch.zeros(128, 256)
        save_file(tensors, folder / "model.safetensors")
        headers, wrong = read_headers("target", folder)
        assert not wrong
        stored = stored_experts(headers, checkpoint_tensors(model, "model.layers.0.mlp.experts."), module, "quantised")
        assert stored is not None
        assert (stored.weight_bytes, stored.scale_bytes, stored.bias_bytes) == expected


@pytest.mark.parametrize(
    ("name", "size"), [("gpt-oss-120b", "intermediate_size"), ("qwen3-235b", "moe_intermediate_size")]
)
def test_scales_are_counted_for_matrices_as_they_are_stored(name: str, size: str, tmp_path: Path) -> None:
    """64 inner neurons: gate and up have two half-filled blocks each, and joined they would share them."""
    changes = {
        "hidden_size": 256,
        size: 64,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "vocab_size": 64,
    }
    folder = write_config(tmp_path, {**PAPER[name][0], **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    stored = declared_experts(find_experts(model)[0], {"quant_method": "fp8"}, torch.bfloat16)
    assert stored is not None
    assert stored.scale_bytes == 4 * (2 + 2 + 2)
