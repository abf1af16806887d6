"""From JSONL text records to token windows for training.

A record is one JSON object a line with the fields ``source``, ``license`` and ``text`` (``.gz`` or plain).
Short records of one source are joined in groups by a blank line, as in a few-shot prompt, so that the
model meets at training time what a benchmark prompt looks like.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ecospec.errors import UserError

# What the embedded models may be trained on.
LICENSES = ("MIT", "Apache-2.0", "PSF-2.0", "CC-BY-4.0")
EXCLUDED_SOURCES = ("gpteacher",)
# How often a source is repeated in the stream: the embedded sample is GSM8K, and the standard library
# is a fifth of the text without being a suite.
SOURCE_WEIGHTS = {"gsm8k-train": 3.0, "cpython-3.11": 0.5}
HELD_OUT_SHARE = 0.02
HELD_OUT = f"in the {HELD_OUT_SHARE:.0%} of its records that are held out"
MAX_GROUP = 8


@dataclass(frozen=True)
class Corpus:
    """Token streams, one for training and one held out, with the places where a document begins.

    ``train`` and ``held_out`` are int32 [tokens]; ``train_starts`` and ``held_out_starts`` int64 [pieces].
    """

    train: npt.NDArray[np.int32]
    train_starts: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int32]
    held_out_starts: npt.NDArray[np.int64]
    sources: dict[str, int]
    sha256: str

    def windows(self, count: int, length: int, *, seed: int, step: int) -> npt.NDArray[np.int64]:
        """A batch [count, length] that depends on (seed, step) alone, so that a resumed run repeats it."""
        return _windows(self.train, self.train_starts, count, length, np.random.default_rng((seed, step)))

    def held_out_windows(self, count: int, length: int) -> npt.NDArray[np.int64]:
        """The same [count, length] held-out windows at every call."""
        return _windows(self.held_out, self.held_out_starts, count, length, np.random.default_rng(0), HELD_OUT)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a corpus file that the embedded models may be trained on.

    Raises:
        UserError: the file is missing, not JSONL, or a record lacks a field.
    """
    if not path.is_file():
        raise UserError(f"corpus {path}: no such file; expected JSON lines with source, license, text")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(_readable(path, lines), 1):
            try:
                record = json.loads(line)
                source, licence = record["source"], record["license"]
                for name in ("source", "license", "text"):
                    if not isinstance(record[name], str):
                        raise TypeError(f"{name} is no text")
                record["text"].encode()  # half of a surrogate pair is no text either
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"corpus {path}, line {number}: expected a JSON object with source, license and text ({error!r})"
                ) from error
            if licence in LICENSES and not source.startswith(EXCLUDED_SOURCES):
                yield record


def _readable(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """The lines of a file, with a damaged archive or encoding as a user's mistake."""
    try:
        yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"corpus {path}: not readable as text or gzip ({error})") from error


def grouped_documents(records: Sequence[dict[str, Any]], seed: int) -> list[tuple[str, str]]:
    """(source, document) pairs: records of a source shuffled and joined in groups of 1 to 8, then shuffled.

    Code stays one record a document.
    """
    rng = np.random.default_rng(seed)
    by_source: dict[str, list[str]] = defaultdict(list)
    for record in records:
        by_source[record["source"]].append(record["text"].strip())
    documents = []
    for source in sorted(by_source):
        texts = by_source[source]
        weight = SOURCE_WEIGHTS.get(source, 1.0)
        rounds = [texts] * int(weight)
        if weight % 1:
            rounds.append(texts[: int(len(texts) * (weight % 1))])
        for texts_of_round in rounds:
            order = rng.permutation(len(texts_of_round))
            at = 0
            while at < len(order):
                size = 1 if source.startswith("cpython") else int(rng.integers(1, MAX_GROUP + 1))
                group = [texts_of_round[i] for i in order[at : at + size]]
                documents.append((source, "\n\n".join(group)))
                at += size
    return [documents[i] for i in rng.permutation(len(documents))]


def build_corpus(path: Path, tokenizer: Any, *, piece: int = 2048, seed: int = 0) -> Corpus:
    """Tokenise a corpus; documents end with EOS, and long ones are cut into pieces of ``piece`` tokens."""
    records = list(read_records(path))
    if not records:
        raise UserError(f"corpus {path}: no record with a licence among {', '.join(LICENSES)}")
    rng = np.random.default_rng(seed)
    held = rng.random(len(records)) < HELD_OUT_SHARE
    streams: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []
    sources: dict[str, int] = defaultdict(int)
    for part in (False, True):
        documents = grouped_documents([r for r, h in zip(records, held, strict=True) if h == part], seed)
        ids: list[int] = []
        starts: list[int] = []
        texts = [text for _, text in documents]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        for (source, _), tokens in zip(documents, encoded, strict=True):
            starts.extend(range(len(ids), len(ids) + len(tokens), piece))
            ids.extend(tokens)
            ids.append(tokenizer.eos_token_id)
            if not part:
                sources[source] += len(tokens)
        streams.append((np.asarray(ids, dtype=np.int32), np.asarray(starts, dtype=np.int64)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (train, train_starts), (held_out, held_out_starts) = streams
    return Corpus(train, train_starts, held_out, held_out_starts, dict(sources), digest)


def _windows(
    stream: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    count: int,
    length: int,
    rng: np.random.Generator,
    part: str = "to train on",
) -> npt.NDArray[np.int64]:
    usable = starts[starts <= len(stream) - length]
    if not len(usable):
        raise UserError(
            f"the corpus has {len(stream)} tokens {part}, fewer than one window of {length}; expected a larger one"
        )
    chosen = rng.choice(usable, size=count)
    return np.stack([stream[s : s + length] for s in chosen]).astype(np.int64)
