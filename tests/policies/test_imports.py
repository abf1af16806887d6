"""What importing the package costs, in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, sys, time
start = time.perf_counter()
import {module}
print(json.dumps({{"seconds": time.perf_counter() - start, "modules": sorted(sys.modules)}}))
"""


def fresh_import(module: str) -> dict[str, Any]:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def test_importing_policies_takes_less_than_a_fifth_of_a_second() -> None:
    fastest = min(fresh_import("ecospec.policies")["seconds"] for _ in range(3))
    assert fastest < 0.2, f"import ecospec.policies took {fastest:.3f} s at best, expected below 0.2 s"


def test_policies_need_nothing_but_numpy_and_pluggy() -> None:
    modules = fresh_import("ecospec.policies")["modules"]
    theirs = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    theirs = {name for name in theirs if not name.startswith(("_", "sitecustomize"))}
    assert theirs == {"ecospec", "numpy", "pluggy"}
    parts = {name for name in modules if name.startswith("ecospec.") and name.count(".") == 1}
    assert parts == {"ecospec.errors", "ecospec.policies"}


@pytest.mark.parametrize("module", ["ecospec.harness.plugins", "ecospec.predictors.hookspecs"])
def test_finding_plugins_does_not_import_torch(module: str) -> None:
    assert "torch" not in fresh_import(module)["modules"]


def test_a_second_copy_of_the_classes_is_refused() -> None:
    command = "import sys; sys.path.insert(0, sys.argv[1]); import policies"
    from ecospec import policies

    parent = str(policies.__path__[0]).rpartition("/")[0]
    run = subprocess.run([sys.executable, "-c", command, parent], capture_output=True, text=True, check=False)
    assert "ImportError: import ecospec.policies, not policies" in run.stderr
