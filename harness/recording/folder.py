"""A recording on disk: ``manifest.json``, ``index.jsonl`` with a line a request, and ``requests/`` with their arrays.

A request's file is written whole, renamed into place and only then listed, so that a kill loses at most the request in
flight, and going on gives the same files as never having stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ecospec.errors import UserError
from ecospec.harness.checked import first_problem
from ecospec.harness.outputs import check_folder
from ecospec.harness.recording.checking import check_belongs, check_manifest, check_request
from ecospec.harness.recording.steps import RecordedRequest, from_bytes, to_bytes
from ecospec.harness.writing import PARTIAL, alone_in, append_text, is_unused, write_json, write_text

KIND, SCHEMA = "ecospec recording", 1
MANIFEST, INDEX, REQUESTS = "manifest.json", "index.jsonl", "requests"


@dataclass(frozen=True)
class Entry:
    """One request of a recording.

    Attributes:
        id: the request's. file: under the folder. sha256: of the file.
        prompt: what tells its prompt from others; see `prompt_key`.
        ties: positions at which the choice of a pass over the tree was not plain decoding's.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    id: str
    file: str
    sha256: str
    prompt: str
    prompt_tokens: Annotated[int, Field(ge=0)]
    ties: Annotated[int, Field(ge=0)]


_ENTRY = TypeAdapter(Entry)


@contextmanager
def recording_into(folder: Path, facts: Mapping[str, Any], *, resume: bool) -> Iterator[RecordingWriter]:
    """A recording to add to, in a folder that no other process has.

    Raises:
        UserError: see `RecordingWriter`; also when another process is recording into the folder.
    """
    check_output(folder, resume=resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written ({error.strerror})") from error
    with alone_in(folder):
        yield RecordingWriter(folder, facts, resume=resume)


def check_output(folder: Path, *, resume: bool) -> None:
    """Check the folder of a recording before its parts are loaded; nothing is written.

    Raises:
        UserError: a new one is in use or cannot be made; one to go on with holds no recording, or a damaged one.
    """
    try:
        if resume:
            read_manifest(folder)
            for entry in read_index(folder):  # what is not there any more cannot be gone on with
                read_listed(folder, entry)
        elif folder.exists() and (not folder.is_dir() or not is_unused(folder)):
            raise UserError(f"--output {folder}: not an empty folder; expected a new one, or --resume")
        else:
            check_folder(f"--output {folder}", folder)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written ({error.strerror})") from error


class RecordingWriter:
    """Appends requests to a recording."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a recording, or go on with one.

        Args:
            facts: what the manifest says; a recording is gone on with only if they are the same.

        Raises:
            UserError: the folder holds no recording to go on with, or one of other facts; or it cannot be written.
        """
        self.folder = folder
        manifest = json.loads(json.dumps({"kind": KIND, "schema": SCHEMA, **facts}))
        if resume:
            found = read_manifest(folder)
            different = sorted(key for key in manifest.keys() | found.keys() if manifest.get(key) != found.get(key))
            if different:
                key = different[0]
                raise UserError(
                    f"--resume: {folder} was recorded with {key} = {found.get(key)!r}, now it is "
                    f"{manifest.get(key)!r}; expected the same command"
                )
        if not resume:  # first of all, so that what a kill leaves can be gone on with or begun again
            write_json(folder / MANIFEST, manifest)
        try:
            (folder / REQUESTS).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {folder}: cannot be written ({error.strerror})") from error
        self.entries = read_index(folder) if resume else []
        write_text(folder / INDEX, "".join(json.dumps(asdict(entry)) + "\n" for entry in self.entries))

    @property
    def done(self) -> set[str]:
        """Ids of the requests that are in it."""
        return {entry.id for entry in self.entries}

    def add(self, request_id: str, prompt: str, prompt_tokens: int, request: RecordedRequest, ties: int) -> None:
        """Write one request."""
        data = to_bytes(request)
        name = file_name(len(self.entries))
        _write(self.folder / name, data)
        entry = Entry(request_id, name, hashlib.sha256(data).hexdigest(), prompt, prompt_tokens, ties)
        append_text(self.folder / INDEX, json.dumps(asdict(entry)) + "\n")
        self.entries.append(entry)


@dataclass(frozen=True)
class Recording:
    """A recording that was opened to be read."""

    folder: Path
    manifest: dict[str, Any]
    entries: tuple[Entry, ...]

    def requests(self) -> Iterator[tuple[Entry, RecordedRequest]]:
        """All requests, one after another.

        Raises:
            UserError: a file is missing, damaged, or another than was listed.
        """
        width: int | None = None
        for entry in self.entries:
            path = self.folder / entry.file
            request = from_bytes(read_listed(self.folder, entry), path)
            try:
                check_request(request)
                check_belongs(request, self.manifest)
                found = None if request.states is None else request.states.shape[1]
                if None not in (found, width) and found != width:
                    raise ValueError(f"states of width {found}, expected the {width} of the others")
                width = width or found
            except ValueError as error:
                raise UserError(f"{path}: not a request of this recording ({error}); record it anew") from error
            yield entry, request


def read_listed(folder: Path, entry: Entry) -> bytes:
    """The file of a request that the index lists.

    Raises:
        UserError: it is missing, or another than was listed.
    """
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror}); record it anew") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise UserError(f"{path}: not the file that was recorded; record it anew")
    return data


def open_recording(folder: Path) -> Recording:
    """Open a recording.

    Raises:
        UserError: there is none, it is damaged, or it has no request.
    """
    manifest = read_manifest(folder)
    entries = read_index(folder)
    if not entries:
        raise UserError(f"recording {folder}: no request in it yet; go on with it by --resume")
    if len(entries) > manifest["outputs"]:
        raise UserError(
            f"{folder / INDEX}: lists {len(entries)} requests, expected at most the {manifest['outputs']} of "
            f"{MANIFEST}; record it anew"
        )
    return Recording(folder, manifest, tuple(entries))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a recording.

    Raises:
        UserError: there is none, it is another thing's, or damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except FileNotFoundError:
        raise UserError(f"{folder}: no recording (no {MANIFEST}); expected what 'ecospec-bench record' wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict) or found.get("kind") != KIND or found.get("schema") != SCHEMA:
        raise UserError(f"{path}: not the manifest of a recording of this version; expected kind {KIND!r}")
    try:
        check_manifest(text)
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({first_problem(error)}); record it anew") from error
    return found


def read_index(folder: Path) -> list[Entry]:
    """The requests that are listed; a last line cut short by a kill is dropped.

    Raises:
        UserError: another line is damaged, or lists what is not the request of its place.
    """
    path = folder / INDEX
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:  # killed before the first request
        return []
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror})") from error
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = _ENTRY.validate_json(line)
        except (ValidationError, RecursionError) as error:
            if number == len(lines):  # no newline after it: the write was cut short
                break
            raise UserError(f"{path}, line {number}: damaged ({first_problem(error)}); record it anew") from error
        # A further request gets the number of its line: any other place would have it overwrite one.
        expected = file_name(len(entries))
        if entry.file != expected:
            raise UserError(f"{path}, line {number}: lists {entry.file!r}, expected {expected}; record it anew")
        if any(entry.id == other.id for other in entries):
            raise UserError(f"{path}, line {number}: lists request {entry.id!r} again; record it anew")
        entries.append(entry)
    return entries


def file_name(number: int) -> str:
    """Where the arrays of a recording's request lie, by its place in the index from 0."""
    return f"{REQUESTS}/{number:05d}.safetensors"


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
