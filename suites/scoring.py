"""The score of a generated text, by the task's own filters and metric, as lm-eval computes it."""

from __future__ import annotations

import copy

from ecospec.errors import UserError, one_line
from ecospec.suites import lm_task
from ecospec.suites.loading import Suite


class Scorer:
    """Scores texts that were generated for the problems of one suite.

    Of a task with several filters the last counts, and of several metrics the first.

    Attributes:
        metric: the metric's name, such as exact_match; empty where the suite has none.
        filter: name of the chain of filters before it; empty where it has none.
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
        chains = [str(chain["name"]) for chain in self._task.config.filter_list or []]
        self.filter = chains[-1] if chains else ""
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
                doc = copy.deepcopy(self._docs[index])  # a metric may change it
                value: float = lm_task.metric_of(self._task, doc, text, self.metric)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"it gave {value}, expected a number from 0 to 1")
        except BaseException as error:  # whatever a filter or a metric of somebody else's raises
            if not self._file or isinstance(error, KeyboardInterrupt):
                raise
            reason = one_line(error) or "no message"
            raise UserError(
                f"suite file {self._file!r}: its metric {self.metric!r} gives no number for a text "
                f"({type(error).__name__}: {reason})"
            ) from error
        return value


def _name_of(metric: object) -> str:
    """What lm-eval calls a metric that a task file gives by its name, or as a function."""
    return str(getattr(metric, "__name__", metric))
