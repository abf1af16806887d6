"""What to run: benchmark suites, their embedded sample problems, and how both become prompts.

Importing this package and asking for `suite_names()` is instant; lm-eval is imported by `load_suite` only.
"""

from ecospec.suites.loading import SUITES, Problem, Suite, load_suite, suite_names
from ecospec.suites.sources import EMBEDDED, HUB

__all__ = ["EMBEDDED", "HUB", "SUITES", "Problem", "Suite", "load_suite", "suite_names"]

if __name__ != "ecospec.suites":
    raise ImportError("import ecospec.suites, not suites (run: pip install -e .)")
