"""Gate the benchmarks by those of an earlier run: ``compare_with_base.py NEW.json``, with ECOSPEC_BENCH_BASE set."""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    base = os.environ.get("ECOSPEC_BENCH_BASE")
    if base:
        sys.exit(subprocess.call([sys.executable, "-m", "ecospec.harness", "compare", base, *sys.argv[1:]]))
    print("ECOSPEC_BENCH_BASE is not set: nothing to compare the benchmarks with")
