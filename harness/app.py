"""What the commands do, once the command line has been read. Imports torch."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ecospec.errors import UserError, one_line
from ecospec.harness.config import RunConfig
from ecospec.harness.records import PromptRecord

if TYPE_CHECKING:  # they import torch, or what the commands that do not run need not wait for
    from ecospec.harness.plugins import Plugins
    from ecospec.harness.report import Report
    from ecospec.harness.run_reading import RunData
    from ecospec.harness.runner import Bench

EXIT_VIOLATED = 1
EXIT_INTERRUPTED = 130


def console_width() -> int | None:
    """The terminal's width, or what COLUMNS says; a wide one where the output is a file or a pipe."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140


def quieten() -> None:
    """Keep the libraries' progress bars and notices off the user's terminal; warnings of ours stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in (
        "accelerate",
        "datasets",
        "huggingface_hub",
    ):  # the latter reports every retry of an unreachable hub
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # Under autocast a norm's weight stays float32 beside bfloat16 activations, which is what is wanted.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run came to. ``gated``: numeric ties do not excuse a difference (float32 on a CPU)."""

    run: RunData
    report: Report
    folder: Path
    records: list[PromptRecord]
    gated: bool
    code: int


def run_command(config: RunConfig, batch_sizes: Sequence[int] = (1,), named: Collection[str] = ()) -> int:
    """Run the bench over one suite or several, at one batch size or several; returns the exit code.

    Args:
        named: the options that the user has given; of those that nothing uses it is said so.
    """
    quieten()
    from ecospec.harness.distributed import own_output
    from ecospec.harness.plugins import load_plugins
    from ecospec.harness.preparing import check_options
    from ecospec.harness.several import planned, suites_asked
    from ecospec.harness.unused import unused_options
    from ecospec.suites import SUITES

    config = own_output(config)
    names = suites_asked(config.suite, SUITES)
    plugins = load_plugins()
    with as_user_errors(config):
        check_options(config)
        unused = unused_options(config, named, plugins)
        if len(names) == len(batch_sizes) == 1:
            return run_one(dataclasses.replace(config, suite=names[0]), plugins, unused)
        return run_several(config, planned(config, names, batch_sizes, plugins), plugins, unused)


def run_one(config: RunConfig, plugins: Plugins, unused: Sequence[str] = ()) -> int:
    """One suite: its report on the terminal and in its folder."""
    from ecospec.harness.run_folder import check_run_folder
    from ecospec.harness.runner import Bench
    from ecospec.harness.unused import say_unused

    check_run_folder(config)
    bench = Bench(config, plugins)
    say_unused(unused)
    outcome = execute(bench, config)
    if outcome is None:
        return EXIT_INTERRUPTED
    Console().print(f"run folder: {outcome.folder}", soft_wrap=True, markup=False, highlight=False)
    return outcome.code


def run_several(config: RunConfig, runs: dict[str, RunConfig], plugins: Plugins, unused: Sequence[str] = ()) -> int:
    """Several runs with one loaded model, each in a folder of its own, and a summary over all."""
    from ecospec.harness.outputs import check_folder
    from ecospec.harness.resuming import options_of
    from ecospec.harness.run_folder import MANIFEST, check_parent, new_folder, open_parent
    from ecospec.harness.runner import Bench
    from ecospec.harness.unused import say_unused

    parent = config.output or new_folder("several")
    check_parent(parent, list(runs), resume=config.resume, named=config.output is not None)
    check_folder(f"--output {parent}", parent)
    benches: dict[str, tuple[RunConfig, Bench]] = {}
    first: Bench | None = None
    for name, run in runs.items():
        folder = parent / name
        resume = config.resume and (folder / MANIFEST).is_file()
        each = dataclasses.replace(run, output=folder, resume=resume)
        bench = Bench(each, plugins, first.parts if first else None)
        first = first or bench
        benches[name] = (each, bench)
    say_unused(unused)
    with open_parent(parent, list(runs), options_of(config, runs)):
        return run_benches(parent, benches)


def run_benches(parent: Path, benches: Mapping[str, tuple[RunConfig, Bench]]) -> int:
    """Make several runs that are ready to start, and their summary."""
    from ecospec.harness.pairs import pairs_of, pairs_tables
    from ecospec.harness.report_writing import write_summaries
    from ecospec.harness.run_folder import discard_parent
    from ecospec.harness.several import different_outputs, sizes_of
    from ecospec.harness.summary import summary_tables

    runs = {name: each for name, (each, _) in benches.items()}
    outcomes: dict[str, Outcome] = {}
    for name, (each, bench) in benches.items():
        try:
            outcome = execute(bench, each, go_on=f"ecospec-bench --resume {parent}")
        except UserError:
            discard_parent(parent)
            raise
        if outcome is None:
            return EXIT_INTERRUPTED
        outcomes[name] = outcome
    reports = {name: outcome.report for name, outcome in outcomes.items()}
    average = len(sizes_of(runs)) == 1  # over suites; over batch sizes it means nothing
    write_summaries(parent, [outcome.run for outcome in outcomes.values()])
    console = Console(width=console_width())
    for table in summary_tables(reports, average, console.width):
        console.print(table)
    if average:
        for table in pairs_tables(pairs_of([outcome.run for outcome in outcomes.values()]), console.width):
            console.print(table)
    code = max(outcome.code for outcome in outcomes.values())
    if not average:
        different = different_outputs(runs, {name: outcome.records for name, outcome in outcomes.items()})
        sizes = ", ".join(map(str, sizes_of(runs)))
        said = f"differ for {', '.join(different)}" if different else "are the same tokens"
        console.print(f"outputs at batch sizes {sizes} {said}", soft_wrap=True, markup=False, highlight=False)
        code = max(code, EXIT_VIOLATED if different and all(outcome.gated for outcome in outcomes.values()) else 0)
    console.print(f"run folder: {parent}", soft_wrap=True, markup=False, highlight=False)
    return code


def execute(bench: Bench, config: RunConfig, *, go_on: str = "", show: bool = True) -> Outcome | None:
    """Run, write and print one report; None where the user interrupted it.

    Args:
        go_on: the command that goes on with an interrupted one; by default the one for this one run.
        show: whether the report is printed too.
    """
    from ecospec.harness.run_folder import open_folder

    with open_folder(config, bench.facts()) as (folder, manifest):
        return run_in(folder, manifest, bench, config, go_on=go_on, show=show)


def run_in(
    folder: Path, manifest: Mapping[str, Any], bench: Bench, config: RunConfig, *, go_on: str, show: bool
) -> Outcome | None:
    """The same in a run folder that nobody else has."""
    from ecospec.harness.distributed import share_records
    from ecospec.harness.report_text import print_report
    from ecospec.harness.report_writing import write_reports
    from ecospec.harness.run_folder import RECORDS, discard_empty
    from ecospec.harness.run_reading import report_of, run_data

    share_records(folder / RECORDS)
    names = ", ".join(method.label for method in bench.methods)
    together = f" in batches of {config.batch_size}" if config.batch_size > 1 else ""
    problems = f"{len(bench.requests)} problem{'s' if len(bench.requests) != 1 else ''}"
    print(f"{bench.suite.name}: {problems}{together} by {names}, into {folder}", flush=True)
    try:
        with live_progress(len(bench.requests)) as progress:
            records, violations = bench.run(folder, progress.note)
    except KeyboardInterrupt:
        print(
            f"ecospec-bench: interrupted; the prompts that were finished are in {folder}, and "
            f"{go_on or f'ecospec-bench --resume {folder}'} goes on from there",
            file=sys.stderr,
        )
        return None
    except UserError:
        discard_empty(folder)
        raise
    report = report_of(records, manifest)
    run = run_data(folder, manifest, records, report)
    write_reports(run)
    if show:
        print_report(report, manifest, Console())
    for violation in violations:
        print(f"lossless check VIOLATED: {violation}", file=sys.stderr)
    gated = is_gated(manifest)
    code = exit_code([record.verdict for record in records], gated=gated)
    return Outcome(run, report, folder, records, gated, code)


@contextmanager
def as_user_errors(config: RunConfig) -> Iterator[None]:
    """A memory that is too small is the user's to know of, in one line."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        kinds = (torch.OutOfMemoryError, MemoryError)
        if not isinstance(error, kinds) and "can't allocate memory" not in str(error):
            raise  # the CPU allocator has no error type of its own
        raise UserError(
            f"out of memory on {config.device}: {one_line(error) or type(error).__name__}; "
            "try a smaller --dtype, --max-new-tokens or --limit"
        ) from error


def is_gated(manifest: Mapping[str, Any]) -> bool:
    """Whether numeric ties do not excuse a difference: in float32 on a CPU."""
    return bool(manifest["dtype"] == "float32" and manifest["device"] == "cpu")


def exit_code(verdicts: Iterable[str], *, gated: bool) -> int:
    """1 when an output is not AR's; where ``gated`` numeric ties do not excuse it."""
    refused = {"violated", "ties"} if gated else {"violated"}
    return EXIT_VIOLATED if not refused.isdisjoint(verdicts) else 0


class live_progress:
    """A bar on stderr: prompt, method, and tokens per second so far."""

    def __init__(self, prompts: int) -> None:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("loading", total=prompts)
        self._tokens, self._seconds = 0, 0.0

    def __enter__(self) -> live_progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def note(self, index: int, label: str, record: PromptRecord | None) -> None:
        """A method begins (no record) or has finished a prompt."""
        if record is not None:
            self._tokens += len(record.tokens)
            self._seconds += record.prefill_seconds + record.decode_seconds
        rate = f", {self._tokens / self._seconds:.0f} tokens/s" if self._seconds else ""
        self._bar.update(
            self._task,
            completed=index + (record is not None),
            description=f"prompt {index + 1}: {label}{rate}",
        )


def plugins_command() -> None:
    """Print a table for each kind of plugin and one of suites; what could not be loaded is warned of."""
    from ecospec.harness.plugins import load_plugins

    plugins = load_plugins()
    console = Console(width=console_width())
    for registry in (plugins.policies, plugins.predictors, plugins.estimators, plugins.drafters):
        kind = registry.kind
        table = Table(title=f"{kind} plugins", title_justify="left", title_style="bold")
        for column in (kind, "parameters", "from", "what it does"):
            table.add_column(column, overflow="fold")
        for row in registry.describe():
            names = ", ".join((row.name, *row.aliases))
            parameters = "\n".join(
                f"{p.name}={p.default}" + (f" ({p.help})" if p.help else "")
                if not p.required
                else f"{p.name} ({p.type_name}, required)"
                for p in row.parameters
            )
            table.add_row(*map(Text, (names, parameters or "–", row.provider, row.doc)))
        console.print(table)
    console.print(suites_table(plugins))


def suites_table(plugins: Plugins) -> Table:
    """The suites, ecospec's own first."""
    from ecospec.suites.task_file import builtin_files, read_task_file

    table = Table(title="suites", title_justify="left", title_style="bold")
    for column in ("suite", "data set", "worked examples", "from"):
        table.add_column(column, overflow="fold")
    own = [(read_task_file(path, builtin=True), "ecospec") for path in builtin_files().values()]
    others = [(task_file, plugins.suites.providers[name]) for name, task_file in plugins.suites.files.items()]
    for task_file, provider in (*own, *others):
        table.add_row(*map(Text, (task_file.name, task_file.data_set or "–", str(task_file.num_fewshot), provider)))
    return table


def trace_command(config: RunConfig, suites: str | None, text: Path | None) -> int:
    """Collect a trace, with a bar; returns the exit code."""
    quieten()
    from ecospec.harness.outputs import check_folder
    from ecospec.harness.several import suites_asked
    from ecospec.harness.tracing import Tracer
    from ecospec.suites import SUITES

    assert config.output is not None
    if not config.resume:
        check_folder(f"--output {config.output}", config.output)
    with as_user_errors(config):
        tracer = Tracer(config, [] if suites is None else suites_asked(suites, SUITES), text)
        columns = [TextColumn("tracing"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("", total=tracer.count)
            try:
                writer = tracer.collect(config.output, lambda text: bar.advance(task))
            except KeyboardInterrupt:
                print(
                    f"ecospec-bench: interrupted; the same command with --resume goes on with {config.output}",
                    file=sys.stderr,
                )
                return EXIT_INTERRUPTED
    tokens = sum(shard.tokens for shard in writer.shards)
    size = sum(path.stat().st_size for path in config.output.rglob("*") if path.is_file())
    print(f"{len(writer.done)} texts, {tokens} tokens, {size / tokens:.0f} bytes a token, in {config.output}")
    return 0


def evaluate_command(
    config: RunConfig, traces: Sequence[Path], held_out_of: Path | None, trees: int | None, output: Path | None
) -> None:
    """Print how often predictors are right, by text, by layer and by depth in the draft tree."""
    quieten()
    from ecospec.harness.evaluating import evaluate, write_json
    from ecospec.harness.outputs import check_file

    if output is not None:
        check_file(f"--output {output}", output)
    with as_user_errors(config):
        found = evaluate(config, traces, held_out_of, trees)
    console = Console(width=console_width())
    for table in found.tables():
        console.print(table)
    if held_out_of is None:
        print(
            "a predictor that was trained on these texts is flattered; --held-out-of judges it by what it has not seen"
        )
    if output is not None:
        write_json(found, output)
        print(f"written to {output}")


def card_command(folder: Path | None) -> int:
    """Say whether a bundle's card and recorded figures are what its files give; returns the exit code."""
    quieten()
    from ecospec.harness.bundle import CARD, check_card
    from ecospec.harness.loading import embedded_folder

    folder = embedded_folder() if folder is None else folder
    wrong = check_card(folder)
    for line in wrong:
        print(line)
    print(f"{folder / CARD}: {'does not agree' if wrong else 'agrees with its files and with accuracies measured now'}")
    return EXIT_VIOLATED if wrong else 0
