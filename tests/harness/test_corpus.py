"""The training corpus: what may be in it, how records become documents, and that a batch is its step's alone."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec.errors import UserError
from ecospec.harness.training.corpus import build_corpus, grouped_documents, read_records
from ecospec.harness.training.drafter import draft_vocabulary


class Bytes:
    """A tokenizer of bytes; 0 ends a document."""

    eos_token_id = 0

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [list(text.encode()) for text in texts]}


def record(source: str, text: str, licence: str = "MIT") -> dict[str, Any]:
    return {"source": source, "license": licence, "text": text}


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def plenty(count: int = 200) -> list[dict[str, Any]]:
    return [record("prose", f"record {i} " + "word " * (i % 7)) for i in range(count)]


# --- records


def test_only_licensed_records_of_allowed_sources_are_read(tmp_path: Path) -> None:
    wanted = [
        record("a", "1", "Apache-2.0"),
        record("b", "2"),
        record("c", "3", "CC-BY-4.0"),
        record("d", "4", "PSF-2.0"),
    ]
    others = [record("a", "5", "GPL-3.0"), record("a", "6", ""), record("gpteacher-code", "7")]
    path = write(tmp_path / "c.jsonl", [wanted[0], others[0], wanted[1], *others[1:], *wanted[2:]])
    assert list(read_records(path)) == wanted


def test_a_compressed_corpus_reads_the_same(tmp_path: Path) -> None:
    plain = write(tmp_path / "c.jsonl", plenty(5))
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_records(packed)) == list(read_records(plain)) == plenty(5)


UNFIT = [
    '{"source": 5, "license": "MIT", "text": "b"}',
    '{"source": "a", "license": "MIT", "text": null}',
    '{"source": "a", "license": ["MIT"], "text": "b"}',
    '{"source": "a", "license": "MIT", "text": "half of \\ud800"}',
    "[" * 100_000,
]


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', '{"source": "a", "text": "b"}', *UNFIT])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(record("a", "b")) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: expected a JSON object with source, license and text"):
        list(read_records(path))


def test_a_missing_corpus_and_one_without_a_usable_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; expected JSON lines with source, license, text"):
        list(read_records(tmp_path / "c.jsonl"))
    path = write(tmp_path / "gpl.jsonl", [record("a", "b", "GPL-3.0")])
    with pytest.raises(UserError, match=r"no record with a licence among MIT, Apache-2\.0, PSF-2\.0, CC-BY-4\.0"):
        build_corpus(path, Bytes())


# --- documents


def test_documents_are_groups_of_records_of_one_source() -> None:
    records = [record("prose", f"p{i}") for i in range(50)] + [record("notes", f"n{i}") for i in range(50)]
    documents = grouped_documents(records, seed=0)
    sizes = []
    for source, text in documents:
        parts = text.split("\n\n")
        assert {part[0] for part in parts} == {source[0]}
        sizes.append(len(parts))
    assert max(sizes) <= 8
    assert len(set(sizes)) > 3
    parts = Counter(part for _, text in documents for part in text.split("\n\n"))
    assert parts == Counter(r["text"] for r in records)  # each once


def test_a_source_comes_as_often_as_its_weight_says() -> None:
    records = [record("gsm8k-train", f"g{i}") for i in range(10)] + [record("cpython-3.11", f"c{i}") for i in range(10)]
    documents = grouped_documents(records, seed=0)
    parts = Counter(part for _, text in documents for part in text.split("\n\n"))
    assert {parts[f"g{i}"] for i in range(10)} == {3}
    assert sorted(parts[f"c{i}"] for i in range(10)) == [0] * 5 + [1] * 5
    assert all("\n\n" not in text for source, text in documents if source == "cpython-3.11")  # code stays whole


def test_documents_depend_on_the_seed_alone() -> None:
    assert grouped_documents(plenty(), 1) == grouped_documents(plenty(), 1)
    assert grouped_documents(plenty(), 1) != grouped_documents(plenty(), 2)


# --- streams and windows


def test_every_document_ends_with_eos_and_starts_where_it_says(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", plenty())
    corpus = build_corpus(path, Bytes(), piece=16)
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for stream, starts in ((corpus.train, corpus.train_starts), (corpus.held_out, corpus.held_out_starts)):
        ends = np.flatnonzero(stream == 0)
        assert ends[-1] == len(stream) - 1
        expected = []
        for begin, end in zip([0, *(ends[:-1] + 1)], ends, strict=True):
            expected += range(begin, end, 16)  # a long document in pieces
        assert starts.tolist() == expected
    assert corpus.sources == {"prose": len(corpus.train) - int((corpus.train == 0).sum())}


def test_held_out_records_are_not_trained_on(tmp_path: Path) -> None:
    corpus = build_corpus(write(tmp_path / "c.jsonl", plenty()), Bytes())
    numbers = []
    for stream in (corpus.train, corpus.held_out):
        text = bytes(stream.astype(np.uint8)).decode().replace("\0", "\n\n")
        numbers.append({int(part.split()[1]) for part in text.split("\n\n") if part})
    train, held_out = numbers
    assert train | held_out == set(range(200))
    assert not train & held_out
    assert 1 <= len(held_out) <= 12


def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", plenty())
    corpus, again = build_corpus(path, Bytes(), piece=16), build_corpus(path, Bytes(), piece=16)
    batch = corpus.windows(4, 24, seed=1, step=7)
    assert batch.shape == (4, 24)
    assert batch.dtype == np.int64
    corpus.windows(4, 24, seed=1, step=8)
    assert np.array_equal(again.windows(4, 24, seed=1, step=7), batch)
    assert not np.array_equal(corpus.windows(4, 24, seed=1, step=8), batch)
    assert not np.array_equal(corpus.windows(4, 24, seed=2, step=7), batch)
    assert np.array_equal(corpus.held_out_windows(3, 24), again.held_out_windows(3, 24))
    for row in batch:
        assert any(np.array_equal(row, corpus.train[s : s + 24]) for s in corpus.train_starts)


def test_a_corpus_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    corpus = build_corpus(write(tmp_path / "c.jsonl", [record("a", "short")]), Bytes())
    with pytest.raises(UserError, match="the corpus has 6 tokens to train on, fewer than one window of 7"):
        corpus.windows(1, 7, seed=0, step=0)
    with pytest.raises(UserError, match="the corpus has 0 tokens in the 2% of its records that are held out"):
        corpus.held_out_windows(1, 2)


def test_the_draft_vocabulary_is_the_most_frequent_ids_ascending() -> None:
    assert draft_vocabulary(np.array([3, 9, 0, 9, 4, 1]), 3).tolist() == [1, 3, 4]
    assert draft_vocabulary(np.array([1, 5, 1, 1]), 2).tolist() == [0, 1]  # of equals the lowest
