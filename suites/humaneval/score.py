"""The metric that the task file beside this names."""

from ecospec.suites.answers import code_results as code_results
