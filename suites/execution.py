"""Running code that a model wrote: in a process of its own, with limits, and only when asked for.

The limits stop a program that loops, fills the memory or forks without end. They are no sandbox: the program
runs with the user's rights, in an empty folder, so run it where that is safe.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile

SECONDS = 10.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20

_RUNNER = """
import resource, sys
memory, seconds, file_bytes, done = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
program, report = sys.stdin.read(), sys.stdout
sys.stdin, sys.stdout, sys.stderr, sys.argv = open('/dev/null'), open('/dev/null', 'w'), open('/dev/null', 'w'), ['']
exec(compile(program, 'program', 'exec'), {'__name__': '__main__'})
report.write(done)
report.flush()
"""


def runs_to_its_end(program: str, *, seconds: float | None = None, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Whether a Python program ends without an error, within ``seconds`` (or `SECONDS`) and ``memory_bytes``.

    A program that leaves early, with whatever exit code, has not run to its end.
    """
    seconds = SECONDS if seconds is None else seconds
    done = secrets.token_hex(16)
    limits = [str(memory_bytes), str(int(seconds) + 1), str(FILE_BYTES), done]
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as report,
    ):
        source.write(program.encode("utf-8", "replace"))
        source.seek(0)
        # Files, not pipes: a pipe stays open for as long as anything that the program started.
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _RUNNER, *limits],
            stdin=source,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it may have started as well
            process.wait()
        report.seek(0)
        return report.read().decode("utf-8", "replace") == done
