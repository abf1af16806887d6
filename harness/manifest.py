"""The manifest of a run: all that is needed to say what was measured, written before the first token."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ecospec.harness.writing import write_json

PACKAGES = ("ecospec", "torch", "transformers", "tokenizers", "numpy", "lm-eval", "datasets", "pluggy")
HASH_WHOLE_BELOW_BYTES = 1 << 30


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can move a figure."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_revision() -> str | None:
    """The revision of the checkout that this code runs from, with ``+changes``; None outside one."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # an installed copy inside somebody else's checkout
    revision = git("rev-parse", "HEAD")
    return f"{revision}+changes" if revision and git("status", "--porcelain", "-uno") else revision


def device_facts(device: str) -> dict[str, Any]:
    """What the run is measured on."""
    import torch

    facts: dict[str, Any] = {
        "device": device,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    if device.startswith("cuda"):
        facts["name"] = torch.cuda.get_device_name(device)
        facts["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        facts["cuda"] = torch.version.cuda
    else:
        facts["name"] = _cpu_name()
        facts["cores"] = os.cpu_count()
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux; the name from the platform module has to do
    return platform.processor() or platform.machine()


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over a checkpoint folder's files; of files above 1 GiB only name and size."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        if size < HASH_WHOLE_BELOW_BYTES:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def folder_hash(path: object) -> str | None:
    """`checkpoint_hash` of what is a local folder, None of anything else."""
    return checkpoint_hash(Path(path)) if isinstance(path, str | Path) and Path(path).is_dir() else None


def text_hash(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def prompts_hash(prompts: Iterable[Sequence[int]]) -> str:
    """SHA-256 over the rendered prompts' token ids: a chat template or an exemplar changes it."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(json.dumps(list(ids)).encode())
    return digest.hexdigest()


def write_manifest(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write ``manifest.json`` with argv, versions, revision and time added; returns what was written."""
    manifest = {
        **facts,
        "argv": sys.argv,
        "versions": versions(),
        "git_revision": git_revision(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(folder / "manifest.json", manifest)
    return manifest
