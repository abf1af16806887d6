"""Loading a target: an ordinary checkpoint folder works, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FEATURE_LAYERS, plain_forward, tiny_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ecospec.errors import UserError
from ecospec.harness.loading import LoadedTarget, load_target, target_view

PROMPT = [3, 1, 4, 1, 5]


def write_checkpoint(folder: Path, family: str = "qwen3_moe", **overrides: object) -> Path:
    tiny_model(family, **overrides).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "target"))


def load(name: str | Path, **options: object) -> LoadedTarget:
    return load_target(str(name), dtype=torch.float32, device="cpu", **options)  # type: ignore[arg-type]


def refusal(name: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        load(name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"target {name}: ")
    return message.removeprefix(f"target {name}: ")


def test_a_saved_checkpoint_says_what_the_library_says(saved: Path) -> None:
    loaded = load(saved, feature_layers=FEATURE_LAYERS)
    assert (loaded.name, loaded.widened) == (str(saved), 1)
    assert loaded.tokenizer.decode([2, 3]) == "w2 w3"
    assert loaded.target.feature_layers == FEATURE_LAYERS
    expected = plain_forward(tiny_model(), PROMPT).logits[0, -1]
    torch.testing.assert_close(loaded.target.new_session(9).prefill(PROMPT).logits[0], expected, atol=1e-4, rtol=0)


def test_a_widened_target_says_the_same_and_reads_more(saved: Path) -> None:
    narrow, wide = load(saved), load(saved, widen=3)
    assert wide.widened == 3
    assert wide.target.geometry.expert_bytes == 3 * narrow.target.geometry.expert_bytes
    torch.testing.assert_close(
        wide.target.new_session(9).prefill(PROMPT).logits,
        narrow.target.new_session(9).prefill(PROMPT).logits,
        atol=1e-4,
        rtol=0,
    )


def test_the_dtype_is_the_one_asked_for(saved: Path) -> None:
    loaded = load_target(str(saved), dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in loaded.target.model.parameters()} == {torch.bfloat16}


def test_predictors_are_told_the_geometry(saved: Path, tmp_path: Path) -> None:
    target = load(saved).target
    view = target_view(target, tmp_path)
    assert (view.moe_layers, view.experts, view.top_k) == (3, 8, 2)
    assert (view.vocab_size, view.hidden_size, view.bundle) == (64, 32, tmp_path)
    assert view.embedding is target.embedding


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "no config.json; expected a transformers checkpoint folder"


def test_a_name_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert message == "no such folder; expected a transformers checkpoint folder or a hub name"


@pytest.mark.parametrize(
    "facts",
    [
        {"model_type": "nothing-known"},
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
    ],
)
def test_a_config_that_describes_no_model_is_refused(folder: Path, facts: dict[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    assert refusal(folder).startswith("not loadable as a causal LM with a tokenizer (")


@pytest.mark.parametrize("content", [b"", b"{", b"\x10\0\0\0\0\0\0\0{}"])
def test_corrupted_weights_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert refusal(folder).startswith("not loadable as a causal LM with a tokenizer (")


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith("not loadable as a causal LM with a tokenizer (")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_a_missing_tokenizer_is_refused(family: str, tmp_path: Path) -> None:
    """The library would make up one that knows its special tokens alone and encodes every text to nothing."""
    folder = write_checkpoint(tmp_path / "target", family)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    message = refusal(folder)
    assert "tokenizer" in message
    assert "no vocabulary; expected tokenizer files" in message or message.startswith("not loadable as a causal LM")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(folder: Path) -> None:
    """The library would fill it with random numbers and go on."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.q_proj.weight"
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    assert refusal(folder) == f"the checkpoint lacks {name}, and 0 more tensors; expected all of the model's"


def test_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, path, metadata={"format": "pt"})
    assert refusal(folder) == "tensor model.norm.weight has shape (7,), expected (32,)"


def test_tied_embeddings_lack_nothing(tmp_path: Path) -> None:
    loaded = load(write_checkpoint(tmp_path / "tied", tie_word_embeddings=True))
    model = loaded.target.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_tensors_that_the_config_has_no_place_for_are_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "target")
    load(folder)
    assert not ours(caplog)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    load(folder)
    (said,) = ours(caplog)
    assert f"target {folder}: its config has no place for model.layers." in said


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ecospec"]


def test_loading_a_target_needs_nothing_else_imported(saved: Path) -> None:
    """What a target's layers go through is registered by what loads it, not by what happens to be imported too."""
    code = (
        "import torch; from ecospec.harness.loading import load_target; "
        f"load_target({str(saved)!r}, dtype=torch.float32, device='cpu')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
