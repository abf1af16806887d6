"""Several runs asked for at once: which they are, and whether their outputs agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.plugins import Plugins
from ecospec.harness.records import PromptRecord

RESERVED = ("options.json", "suites.json", "summary.json", "summary.md", "summary.html")


def suites_asked(text: str, known: Sequence[str]) -> list[str]:
    """The suites of ``--suite``: one, several separated by commas, or ``all``, each once and in that order."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    asked = [each for name in names or [text] for each in (known if name == "all" else [name])]
    return list(dict.fromkeys(asked))


def named_suites(config: RunConfig, suites: Sequence[str], plugins: Plugins) -> dict[str, str]:
    """The names of suites, by what was asked for: a name or the path of a task file.

    Raises:
        UserError: an unknown suite, two of one name, or data of one suite for several.
    """
    from ecospec.harness.preparing import data_of
    from ecospec.suites import EMBEDDED, HUB

    if len(suites) > 1 and (data_of(config) not in (EMBEDDED, HUB) or config.revision is not None):
        raise UserError("--data or --revision of one data set with several suites; expected --data embedded or hub")
    names = {suite: plugins.find_suite(suite).name for suite in suites}
    for name in names.values():
        if list(names.values()).count(name) > 1:
            raise UserError(f"two suites are called {name}; expected task files with different names")
    return names


def planned(
    config: RunConfig, suites: Sequence[str], batch_sizes: Sequence[int], plugins: Plugins
) -> dict[str, RunConfig]:
    """The runs by name, which is also that of their folder: every suite at every batch size.

    Raises:
        UserError: see `named_suites`.
    """
    names = named_suites(config, suites, plugins)
    runs: dict[str, RunConfig] = {}
    for suite, name in names.items():
        for size in batch_sizes:
            parts = [name] * (len(suites) > 1) + [f"batch-{size}"] * (len(batch_sizes) > 1)
            if "-".join(parts) in RESERVED:
                raise UserError(
                    f"suite {name!r}: its run folder would be one of the summary's files; expected another task name"
                )
            runs["-".join(parts)] = dataclasses.replace(config, suite=suite, batch_size=size)
    return runs


def sizes_of(runs: Mapping[str, RunConfig]) -> list[int]:
    """The batch sizes of some runs, each once."""
    return list(dict.fromkeys(run.batch_size for run in runs.values()))


def different_outputs(runs: Mapping[str, RunConfig], records: Mapping[str, Sequence[PromptRecord]]) -> list[str]:
    """Prompts for which some method emits other tokens at one batch size than at another."""
    emitted: dict[str, list[int]] = {}
    different: dict[str, None] = {}
    for name in runs:
        for record in records[name]:
            # One reference for all methods: at each batch size they are compared with plain decoding as well.
            if emitted.setdefault(f"{record.prompt_id} by {record.method}", record.tokens) != record.tokens:
                different[f"{record.prompt_id} by {record.method}"] = None
    return list(different)
