"""A target spread over devices and memories decodes what one in one place does, and counts the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from tiny_decoding import PROMPT, decoded, load, write_model
from tiny_models import random_tree, run_ar, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.errors import UserError
from ecospec.harness import experts
from ecospec.harness.config import RunConfig
from ecospec.harness.placement import Placement, parse_memory, placement_of
from ecospec.harness.sharding import stored_bytes
from ecospec.harness.target import Target
from ecospec.harness.target_batch import TargetBatch
from ecospec.predictors.packing import PACKING, Packing
from ecospec.predictors.pass_mask import for_several_devices

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head")


def spread(folder: Path, *on_disk: str) -> Target:
    """The checkpoint with some parts left on the disk, brought in by accelerate's hooks for each pass."""
    device_map = {part: "disk" if part in on_disk else "cpu" for part in (*PARTS, "model.rotary_emb")}
    return load(folder, Placement(device_map=device_map, offload_folder=str(folder / "offloaded")))


def offloaded(target: Target) -> set[str]:
    return {name for name, parameter in target.model.named_parameters() if parameter.device.type == "meta"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


def test_layers_on_the_disk_with_a_window_decode_what_layers_in_memory_do(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mixtral", sliding_window=6)
    target = spread(folder, "model.layers.1")
    found, expected = decoded(target), decoded(load(folder))
    assert target.windowed
    assert {k: v for k, v in found.items() if k != "logits"} == {k: v for k, v in expected.items() if k != "logits"}


def test_layers_on_the_disk_decode_and_count_what_layers_in_memory_do(saved: Path) -> None:
    target = spread(saved, "model.layers.1", "model.layers.2")
    before = offloaded(target)
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.2.self_attn.q_proj.weight"} <= before
    found, expected = decoded(target), decoded(load(saved))
    torch.testing.assert_close(
        torch.tensor(found.pop("logits")), torch.tensor(expected.pop("logits")), atol=1e-4, rtol=0
    )
    assert found == expected
    assert offloaded(target) == before  # nothing stayed
    held = [hasattr(layer.mlp.experts, "_ecospec_blocks") for layer in target.model.model.layers]
    assert held == [True, False, False]  # views would keep the weights of an offloaded layer in memory


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_on_the_disk_is_there_for_drafter_and_predictor(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "target", tie_word_embeddings=tied)
    target, whole = spread(folder, "model.embed_tokens", "lm_head"), load(folder)
    assert "model.embed_tokens.weight" in offloaded(target)
    assert target.device == torch.device("cpu")
    torch.testing.assert_close(target.embedding, whole.embedding, atol=0, rtol=0)
    assert target.geometry == whole.geometry
    assert run_ar(target, PROMPT).tokens == run_ar(whole, PROMPT).tokens
    assert "model.embed_tokens.weight" in offloaded(target)


def test_a_tied_embedding_that_has_a_copy_on_another_device_is_read_once() -> None:
    model = tiny_model(tie_word_embeddings=True)
    total, untied = stored_bytes(model)
    assert untied == 0
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert stored_bytes(model) == (total, 0)
    model.config.tie_word_embeddings = False
    size = model.lm_head.weight.numel() * 4
    assert stored_bytes(model) == (total + size, size)


def test_auto_fills_the_memory_that_is_allowed_and_asks_before_it_uses_the_disk(saved: Path) -> None:
    enough, little = {"cpu": 1 << 30}, {"cpu": 60_000}
    target = load(saved, Placement(device_map="auto", max_memory=enough))
    assert offloaded(target) == set()
    with pytest.raises(UserError, match="expected more in --max-memory") as caught:
        load(saved, Placement(device_map="auto", max_memory=little))
    assert "\n" not in str(caught.value)
    target = load(saved, Placement(device_map="auto", max_memory=little, offload_folder=str(saved / "offloaded")))
    assert offloaded(target) != set()
    assert run_ar(target, PROMPT).tokens == run_ar(load(saved), PROMPT).tokens


def test_the_bench_says_where_the_layers_were(bench: Callable[..., Any], tmp_path: Path) -> None:
    device_map = dict.fromkeys((*PARTS, "model.rotary_emb"), "cpu") | {"model.layers.1": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(device_map), encoding="utf-8")
    options = ("--device-map", "map.json", "--offload-folder", tmp_path / "offloaded")
    assert bench("--output", "one").code == 0
    ran = bench(*options, "--output", "spread")
    assert ran.code == 0
    assert ran.err == ""
    records = [
        [json.loads(line) for line in (tmp_path / name / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("one", "spread")
    ]
    for key in ("prompt_id", "method", "tokens", "expert_pairs", "verdict"):
        assert [record[key] for record in records[1]] == [record[key] for record in records[0]]
    manifest = json.loads((tmp_path / "spread" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["layers_by_device"] == {"cpu": 2, "disk": 1}
    assert manifest["processes"] is None
    again = bench("--output", "spread", "--resume")
    assert again.code == 2
    assert "device_map = 'map.json', now it is None" in again.err


# Two devices, without having two: PyTorch follows shapes and devices of an operation and computes nothing, and
# refuses one whose operands are on different devices as a real one would.


class OneDeviceIndexing(TorchDispatchMode):
    """Refuses an index on another device than what it is into, which is let through where nothing is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            found = {part.device for part in tree_leaves(args) if isinstance(part, Tensor)}
            assert len(found) == 1, f"{func}: {found}"
        return func(*args, **(kwargs or {}))


@contextmanager
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not hasattr(torch, "second"):
        _setup_privateuseone_for_python_backend("second")
    monkeypatch.setattr(experts, "union_experts_forward", lambda module, states, index, weights: states + 0)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda module, states, index, weights: states + 0)
    for name in ("tensor", "as_tensor", "from_numpy"):  # else small ones are kept as constants, and computed with
        monkeypatch.setattr(torch, name, without_values)
    with FakeTensorMode(allow_non_fake_inputs=True), OneDeviceIndexing():
        yield


def without_values(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """A tensor as of ``data``; where nothing is computed, values do not matter."""
    array = np.asarray(data)
    found = {"b": torch.bool, "i": torch.int64, "f": torch.float32}[array.dtype.kind]
    return torch.empty(array.shape, dtype=dtype or found, device=device)


def put(module: nn.Module, device: str) -> None:
    """Move a part of the model, and what it is called with, as accelerate's hooks do."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
        for name, buffer in list(owner.named_buffers(recurse=False)):
            owner._buffers[name] = buffer.to(device)
        owner.register_forward_pre_hook(
            lambda module, args, kwargs: (
                send_to_device(args, device),
                send_to_device(kwargs, device, skip_keys="past_key_values"),
            ),
            with_kwargs=True,
        )


def two_device_target(first: str, second: str, features: tuple[int, ...], family: str, **changes: Any) -> Target:
    model = tiny_model(family, **changes)
    decoder = model.get_decoder()
    for part in (decoder.embed_tokens, decoder.rotary_emb, decoder.layers[0]):
        put(part, first)
    for part in (decoder.layers[1], decoder.layers[2], decoder.norm, model.lm_head):
        put(part, second)
    model.hf_device_map = {"model.layers.0": first, "model.layers.1": second}
    return Target(model, feature_layers=features)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("places", [("cpu", "second:0"), ("second:0", "cpu")])
def test_every_operation_finds_its_operands_on_one_of_two_devices(
    monkeypatch: pytest.MonkeyPatch, places: tuple[str, str], window: int | None
) -> None:
    with two_devices(monkeypatch):
        target = two_device_target(*places, (0, 1, 2), "mixtral", sliding_window=window)
        assert target.windowed == (window is not None)
        session = target.new_session(32)
        first = session.prefill(PROMPT)
        session.prefill([4, 5])
        session.decode(3)
        tree = random_tree(np.random.default_rng(0), 7)
        step = session.verify(tree, np.arange(5))
        session.commit([0, 2])
        batch = TargetBatch(target, [32, 32])
        for each in batch.sessions:
            each.prefill(PROMPT)
        together = batch.verify([tree, tree], [np.arange(5), np.arange(3)])
        batch.commit([[0, 2], [0, 1]])
        batch.decode([1, 2])
        batch.leave(0)
        batch.decode([1])
        for found in (first, step, together.whole):
            assert {found.logits.device.type, found.features.device.type, found.routing.device.type} == {
                torch.device(places[0]).type
            }
        memories = [half for _, memory in batch._pool.written() for half in memory]  # type: ignore[union-attr]
        assert [half.device.type for half in memories] == [
            torch.device(places[layer > 0]).type for layer in range(3) for _ in range(2)
        ]


def test_a_mask_is_copied_to_a_device_once_with_whose_tokens_are_whose() -> None:
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    setattr(mask, PACKING, Packing(2, 3, torch.tensor([0, 1, 3])))
    assert for_several_devices(mask) is mask
    there = mask.to("meta", non_blocking=True)
    assert there.device.type == "meta"
    assert mask.to(torch.device("meta")) is there
    packing = getattr(there, PACKING)
    assert (packing.rows, packing.width, packing.places.device.type) == (2, 3, "meta")
    assert mask.to("cpu") is mask
    changed = mask.to(torch.float32)
    assert (changed.dtype, changed.shape) == (torch.float32, mask.shape)
    plain: Tensor = for_several_devices(torch.ones(1, 1, 2, 2))
    assert not hasattr(plain.to("meta"), PACKING)


def of(**options: Any) -> RunConfig:
    return RunConfig(suite="gsm8k", policy=("marginal",), **{"target": "t", "drafter": "d", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": "atuo"}, "--device-map atuo: expected auto"),
        ({"device_map": "auto", "device": "cpu"}, "--device cpu with --device-map auto"),
        ({"device_map": "auto", "widen": 2}, "--widen 2 with --device-map auto"),
        ({"device_map": "auto", "target": None}, "embedded model"),
        ({"max_memory": "cpu=1GiB"}, "--max-memory without --device-map"),
        ({"offload_folder": "x"}, "--offload-folder without --device-map"),
        ({"device_map": "auto", "max_memory": "cpu"}, "expected DEVICE=SIZE"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        placement_of(of(**options))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected a JSON object"),
        ('{"lm_head": "gpu"}', "lm_head on 'gpu'; expected cpu, disk"),
        ('{"lm_head": 64}', "lm_head on 64"),
        ('{"lm_head": true}', "lm_head on True"),
    ],
)
def test_a_damaged_device_map_is_one_line(tmp_path: Path, written: str, said: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(written, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        placement_of(of(device_map=str(path)))
    assert said in str(caught.value)


def test_memory_is_read_in_the_units_it_is_written_in() -> None:
    assert parse_memory("0=70GiB, 1=1.5GB,cpu=200gib", 2) == {0: 70 << 30, 1: 1_500_000_000, "cpu": 200 << 30}
    assert parse_memory("cpu=12", 0) == {"cpu": 12}
    for text, said in (
        ("2=1GiB", "a GPU from 0 to 1"),
        ("disk=1GiB", "no such device"),
        ("0=1GiB,0=2GiB", "bounded twice"),
        ("0=lots", "expected DEVICE=SIZE"),
        ("", "expected DEVICE=SIZE"),
    ):
        with pytest.raises(UserError, match=said):
            parse_memory(text, 2)


def test_what_a_device_map_leaves_out_or_cannot_find_is_one_line(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: expected auto, balanced.*; there is no such file"):
        placement_of(of(device_map=str(tmp_path / "nowhere.json")))
    written = tmp_path / "map.json"
    written.write_text(json.dumps({"model.embed_tokens": "cpu", "model.layers.0": "disk"}))
    with pytest.raises(UserError, match="leaves modules on the disk: expected --offload-folder"):
        placement_of(of(device_map=str(written)))
    asked = placement_of(of(device_map=str(written), offload_folder=str(tmp_path / "off")))
    with pytest.raises(UserError, match=r"--device-map has no device for model.+; expected one for every module"):
        load(saved, asked)


def test_layers_are_counted_where_they_are() -> None:
    model = tiny_model()
    for places, expected in (
        ({"": "cpu"}, {"cpu": 3}),
        ({"model": 0, "lm_head": 1}, {"0": 3}),
        (
            {"model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2.mlp": "disk", "model.layers.2.self_attn": 0},
            {"0": 2, "cpu": 1, "disk": 1},
        ),
        ({}, {}),
    ):
        model.hf_device_map = places
        assert Placement.layers(model) == expected
