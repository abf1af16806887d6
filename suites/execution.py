"""Running code that a model wrote: in a process of its own, with limits, and only when asked for.

The limits stop a program that loops or fills the memory, and what it starts ends with it unless it detaches
itself. They are no sandbox: the program runs with the user's rights, in an empty folder, so run it where that
is safe. Nor are they a defence against one that sets out to be counted as passed.
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

# The report goes through a descriptor of its own, and what it says comes in with the program, so that neither
# output nor the command line is taken for it.
_RUNNER = """
import os, resource, sys, types
def main():
    memory, seconds, file_bytes = map(int, sys.argv[1:4])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    done, program = sys.stdin.buffer.read().split(b'\\n', 1)
    report, nothing, parent = os.dup(1), os.open(os.devnull, os.O_RDWR), os.getpid()
    for each in (0, 1, 2):
        os.dup2(nothing, each)
    sys.argv[:] = ['']
    code = compile(program, 'program', 'exec')
    module = sys.modules['__main__'] = types.ModuleType('__main__')
    exec(code, vars(module))
    if os.getpid() == parent:
        os.write(report, done)
        os._exit(0)
main()
"""


def runs_to_its_end(program: str, *, seconds: float | None = None, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Whether a Python program ends without an error, within ``seconds`` (or `SECONDS`) and ``memory_bytes``.

    A program that leaves early, with whatever exit code, has not run to its end.
    """
    seconds = SECONDS if seconds is None else seconds
    done = secrets.token_hex(16)
    limits = [str(memory_bytes), str(int(seconds) + 1), str(FILE_BYTES)]
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as report,
    ):
        source.write(f"{done}\n{program}".encode("utf-8", "replace"))
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
