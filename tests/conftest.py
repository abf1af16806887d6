"""What every test runs under: one thread, no network, no plugin of the machine it runs on.

`tiny_models` beside this file holds the small random models that the tests of the engine share.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, here and in child processes
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # a terminal's width, which test processes side by side pass on

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_models; test modules themselves are not importable


@pytest.fixture(autouse=True)
def _no_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSPEC_PLUGINS", "")
