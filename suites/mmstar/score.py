"""The metric that the task file beside this names."""

from ecospec.suites.answers import choice_results as choice_results
