"""Checkpoints by hub name, against a small hub on this machine: what is fetched, and what is said when it is not."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from tiny_checkpoints import Checkpoints
from tiny_hub import Repository, TinyHub, tiny_hub

import ecospec
from ecospec.errors import UserError
from ecospec.harness import hub as hub_module
from ecospec.harness.hub import find_checkpoint

COMMIT, OLDER = "a" * 40, "b" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_FIND = """
import json, sys
from ecospec.errors import UserError
from ecospec.harness.hub import find_checkpoint
for arguments in json.loads(sys.argv[1]):
    options = arguments.pop() if isinstance(arguments[-1], dict) else {}
    try:
        found = find_checkpoint(*arguments, **options)
        print(json.dumps([str(found.folder), found.commit]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def index_of(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"tensor.{i}": shard for i, shard in enumerate(shards)}}).encode()


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    with tiny_hub() as running:
        yield running


@pytest.fixture
def find(hub: TinyHub, tmp_path: Path) -> Callable[..., list[Any]]:
    """Find checkpoints in a process of its own: the hub's library reads its settings when it is imported."""

    def run(*asked: list[Any], **settings: str) -> list[Any]:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(Path(ecospec.__file__).parent.parent),
            **settings,
        }
        done = subprocess.run(
            [sys.executable, "-c", _FIND, json.dumps(asked)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_one_set_of_weights_is_fetched_and_nothing_twice(hub: TinyHub, find: Callable[..., list[Any]]) -> None:
    hub.repositories["org/sharded"] = Repository(
        {
            "config.json": b"{}",
            "tokenizer.json": b"[]",
            "model.safetensors.index.json": index_of(*SHARDS),
            **{name: name.encode() for name in SHARDS},
            "consolidated.safetensors": b"again",
            "pytorch_model.bin": b"again",
            "original/model.safetensors": b"again",
            "original/params.json": b"again",
            "metal/model.bin": b"again",
            "model-q4.gguf": b"again",
            "onnx/model.onnx": b"again",
            "modeling_own.py": b"code",
        }
    )
    hub.repositories["org/one"] = Repository(
        {"config.json": b"{}", "model.safetensors": b"w", "pytorch_model.bin": b"x"}
    )
    hub.repositories["org/pickled"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"w"})
    (sharded, commit), *_ = find(["target", "org/sharded"], ["drafter", "org/one"])
    assert commit == COMMIT
    wanted = {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}
    assert {path.name for path in Path(sharded).iterdir()} == wanted
    assert hub.downloads == wanted | {"model.safetensors"}
    hub.served.clear()
    ((pickled, _),) = find(["drafter", "org/pickled"])
    assert {path.name for path in Path(pickled).iterdir()} == {"config.json", "pytorch_model.bin"}
    hub.served.clear()
    find(["target", "org/sharded"], ["target", "org/sharded", {"code": True}])
    assert hub.downloads == {"modeling_own.py"}  # all else is in the cache, and code was asked for now


def test_configs_alone_are_fetched_for_who_needs_no_weights(hub: TinyHub, find: Callable[..., list[Any]]) -> None:
    hub.repositories["org/name"] = Repository({"config.json": b"{}", "model.safetensors": b"w"})
    find(["target", "org/name", {"weights": False}])
    assert hub.downloads == {"config.json"}


def test_a_revision_is_pinned_and_its_commit_known(hub: TinyHub, find: Callable[..., list[Any]]) -> None:
    revisions = {"main": COMMIT, "v1": OLDER}
    hub.repositories["org/name"] = Repository({"config.json": b"{}", "model.safetensors": b"w"}, revisions)
    newest, tagged, pinned, wrong = find(*(["target", "org/name", revision] for revision in (None, "v1", OLDER, "v2")))
    assert newest[1] == COMMIT
    assert tagged[1] == pinned[1] == OLDER
    assert "no revision 'v2'" in wrong
    assert "--target-revision" in wrong


def test_a_broken_download_goes_on_where_it_ended(hub: TinyHub, find: Callable[..., list[Any]]) -> None:
    content = bytes(range(256)) * 100_000  # more than twice what the library writes at once
    hub.repositories["org/name"] = Repository(
        {"config.json": b"{}", "model.safetensors": content}, breaks={"model.safetensors"}
    )
    ((folder, _),) = find(["target", "org/name"])
    assert (Path(folder) / "model.safetensors").read_bytes() == content
    ranges = [asked for path, asked in hub.served if path == "model.safetensors"]
    assert ranges[0] is None
    assert int(str(ranges[1]).removeprefix("bytes=").split("-")[0]) > 0


def test_offline_the_cache_serves_what_it_holds(hub: TinyHub, find: Callable[..., list[Any]]) -> None:
    hub.repositories["org/name"] = Repository(
        {
            "config.json": b"{}",
            "model.safetensors.index.json": index_of(*SHARDS),
            **{name: name.encode() for name in SHARDS},
        }
    )
    ((folder, _),) = find(["target", "org/name"])
    hub.served.clear()
    again, absent, revision = find(
        ["target", "org/name"], ["target", "org/other"], ["target", "org/name", "v9"], HF_HUB_OFFLINE="1"
    )
    assert again == [folder, COMMIT]
    for line in (absent, revision):
        assert "HF_HUB_OFFLINE is set" in line
    assert "'v9'" in revision
    (Path(folder) / SHARDS[1]).unlink()
    (incomplete,) = find(["target", "org/name"], HF_HUB_OFFLINE="1")
    assert f"{SHARDS[1]} is missing" in incomplete
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    (down,) = find(["target", "org/other"], **unreachable)
    assert "cannot be reached" in down
    assert not hub.served


def test_a_cache_made_by_hand_is_used_offline(find: Callable[..., list[Any]], tmp_path: Path) -> None:
    repository = tmp_path / "home" / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for name in ("config.json", "model.safetensors"):
        (repository / "blobs" / f"blob-{name}").write_text("{}", encoding="utf-8")
        (snapshot / name).symlink_to(repository / "blobs" / f"blob-{name}")
    found, older = find(["target", "org/name"], ["target", "org/name", OLDER], HF_HUB_OFFLINE="1")
    assert found == [str(snapshot), COMMIT]
    assert OLDER in older
    (snapshot / "model.safetensors").unlink()
    (bare,) = find(["target", "org/name"], HF_HUB_OFFLINE="1")
    assert "neither model.safetensors nor pytorch_model.bin" in bare


def test_refusals_of_the_hub_are_one_line_each(hub: TinyHub, find: Callable[..., list[Any]]) -> None:
    hub.repositories["org/gated"] = Repository({"config.json": b"{}"}, gated=True)
    hub.repositories["org/gguf"] = Repository({"config.json": b"{}", "model.gguf": b"w"})
    hub.repositories["org/none"] = Repository({"README.md": b"nothing"})
    hub.repositories["org/outside"] = Repository(
        {"config.json": b"{}", "model.safetensors.index.json": index_of("../model.safetensors")}
    )
    names = ("org/gated", "org/unknown", "org/gguf", "org/none", "org/outside", "no name", "a/b/c", "./folder")
    said = dict(zip(names, find(*(["drafter", name] for name in names)), strict=True))
    assert "accept the licence" in said["org/gated"]
    assert "hf auth login" in said["org/gated"]
    assert f"{hub.url}/org/gated" in said["org/gated"]
    assert "no such repository" in said["org/unknown"]
    assert "neither model.safetensors nor pytorch_model.bin" in said["org/gguf"]
    assert "no config.json" in said["org/none"]
    assert "outside" in said["org/outside"]
    assert "no hub name" in said["no name"]
    assert "no such folder" in said["a/b/c"]
    assert "no such folder" in said["./folder"]
    for name, line in said.items():
        assert line.startswith(f"drafter {name}: ")
        assert "\n" not in line


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    """An error as the library builds it, from a response."""
    http = sys.modules[HfHubHTTPError.__mro__[1].__module__.split(".")[0]]
    request = http.Request("GET", "https://hub/api")
    return kind("an error", response=http.Response(status, request=request))


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk is full"),
        (chained(RuntimeError("transfer"), OSError(errno.ENOSPC, "x")), "disk is full"),
        (RuntimeError("Data error: No space left on device (os error 28)"), "HF_HOME"),
        (http_error(GatedRepoError, 403), "accept the licence"),
        (http_error(RepositoryNotFoundError, 404), "no such repository"),
        (http_error(HfHubHTTPError, 403), "hf auth login"),
        (http_error(HfHubHTTPError, 503), "status 503"),
        (LocalEntryNotFoundError("nothing"), "HF_HUB_OFFLINE"),  # what the tests run under
        (HfHubHTTPError.__mro__[1]("the peer closed the connection"), "goes on where it ended"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_errors_of_a_download_are_one_line_each(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"^target org/name: ") as raised:
        find_checkpoint("target", "org/name")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_bug_is_no_mistake_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise KeyError("bug")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(KeyError):
        find_checkpoint("target", "org/name")


def test_bars_are_drawn_on_a_terminal_though_commands_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    seen = []
    disable_progress_bars()
    try:
        for terminal in (True, False):
            monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
            with hub_module._bars():
                seen.append(are_progress_bars_disabled())
            assert are_progress_bars_disabled()
    finally:
        enable_progress_bars()
    assert seen == [False, True]


def test_a_folder_has_no_revision(checkpoints: Checkpoints) -> None:
    assert find_checkpoint("target", str(checkpoints.target)).commit is None
    with pytest.raises(UserError, match=r"--target-revision v1: .* is a folder here"):
        find_checkpoint("target", str(checkpoints.target), "v1")


def cached(home: Path, name: str, source: Path) -> None:
    """Put a checkpoint into a hub cache, as a download leaves it."""
    repository = home / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / COMMIT).symlink_to(source)


def test_a_run_by_hub_names_notes_the_commits(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ecospec.harness.runner.copy_bandwidth", lambda device: 2.0e10)
    cached(tmp_path / "cache", "org/target", checkpoints.target)
    cached(tmp_path / "cache", "org/head", checkpoints.drafter)
    ran = command(
        *("--suite", "gsm8k", "--policy", "confidence", "--data", "embedded", "--limit", 1, "--max-new-tokens", 4),
        *("--target", "org/target", "--drafter", "org/head", "--output", "run", "--target-revision", "main"),
    )
    assert ran.code == 0, ran.err
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["target"] == "org/target"
    assert manifest["target_commit"] == manifest["drafter_commit"] == COMMIT
    assert manifest["checkpoint_sha256"]
    assert manifest["drafter_sha256"]
    refused = command("--suite", "gsm8k", "--target", "org/target", "--drafter", "org/unknown", "--data", "embedded")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    assert "org/unknown" in refused.err
    refused = command("--suite", "gsm8k", "--data", "embedded", "--drafter-revision", "v1")
    assert refused.code == 2
    assert "--drafter-revision v1 without --drafter" in refused.err


def test_code_of_a_checkpoint_runs_only_where_it_is_asked_for(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for path in checkpoints.target.iterdir():
        (folder / path.name).symlink_to(path)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw |= {
        "model_type": "own_model",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"},
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "configuration_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise ValueError('own code ran')\n", encoding="utf-8"
    )
    arguments = ("--suite", "gsm8k", "--data", "embedded", "--target", folder, "--drafter", checkpoints.drafter)
    refused = command(*arguments)
    assert refused.code == 2
    assert "--trust-remote-code" in refused.err
    assert not (tmp_path / "ran").exists()
    asked = command(*arguments, "--trust-remote-code")
    assert asked.code == 2
    assert (tmp_path / "ran").exists()
