"""Model-written code: it passes, fails, loops, fills the memory or leaves early, and never takes us with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ecospec.suites.execution import runs_to_its_end


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("assert 1 + 1 == 2", True),
        ("print('x' * 100000)\nimport sys\nsys.stderr.write('y' * 100000)", True),
        ("import math, json, re, typing\nassert math.sqrt(4) == 2", True),
        ("assert 1 + 1 == 3", False),
        ("def f(:\n", False),
        ("1 / 0", False),
        ("import sys\nsys.exit(0)", False),
        ("import os\nos._exit(0)", False),
        ("raise SystemExit", False),
        ("quit()", False),
        ("x = bytearray(2 << 30)", False),
        ("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", False),
        ("def f():\n    f()\nf()", False),
        ("input()", False),
        ("x = '\\ud800'", True),
        ("import os\nos.write(1, b'hello')\nos.system('echo hello')", True),
        ("import pickle\nclass A: pass\nassert pickle.loads(pickle.dumps(A()))", True),
        ("import os\nos.fork()", True),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", True),
        ("import sys, os\nos.write(1, sys.orig_argv[-1].encode())\nos._exit(0)", False),
        ("import os\nos.write(1, open('/proc/self/cmdline', 'rb').read().split(b'\\0')[-2])\nos._exit(0)", False),
        ("", True),
    ],
)
def test_what_ends_and_what_does_not(program: str, ends: bool) -> None:
    assert runs_to_its_end(program) is ends


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_a_program_without_end_is_stopped(program: str) -> None:
    began = time.monotonic()
    assert not runs_to_its_end(program, seconds=1.0)
    assert time.monotonic() - began < 20


def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w').close()"
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])"
    assert runs_to_its_end(program)
    time.sleep(5)
    assert not mark.exists()


def test_a_program_runs_in_an_empty_folder_that_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "where"
    program = (
        "import os\nassert os.listdir() == []\nopen('left', 'w').write('x')\n"
        f"open({str(kept)!r}, 'w').write(os.getcwd())"
    )
    assert runs_to_its_end(program)
    assert not Path(kept.read_text()).exists()


def test_a_program_does_not_see_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_SECRET", "x")
    assert runs_to_its_end("import os\nassert 'ECOSPEC_SECRET' not in os.environ")
