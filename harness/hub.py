"""Checkpoints by hub name: what a run needs of a repository is fetched into the hub's cache, and loaded as a folder.

Fetched are the configs, the tokenizer and one set of weights in a form that transformers loads: the shards of a
safetensors index or ``model.safetensors``, else the same of ``pytorch_model.bin``. Other formats and the folders of a
repository, which hold the same weights once more, are left. An interrupted download goes on where it ended.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ecospec.errors import UserError, one_line
from ecospec.predictors.pretrained import check_folder

SMALL: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Configs, tokenizers, chat templates and the indices of shards."""
CODE: Final = ("*.py",)
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
"""In the order in which they are looked for; each can also be the shards that ``NAME.index.json`` names."""
_HTTP_ERROR: Final = HfHubHTTPError.__mro__[1]
"""What the hub's HTTP client raises: its package is another one from huggingface_hub 2 on."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder here, and the commit that it is of; None where it is the user's own folder."""

    folder: Path
    commit: str | None


def find_checkpoint(
    what: str, name: str, revision: str | None = None, *, weights: bool = True, code: bool = False
) -> Checkpoint:
    """The folder of a checkpoint, fetched where ``name`` is a hub name.

    A name is resolved once in a process, so that a branch which moves meanwhile does not give two versions.

    Args:
        what: begins messages and names the option, such as ``target``.
        revision: branch, tag or commit; None for the newest.
        weights: whether the weights are needed too.
        code: whether the repository's own Python files are fetched.

    Raises:
        UserError: nothing of that name, no access, no network, or no room; one line that says which.
    """
    if _exists(name):  # what is in it is looked at by what loads it
        if revision is not None:
            raise UserError(
                f"--{what}-revision {revision}: {what} {name} is a folder here; expected a hub name, or no revision"
            )
        return Checkpoint(Path(name), None)
    check_folder(what, name)
    return _fetched(what, name, revision, weights, code)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


@lru_cache(maxsize=64)
def _fetched(what: str, name: str, revision: str | None, weights: bool, code: bool) -> Checkpoint:
    with _bars(), _as_user_errors(what, name, revision):
        folder = _snapshot(name, revision, (*SMALL, *(CODE if code else ())))
        commit = folder.name
        if not (folder / "config.json").is_file():
            raise UserError(f"{what} {name}: it has no config.json; expected a transformers checkpoint{_offline()}")
        if weights:
            _fetch_weights(what, name, commit, folder)
    return Checkpoint(folder, commit)


def _fetch_weights(what: str, name: str, commit: str, folder: Path) -> None:
    """Fetch the first of `WEIGHTS` that the repository has."""
    for file in WEIGHTS:
        index = folder / f"{file}.index.json"
        files = _shards(what, name, index) if index.is_file() else (file,)
        why = _offline()
        try:
            _snapshot(name, commit, files)
        except LocalEntryNotFoundError as error:  # what is cached of them may be enough
            why = why or f"; {constants.ENDPOINT} cannot be reached ({_root(error)})"
        missing = [each for each in files if not (folder / each).is_file()]
        if not missing:
            return
        if index.is_file():
            raise UserError(
                f"{what} {name}: {missing[0]} is missing, and {len(missing) - 1} more of the {len(files)} files that "
                f"{index.name} names{why}"
            )
    raise UserError(f"{what} {name}: it has neither {' nor '.join(WEIGHTS)}, whole or in shards{why}")


def _shards(what: str, name: str, index: Path) -> tuple[str, ...]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = tuple(sorted(set(places.values())))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{what} {name}: {index.name} has no weight_map from tensor names to files") from error
    if not all(isinstance(shard, str) and Path(shard).name == shard for shard in shards):
        raise UserError(f"{what} {name}: {index.name} names files outside the repository's top folder")
    return shards


def _snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The snapshot's folder in the cache, with the files at the top of the repository that the patterns match."""
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            local_files_only=constants.HF_HUB_OFFLINE,  # else some versions of the library ask for a list all the same
        )
    except LocalEntryNotFoundError as error:
        # Offline, with a snapshot that lacks some of the matching files: whether a needed one is among them is seen
        # by what is asked for next.
        partial = getattr(error, "snapshot_path", None)
        if partial is None:
            raise
        found = partial
    return Path(found)


@contextmanager
def _bars() -> Iterator[None]:
    """Let the hub draw its progress bars, which commands switch off with those of loading."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    wanted = sys.stderr.isatty() and constants.HF_HUB_DISABLE_PROGRESS_BARS is not True
    silent = wanted and are_progress_bars_disabled()
    if silent:
        enable_progress_bars()
    try:
        yield
    finally:
        if silent:
            disable_progress_bars()


@contextmanager
def _as_user_errors(what: str, name: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = _said(what, name, revision, error)
        if said is None:
            raise
        raise UserError(f"{what} {name}: {said}") from error


def _said(what: str, name: str, revision: str | None, error: Exception) -> str | None:
    """What the user has to know of an error of the hub's; None for one that is not."""
    page = f"{constants.ENDPOINT}/{name}"
    if _disk_full(error):
        return (
            f"the disk is full, at {constants.HF_HUB_CACHE}; make room there, or set HF_HOME to a folder with more, "
            "and the same command goes on"
        )
    if isinstance(error, HFValidationError):
        return "no such folder, and no hub name either; expected a checkpoint folder or ORGANISATION/NAME"
    if isinstance(error, GatedRepoError):
        return (
            f"access to it is granted by its owners: accept the licence at {page}, log in with `hf auth login` (or "
            "set HF_TOKEN), and run the same command"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision!r}; expected a branch, tag or commit of {page}, see --{what}-revision"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"no such folder, and no such repository at {constants.ENDPOINT}, or a private one; expected a checkpoint "
            "folder or ORGANISATION/NAME (a private one needs `hf auth login`)"
        )
    if isinstance(error, DisabledRepoError):
        return f"its repository has been disabled, see {page}"
    if isinstance(error, LocalEntryNotFoundError):
        at = "" if revision is None else f" at revision {revision!r}"
        if huggingface_hub.is_offline_mode():
            return (
                f"no such folder, and it is not in the hub's cache ({constants.HF_HUB_CACHE}){at}; HF_HUB_OFFLINE is "
                "set, so that nothing is downloaded"
            )
        return (
            f"no such folder, it is not in the hub's cache{at}, and {constants.ENDPOINT} cannot be reached "
            f"({_root(error)})"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        hint = "; log in with `hf auth login`, or set HF_TOKEN" if status in (401, 403) else ""
        return f"the hub answered with status {status} ({one_line(error)}){hint}"
    if isinstance(error, (_HTTP_ERROR, OSError)) or type(error).__module__.startswith(("hf_xet", "huggingface_hub")):
        return f"the download broke off ({_root(error)}); the same command goes on where it ended"
    return None


def _disk_full(error: BaseException | None) -> bool:
    """Whether it, or what it came from, is a lack of room; the transfer library has no error type for that."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _root(error: BaseException) -> str:
    """What was first, in short."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {one_line(error)}"


def _offline() -> str:
    return "; HF_HUB_OFFLINE is set, so that nothing is downloaded" if huggingface_hub.is_offline_mode() else ""
