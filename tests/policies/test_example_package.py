"""The example of a third-party policy: that it is right, and that it works once installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ecospec.policies import (
    Confidence,
    DraftTree,
    ExpertSets,
    MarginalCost,
    SelectionRequest,
    run_policy,
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ecospec_policy_example"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_policy", EXAMPLE / "ecospec_policy_example.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_lies_between_confidence_and_marginal_cost(example: ModuleType) -> None:
    rng = np.random.default_rng(0)
    parents = np.array([-1, *((node - 1) // 2 for node in range(1, 11))])
    for _ in range(100):
        tree = DraftTree(np.arange(11), parents, np.array([1.0, *rng.random(10)]))
        experts = ExpertSets.from_mask(rng.random((11, 3, 20)) < 0.3)
        request = SelectionRequest(tree, budget=4, experts=experts)
        assert example.Density(strength=0.0).select(request) == Confidence().select(request)
        assert example.Density(strength=1.0).select(request) == MarginalCost(epsilon=1.0).select(request)


def test_the_example_keeps_the_contract(example: ModuleType, requests: list[SelectionRequest]) -> None:
    for request in requests[:500]:
        run_policy(example.Density(), request)


# --- installed --------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path) -> str:
    """The standard output of a command that must succeed, seeing all installed plugins."""
    hidden = {"ECOSPEC_PLUGINS", "PYTHONPATH"}
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def fresh_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment that holds the wheels of ecospec and of the example.

    Their dependencies, hundreds of megabytes, are lent by the running environment: its site-packages
    come last on the path, and a folder named in a .pth file has its own .pth files ignored, so that an
    editable ecospec there stays out of sight.
    """
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    bin_folder = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python, wheels = bin_folder / "python", folder / "wheels"
    for source in (ROOT, EXAMPLE):
        if importlib.util.find_spec("hatchling"):
            run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels, cwd=source)
        else:
            run(python, "-m", "pip", "wheel", "--no-deps", "-w", wheels, source, cwd=folder)
    built = sorted(wheels.glob("*.whl"))
    assert len(built) == 2, built
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", *built, cwd=folder)

    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    lent = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (Path(own) / "lent_dependencies.pth").write_text("\n".join(lent) + "\n")
    return bin_folder


@pytest.mark.install
def test_the_fresh_environment_uses_the_wheel(fresh_environment: Path, tmp_path: Path) -> None:
    script = (
        "import json, ecospec.policies, ecospec_policy_example;"
        "print(json.dumps([ecospec.__file__, ecospec.policies.__file__, ecospec_policy_example.__file__]))"
    )
    files = json.loads(run(fresh_environment / "python", "-c", script, cwd=tmp_path))
    for file in files:
        assert Path(file).is_relative_to(fresh_environment.parent), file


@pytest.mark.install
def test_the_installed_example_is_found(fresh_environment: Path, tmp_path: Path) -> None:
    script = (
        "from ecospec.harness.plugins import load_plugins; plugins = load_plugins();"
        "print(plugins.broken, plugins.policies.names(), plugins.create_policy('density:strength=0.8'))"
    )
    output = run(fresh_environment / "python", "-c", script, cwd=tmp_path)
    assert output.startswith("[] ['confidence', 'global-cost', 'marginal-cost', 'oracle', 'adaptive', ")
    assert "'clairvoyant', 'density']" in output
    assert "Density(strength=0.8)" in output


@pytest.mark.install
def test_the_command_line_lists_the_example(fresh_environment: Path, tmp_path: Path) -> None:
    output = run(fresh_environment / "ecospec-bench", "plugins", cwd=tmp_path)
    assert "density" in output
    assert "ecospec-policy-example" in output
    assert "marginal-cost" in output


@pytest.mark.install
def test_the_command_line_benchmarks_the_example(fresh_environment: Path, tmp_path: Path) -> None:
    arguments = ["--suite", "gsm8k", "--policy", "density", "--limit", "1", "--max-new-tokens", "16"]
    output = run(fresh_environment / "ecospec-bench", *arguments, "--output", tmp_path / "run", cwd=tmp_path)
    assert "density" in output
    assert any((tmp_path / "run").iterdir())
