"""The metric that the task file beside this names."""

from ecospec.suites.answers import math_results as math_results
