"""A kill at any moment leaves a file whole; a folder has one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killing import DyingOs, Killed

from ecospec.errors import UserError
from ecospec.harness import writing
from ecospec.harness.writing import LOCK, alone_in, append_text, is_unused, write_json, write_text


@pytest.mark.parametrize("before", [None, "old\n"])
def test_a_killed_write_leaves_the_old_file_or_the_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None
) -> None:
    path, seen = tmp_path / "file", []
    for last in range(1, 100):
        if before is not None:
            path.write_text(before)
        dying = DyingOs(last)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "os", dying)
            try:
                write_text(path, "new and longer\n")
            except Killed:
                pass
            else:
                break
        found = path.read_text() if path.exists() else None
        assert found in (before, "new and longer\n")
        seen.append(found)
        with alone_in(tmp_path):
            assert {each.name for each in tmp_path.iterdir()} <= {"file", LOCK}
        path.unlink(missing_ok=True)
    assert last == 7  # open, write, fsync, replace, and the folder's open and fsync
    assert seen == [before] * 4 + ["new and longer\n"] * 2


def test_an_append_is_one_write_and_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    append_text(path, "ä\n")
    for last, left in ((1, "ä\n"), (2, "ä\nbc"), (3, "ä\nbcd\n"), (4, "ä\nbcd\n")):
        path.write_text("ä\n", encoding="utf-8")
        dying = DyingOs(last)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "os", dying)
            if last < 4:
                with pytest.raises(Killed):
                    append_text(path, "bcd\n")
            else:
                append_text(path, "bcd\n")
        assert path.read_text(encoding="utf-8") == left


def test_a_file_that_cannot_be_written_is_named_and_what_was_there_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class FullDisk(DyingOs):
        def __getattr__(self, name: str) -> Any:
            def full(*arguments: Any) -> Any:
                raise OSError(28, "No space left on device")

            return full if name == "write" else getattr(os, name)

    path = tmp_path / "file"
    write_text(path, "old\n")
    monkeypatch.setattr(writing, "os", FullDisk(0))
    for write in (lambda: write_text(path, "new\n"), lambda: append_text(path, "new\n")):
        with pytest.raises(UserError, match=r"file: cannot be written \(No space left on device\)"):
            write()
    assert path.read_text() == "old\n"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_json_has_no_number_that_json_has_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "file", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ecospec.errors import UserError\n"
        "from ecospec.harness.writing import alone_in\n"
        "try:\n with alone_in(Path(sys.argv[1])): print('in')\n"
        "except UserError as error: print(error)"
    )

    def other() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with alone_in(tmp_path):
        assert other() == f"{tmp_path}: another process is running in it; expected one at a time"
    assert other() == "in"
    assert is_unused(tmp_path)  # a lock is nothing
    (tmp_path / ".manifest.json.partial").write_text("{")
    (tmp_path / ".manifest.json.4711.partial").write_text("{")
    assert is_unused(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_unused(tmp_path)


def test_two_processes_can_write_one_file_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ecospec.harness.writing import write_text\n"
        "for _ in range(300): write_text(Path(sys.argv[1]), sys.argv[2] * 2000)"
    )
    path = tmp_path / "one.json"
    both = [subprocess.Popen([sys.executable, "-c", code, str(path), each], stderr=subprocess.PIPE) for each in "ab"]
    assert [process.communicate()[1] for process in both] == [b"", b""]
    assert [process.returncode for process in both] == [0, 0]
    assert path.read_text() in ("a" * 2000, "b" * 2000)
    assert [each.name for each in tmp_path.iterdir()] == ["one.json"]
