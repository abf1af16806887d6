"""Where the rows of a suite come from: the embedded sample, a local file or folder, or the hub.

Nothing falls back from one to another: what was asked for is what is run, and `Rows.source` says what it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.suites.rows import Row, check_row, read_rows

EMBEDDED, HUB = "embedded", "hub"
PARQUET, JSONL = (".parquet",), (".jsonl", ".json")


@dataclass(frozen=True)
class Rows:
    """The rows of a suite.

    Attributes:
        source: what a report says of them.
        sha256: of the file's bytes, or of the rows themselves where there is no single file.
        revision: the hub's commit; empty for other sources.
    """

    rows: list[Row]
    source: str
    sha256: str
    revision: str = ""


def rows_of_path(path: Path, columns: Mapping[str, str]) -> Rows:
    """The rows of a JSON lines or parquet file, or of a folder that holds files of one of these kinds.

    Raises:
        UserError: see `read_rows`; also for a folder with no such file, or with both kinds.
    """
    try:
        folder = path.is_dir()
    except (OSError, ValueError):  # no path that could be: reading it says why
        folder = False
    if not str(path).strip() or str(path) == ".":
        raise UserError("data '' names no file; expected 'embedded', 'hub', or the path of a file or folder")
    if not folder:
        if path.suffix in PARQUET and path.is_file():
            return _parquet_rows([path], columns, str(path))
        rows, digest = read_rows(path, columns)
        return Rows(rows, str(path), digest)
    parquet = sorted(file for file in path.rglob("*") if file.suffix in PARQUET and file.is_file())
    jsonl = sorted(file for file in path.rglob("*") if file.suffix in JSONL and file.is_file())
    if parquet and not jsonl:
        return _parquet_rows(parquet, columns, str(path))
    if len(jsonl) != 1 or parquet:
        raise UserError(
            f"data folder {str(path)!r} holds {len(jsonl)} JSON lines and {len(parquet)} parquet files; "
            "expected one JSON lines file, or parquet files alone"
        )
    rows, digest = read_rows(jsonl[0], columns)
    return Rows(rows, str(jsonl[0]), digest)


def _parquet_rows(paths: list[Path], columns: Mapping[str, str], source: str) -> Rows:
    import pyarrow
    import pyarrow.parquet

    rows: list[Row] = []
    for path in paths:
        try:
            file = pyarrow.parquet.ParquetFile(path)
            # The suite's columns only: the others may be images, or of types that are no JSON.
            table = file.read(columns=[name for name in file.schema_arrow.names if name in columns])
            found = table.to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise UserError(f"data file {str(path)!r}: not readable as parquet ({_first_line(error)})") from None
        for number, row in enumerate(found):
            check_row(row, columns, f"data file {str(path)!r}, row {number}")
        rows += found
    if not rows:
        raise UserError(f"data {source!r} has no rows")
    return Rows(rows, source, rows_hash(rows))


def rows_of_hub(task: Mapping[str, Any], columns: Mapping[str, str], revision: str | None) -> Rows:
    """The rows of a suite's own data set, from the hub or its filled cache.

    Args:
        task: the task file: ``dataset_path``, ``dataset_name`` and ``test_split``, or ``metadata.hub_file``.
        revision: a branch, tag or commit; None for the newest.

    Raises:
        UserError: it cannot be reached and is not cached, or it is not the data set that the suite expects.
    """
    hub_file = task["metadata"].get("hub_file")
    name = hub_file["repo"] if hub_file else task["dataset_path"]
    try:
        if hub_file:
            return _rows_of_hub_file(hub_file, columns, revision)
        return _rows_of_dataset(task, columns, revision)
    except UserError:
        raise
    except Exception as error:  # the libraries raise anything from ConnectionError to ValueError
        raise UserError(
            f"data set {name}: not to be had from the hub ({_first_line(error)}); give --data with a local copy in its "
            "columns, or fill the cache (HF_HOME) on a machine with a network and set HF_HUB_OFFLINE=1 here"
        ) from error


def _rows_of_dataset(task: Mapping[str, Any], columns: Mapping[str, str], revision: str | None) -> Rows:
    import datasets

    path, config = task["dataset_path"], task.get("dataset_name")
    builder = datasets.load_dataset_builder(path, config, revision=revision)
    builder.download_and_prepare()
    data = builder.as_dataset(split=task.get("test_split") or task["validation_split"])
    heavy = [name for name, feature in data.features.items() if type(feature).__name__ in ("Image", "Audio", "Video")]
    rows = [dict(row) for row in data.remove_columns(heavy)]
    for number, row in enumerate(rows):
        check_row(row, columns, f"data set {path}, row {number}")
    commit = str(builder.hash or revision or "")
    return Rows(rows, f"hub {path}{f' {config}' if config else ''} at {commit[:12]}", rows_hash(rows), commit)


def _rows_of_hub_file(hub_file: Mapping[str, str], columns: Mapping[str, str], revision: str | None) -> Rows:
    from huggingface_hub import hf_hub_download

    local = hf_hub_download(hub_file["repo"], hub_file["path"], repo_type=hub_file["type"], revision=revision)
    parts = Path(local).parts
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts else str(revision or "")
    rows, digest = read_rows(Path(local), columns)
    return Rows(rows, f"hub {hub_file['repo']} {hub_file['path']} at {commit[:12]}", digest, commit)


def rows_hash(rows: list[Row]) -> str:
    """SHA-256 of rows, whatever file they came in."""
    text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str) + "\n" for row in rows)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
