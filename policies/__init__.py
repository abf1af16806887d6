"""What to verify: the draft tree, expert sets, the policy contract and the built-in policies.

NumPy and pluggy only. A policy author needs to read this folder alone.
"""

from ecospec.policies.builtin import Confidence, GlobalCost, MarginalCost, Oracle
from ecospec.policies.contract import (
    AcceptanceNeed,
    ExpertNeed,
    Policy,
    Selection,
    SelectionError,
    SelectionRequest,
    run_policy,
    validate_selection,
)
from ecospec.policies.cost import CostModel
from ecospec.policies.experts import ExpertSets, count_pairs
from ecospec.policies.hookspecs import hookimpl
from ecospec.policies.spec import Registry, parse_spec, spec_of, split_specs
from ecospec.policies.throughput import Adaptive, Throughput
from ecospec.policies.tree import DraftTree
from ecospec.policies.yardsticks import Clairvoyant, Optimal

__all__ = [
    "AcceptanceNeed",
    "Adaptive",
    "Clairvoyant",
    "Confidence",
    "CostModel",
    "DraftTree",
    "ExpertNeed",
    "ExpertSets",
    "GlobalCost",
    "MarginalCost",
    "Optimal",
    "Oracle",
    "Policy",
    "Registry",
    "Selection",
    "SelectionError",
    "SelectionRequest",
    "Throughput",
    "count_pairs",
    "hookimpl",
    "parse_spec",
    "run_policy",
    "spec_of",
    "split_specs",
    "validate_selection",
]

if __name__ != "ecospec.policies":
    raise ImportError("import ecospec.policies, not policies (run: pip install -e .)")
