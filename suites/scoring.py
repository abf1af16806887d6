"""The score of a generated text, by the task's own filters and metric, as lm-eval computes it."""

from __future__ import annotations

import math

from ecospec.errors import UserError
from ecospec.suites import lm_task
from ecospec.suites.loading import Suite


class Scorer:
    """Scores texts that were generated for the problems of one suite.

    Of a task with several filters the last counts, and of several metrics the first.

    Attributes:
        metric: the metric's name, such as exact_match; empty where the suite has none.
        why_not: why nothing is scored, or empty.
    """

    def __init__(self, suite: Suite, *, run_code: bool = False) -> None:
        """Prepare.

        Args:
            run_code: whether code that a text holds may run on this machine.

        Raises:
            UserError: the metric of somebody else's suite gives no number for a text.
        """
        self._task = suite.task
        self._file = "" if suite.task_file is None or suite.task_file.builtin else str(suite.task_file.path)
        metrics = [_name_of(entry["metric"]) for entry in self._task.config.metric_list or []]
        self.metric = metrics[0] if metrics else ""
        self.why_not = ""
        if not metrics:
            self.why_not = "the suite has no metric"
        elif self._task.config.unsafe_code and not run_code:
            self.why_not = "not run; --run-code lets the code that the model wrote run on this machine"
        self._docs = [] if self.why_not else list(self._task.eval_docs)
        if self._file and self._docs:
            self.score(0, "")  # what cannot score a text is found before any is generated

    def score(self, index: int, text: str) -> float | None:
        """The score of the text for problem ``index``, from 0 to 1; None where nothing is scored."""
        if self.why_not:
            return None
        try:
            with lm_task.quiet():
                value: float = lm_task.metric_of(self._task, self._docs[index], text, self.metric)
            if not math.isfinite(value):
                raise ValueError(f"it gave {value}")
        except (Exception, SystemExit) as error:  # whatever a filter or a metric of somebody else's raises
            if not self._file:
                raise
            reason = " ".join(str(error).split()) or "no message"
            raise UserError(
                f"suite file {self._file!r}: its metric {self.metric!r} gives no number for a text "
                f"({type(error).__name__}: {reason})"
            ) from error
        return value


def _name_of(metric: object) -> str:
    """What lm-eval calls a metric that a task file gives by its name, or as a function."""
    return str(getattr(metric, "__name__", metric))
