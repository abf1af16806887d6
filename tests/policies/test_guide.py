"""The code in docs/policies.md works as it stands."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from ecospec.policies import CostModel, Registry, count_pairs

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def test_the_guides_policy_registers_and_passes_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    the_class, the_arithmetic, the_rate, the_test = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    module = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # where dataclasses look up annotations
    for block in (the_class, the_test):
        exec(block, vars(module))
    module.test_shallow_stays_above_its_limit()

    registry: Registry[object] = Registry("policy")
    for cls in module.ecospec_policies():
        registry.register(cls)
    assert registry.create("shallow:depth=3") == module.Shallow(depth=3)

    names = {**vars(module), "count_pairs": count_pairs, "pick": 1}
    exec(the_arithmetic, names)
    assert names["new_experts"].tolist() == [0, 1, 2, 2]

    cost = CostModel(1.0, 0.1, 0.0, pairs_by_tokens=(2.0, 4.0))
    names["request"] = replace(names["request"], cost_model=cost)
    exec(the_rate, {**names, "nodes": [0, 1], "ClassVar": ClassVar})
    assert names["request"].node_scores[[0, 1]].sum() / cost.step_seconds(2, 4.0) == pytest.approx(1.6 / 1.4)
