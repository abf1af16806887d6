"""Routing traces: token ids with the experts that a target routed them to, on disk.

A trace is a folder: ``manifest.json`` ties it to a target, ``index.jsonl`` has one line a shard with its hash and
the ids of its texts, and ``shards/`` holds the arrays as safetensors. A shard is written whole, renamed into place
and only then listed, so that a kill loses at most the texts that were not yet in one, and going on gives the same
files as never having stopped. A token costs 4 + L · K bytes (2 · L · K where a layer has more than 256 experts).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from ecospec.errors import UserError
from ecospec.predictors.checkpoint import target_facts
from ecospec.predictors.contract import TargetView

SCHEMA = 1
MANIFEST, INDEX, SHARDS = "manifest.json", "index.jsonl", "shards"
SHARD_TOKENS = 1 << 16
"""A shard is closed with the text that brings it to this many tokens."""


@dataclass(frozen=True)
class TracedText:
    """One text.

    Attributes:
        id: unique in its trace.
        tokens: int32 [n].
        prompt_tokens: how many of them were given; the target wrote the others.
        routing: uint8 or uint16 [L, n, K], ascending in each token and layer.
    """

    id: str
    tokens: npt.NDArray[np.int32]
    prompt_tokens: int
    routing: npt.NDArray[np.unsignedinteger[Any]]

    def __post_init__(self) -> None:
        if self.routing.ndim != 3 or self.routing.shape[1] != len(self.tokens) or not len(self.tokens):
            raise ValueError(f"routing {self.routing.shape} for {len(self.tokens)} tokens; expected [L, n, K], n > 0")
        if not 0 <= self.prompt_tokens <= len(self.tokens):
            raise ValueError(f"{self.prompt_tokens} prompt tokens of {len(self.tokens)}")

    @property
    def given(self) -> str:
        """SHA-256 of the tokens that were given: the prompt, or all of a text that was only read.

        It tells texts apart across traces, and is the same for two answers to one prompt.
        """
        return hashlib.sha256(self.tokens[: self.prompt_tokens or None].tobytes()).hexdigest()

    @property
    def judged_from(self) -> int:
        """Index of the first token that a predictor is judged by: the first that the target wrote itself, as those
        that it meets while decoding; of a text that was only read, the second."""
        return self.prompt_tokens if 0 < self.prompt_tokens < len(self.tokens) else 1


def expert_dtype(experts: int) -> type[np.unsignedinteger[Any]]:
    """What holds an expert's index."""
    return np.uint8 if experts <= 256 else np.uint16


class TraceWriter:
    """Appends texts to a trace. Close it, or use it as a context manager: only then the last shard is written."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], target: TargetView, *, resume: bool = False) -> None:
        """Begin a trace, or go on with one.

        Args:
            facts: what else the manifest says; a trace is gone on with only if they are the same.

        Raises:
            UserError: the folder is in use, holds no trace to go on with, or one of other facts.
        """
        self.folder = folder
        self._dtype = expert_dtype(target.experts)
        self._pending: list[TracedText] = []
        manifest = {"kind": "ecospec trace", "schema": SCHEMA, "target": target_facts(target), **facts}
        if resume:
            found = read_manifest(folder)
            different = [key for key in manifest.keys() | found.keys() if manifest.get(key) != found.get(key)]
            if different:
                key = sorted(different)[0]
                raise UserError(
                    f"--resume: trace {folder} was made with {key} = {found.get(key)!r}, now it is "
                    f"{manifest.get(key)!r}; expected the same options"
                )
            self.shards = read_index(folder)
            with _told(folder):
                _write_atomically(folder / INDEX, b"".join(map(_line, self.shards)))  # without a line cut short
        else:
            self.shards = []
            with _told(folder):
                if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                    raise UserError(f"trace {folder}: not an empty folder; expected a new one, or --resume")
                (folder / SHARDS).mkdir(parents=True)
                _write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        self.done = {name for shard in self.shards for name in shard.ids}

    def append(self, text: TracedText) -> None:
        """Add a text; a full shard is written."""
        if text.id in self.done:
            raise ValueError(f"{text.id} is in the trace already")
        self.done.add(text.id)
        self._pending.append(text)
        if sum(len(each.tokens) for each in self._pending) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard."""
        if not self._pending:
            return
        name = f"{len(self.shards):05d}.safetensors"
        data = save_tensors(
            {
                "tokens": np.concatenate([text.tokens for text in self._pending]).astype(np.int32),
                "lengths": np.array([len(text.tokens) for text in self._pending], dtype=np.int32),
                "prompt_lengths": np.array([text.prompt_tokens for text in self._pending], dtype=np.int32),
                # By token first, so that a text is one piece of the file.
                "routing": np.ascontiguousarray(
                    np.concatenate([text.routing for text in self._pending], axis=1).transpose(1, 0, 2), self._dtype
                ),
            }
        )
        tokens = sum(len(text.tokens) for text in self._pending)
        shard = Shard(name, hashlib.sha256(data).hexdigest(), tokens, tuple(text.id for text in self._pending))
        with _told(self.folder):
            _write_atomically(self.folder / SHARDS / name, data)
            with (self.folder / INDEX).open("ab") as index:
                index.write(_line(shard))
                index.flush()
                os.fsync(index.fileno())
        self.shards.append(shard)
        self._pending = []

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:  # after an error the pending texts are lost, as after a kill: a resumed trace has them again
            self.flush()


@dataclass(frozen=True)
class Shard:
    """A line of the index."""

    name: str
    sha256: str
    tokens: int
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """A trace on disk, checked against a target."""

    folder: Path
    manifest: Mapping[str, Any]
    shards: tuple[Shard, ...] = field(repr=False)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def texts(self) -> int:
        """Texts in all shards."""
        return sum(len(shard.ids) for shard in self.shards)

    def __iter__(self) -> Iterator[TracedText]:
        """All texts in order.

        Raises:
            UserError: a shard is missing or damaged.
        """
        for shard in self.shards:
            yield from _read_shard(self.folder, shard, self.manifest["target"])


def open_trace(folder: Path, target: TargetView) -> Trace:
    """Open a trace for a target; the shards are checked as they are read.

    Raises:
        UserError: there is none, it is empty or damaged, or it is of another target.
    """
    manifest = read_manifest(folder)
    recorded = manifest["target"]
    for name, expected in target_facts(target).items():
        if recorded.get(name) != expected:
            raise UserError(f"trace {folder}: made from a target with {name} = {recorded.get(name)}, not {expected}")
    shards = read_index(folder)
    if not shards:
        raise UserError(f"trace {folder}: it has no texts; expected a finished trace")
    return Trace(folder, manifest, tuple(shards))


def read_manifest(folder: Path) -> dict[str, Any]:
    """A trace's manifest.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"trace {folder}: no {MANIFEST}; expected a folder that ecospec-bench trace has written"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"trace {folder}: {MANIFEST} is damaged ({' '.join(str(error).split())})") from error
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if kind != "ecospec trace" or not isinstance(manifest.get("target"), dict):
        raise UserError(f"trace {folder}: {MANIFEST} is not that of a trace")
    if manifest.get("schema") != SCHEMA:
        raise UserError(f"trace {folder}: written in format {manifest.get('schema')}, expected {SCHEMA}")
    found: dict[str, Any] = manifest
    return found


def read_index(folder: Path) -> list[Shard]:
    """The shards of a trace; a last line cut short by a kill is dropped.

    Raises:
        UserError: another line is damaged.
    """
    try:
        lines = (folder / INDEX).read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"trace {folder}: {INDEX} is not readable ({error.strerror})") from error
    shards: list[Shard] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            raw = json.loads(line)
            ids = raw["ids"]
            if not (isinstance(ids, list) and ids and all(isinstance(name, str) for name in ids)):
                raise ValueError("its ids are no list of texts")
            if raw["name"] != f"{len(shards):05d}.safetensors" or not isinstance(raw["tokens"], int):
                raise ValueError(f"it names shard {raw['name']!r}")
            shards.append(Shard(raw["name"], str(raw["sha256"]), raw["tokens"], tuple(ids)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"trace {folder}: {INDEX}, line {number}, is damaged ({error})") from error
    return shards


def _read_shard(folder: Path, shard: Shard, geometry: Mapping[str, int]) -> Iterator[TracedText]:
    path = folder / SHARDS / shard.name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"trace {folder}: shard {shard.name} is not readable ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise UserError(f"trace {folder}: shard {shard.name} is damaged: its hash is not the one in {INDEX}")
    try:
        arrays = load_tensors(data)
        tokens, routing, lengths, prompts = (
            arrays[name] for name in ("tokens", "routing", "lengths", "prompt_lengths")
        )
    except (SafetensorError, KeyError) as error:
        raise UserError(f"trace {folder}: shard {shard.name} is no shard of a trace ({error!r})") from error
    expected = (shard.tokens, geometry["moe_layers"], geometry["top_k"])
    if routing.shape != expected or tokens.shape != expected[:1]:
        raise UserError(f"trace {folder}: shard {shard.name} has routing {routing.shape}, expected {expected}")
    each = (len(shard.ids),)
    if (
        any(array.dtype.kind not in "iu" for array in (tokens, routing, lengths, prompts))
        or lengths.shape != each
        or prompts.shape != each
        or lengths.min() < 1
        or lengths.sum() != shard.tokens
        or (prompts < 0).any()
        or (prompts > lengths).any()
        or not 0 <= tokens.min() <= tokens.max() < geometry["vocab_size"]
        or routing.max(initial=0) >= geometry["experts"]
    ):
        raise UserError(
            f"trace {folder}: shard {shard.name} has lengths, tokens or experts that no text of its target has"
        )
    start = 0
    for name, end, prompt in zip(shard.ids, np.cumsum(lengths).tolist(), prompts.tolist(), strict=True):
        yield TracedText(name, tokens[start:end], prompt, routing[start:end].transpose(1, 0, 2))
        start = end


def _line(shard: Shard) -> bytes:
    facts = {"name": shard.name, "sha256": shard.sha256, "tokens": shard.tokens, "ids": list(shard.ids)}
    return (json.dumps(facts) + "\n").encode()


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"trace {folder}: cannot be written ({error.strerror})") from error


def _write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def pack_routing(routing: npt.NDArray[np.integer[Any]], experts: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Routing [L, n, K] as a trace holds it: ascending, in the smallest type."""
    packed: npt.NDArray[np.unsignedinteger[Any]] = np.sort(routing, axis=-1).astype(expert_dtype(experts))
    return packed
