"""From a recording to fitted estimators to a run that uses them, by command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec.harness.recording.folder import open_recording
from ecospec.harness.training.acceptance import DRAFT, examples_of, fit, fit_recordings, gather, steps_of
from ecospec.predictors.acceptance import isotonic, learned
from ecospec.predictors.acceptance.weights import write_weights


@pytest.fixture
def parts(checkpoints: Any) -> tuple[object, ...]:
    return (
        *("--target", checkpoints.target, "--drafter", checkpoints.drafter, "--data", "embedded"),
        *("--predictor", f"learned:path={checkpoints.learned}"),
    )


@pytest.fixture
def recorded(command: Callable[..., Any], parts: tuple[object, ...], tmp_path: Path) -> Callable[..., Path]:
    """Record ten short answers of the small random checkpoint."""

    def run(name: str, *arguments: object) -> Path:
        given = ("--limit", 10, "--max-new-tokens", 10, "--acceptance", "draft", "--output", name)
        ran = command("record", "--suite", "gsm8k", *parts, *given, *arguments)
        assert ran.code == 0, ran.err
        return tmp_path / name

    return run


def test_a_folder_of_recordings_stands_for_all_of_them(recorded: Callable[..., Path], tmp_path: Path) -> None:
    recorded("all/rec", "--states")
    one = fit_recordings([tmp_path / "all" / "rec"])
    assert fit_recordings([tmp_path / "all"]).prompts == one.prompts


def test_weights_that_cannot_be_written_are_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_weights(tmp_path / "nowhere", {})


def test_steps_are_what_was_recorded(recorded: Callable[..., Path]) -> None:
    folder = recorded("rec", "--states")
    requests = [request for _, request in open_recording(folder).requests()]
    gathered = gather(requests)
    assert gathered.with_states
    assert len(gathered.steps) == sum(int((request.sizes > 1).sum()) for request in requests)
    examples = examples_of(gathered)
    # By hand over the trees: children of accepted nodes, with the target's choice as the label.
    expected = []
    for request in requests:
        for position in range(request.positions):
            tree, at = request.tree(position), request.rows(position)
            accepted = request.accepted(position, tree)
            for node in range(1, tree.size):
                parent = int(tree.parents[node])
                if accepted[parent]:
                    expected.append(int(tree.tokens[node]) == int(request.choices[at][parent]))
    assert examples.accepted.tolist() == expected
    assert len(examples.features) == len(examples.rows) == len(expected)
    (first,) = list(steps_of(requests[0]))[:1]
    assert first.features is not None
    states = requests[0].states
    assert states is not None
    assert np.array_equal(examples.states[examples.rows[0]], states.astype(np.float32)[0])  # the root drafted node 1


def test_fitting_judges_by_prompts_that_were_held_out(recorded: Callable[..., Path]) -> None:
    requests = [request for _, request in open_recording(recorded("rec", "--states")).requests()]
    fitted = fit([[request] for request in requests])
    assert (fitted.prompts, fitted.held_out) == (8, 2)
    assert set(fitted.judged) == {DRAFT, isotonic.KIND, learned.KIND}
    held_out = gather([requests[0], requests[5]])
    assert fitted.judged[DRAFT].nodes == len(held_out.nodes("accepted"))
    assert fitted.judged[isotonic.KIND].log_loss < fitted.judged[DRAFT].log_loss  # a random head is far off


def test_a_recording_becomes_estimators_that_a_run_uses(
    recorded: Callable[..., Path], command: Callable[..., Any], parts: tuple[object, ...], tmp_path: Path
) -> None:
    cold, warm = recorded("cold", "--states"), recorded("warm", "--states", "--temperature", 1)
    ran = command("train", "acceptance", "--recording", cold, "--recording", warm, "--output", "fitted")
    assert ran.code == 0, ran.err
    for word in ("Temperature 0", "Temperature 1", "Brier", "isotonic", "learned", "Reliability"):
        assert word in ran.out
    facts = json.loads((tmp_path / "fitted" / "acceptance.json").read_text(encoding="utf-8"))
    assert len(facts["fitted_on"]) == 10
    other = ("record", "--suite", "amc", *parts, "--limit", 1, "--max-new-tokens", 6)
    for kind in ("isotonic", "learned"):
        spec = f"{kind}:path=fitted"
        ran = command(*other, "--temperature", 1, "--acceptance", spec, "--output", f"other-{kind}")
        assert ran.code == 0, ran.err
        (entry,) = open_recording(tmp_path / f"other-{kind}").requests()
        estimates = entry[1].estimated[spec]
        assert ((estimates >= 0) & (estimates <= 1)).all()

        def line(*arguments: object, spec: str = spec) -> str:
            ran = command(*other[:1], *arguments, "--acceptance", spec, "--output", "refused")
            assert ran.code == 2
            assert ran.err.count("\n") == 1
            return str(ran.err)

        assert "fitted at temperature 0, 1, not at 0.5" in line(*other[1:], "--temperature", 0.5)
        assert "was fitted to 1 of these 1 prompts" in line("--suite", "gsm8k", *parts, "--limit", 1)
        assert "fitted for a drafter with" in line(*other[1:], "--drafter", "ngram") or kind == "learned"


def test_without_states_there_is_no_learned_one_and_it_is_said(
    recorded: Callable[..., Path], command: Callable[..., Any], parts: tuple[object, ...]
) -> None:
    ran = command("train", "acceptance", "--recording", recorded("rec"), "--output", "fitted")
    assert ran.code == 0, ran.err
    assert "no learned estimator at temperature 0" in ran.out
    given = ("--limit", 1, "--max-new-tokens", 6, "--acceptance", "learned:path=fitted", "--output", "o")
    ran = command("record", "--suite", "amc", *parts, *given)
    assert ran.code == 2
    assert "nothing fitted for acceptance estimator 'learned'" in ran.err


def test_misuse_ends_in_one_line(recorded: Callable[..., Path], command: Callable[..., Any], tmp_path: Path) -> None:
    folder = recorded("rec")

    def line(*arguments: object) -> str:
        ran = command("train", "acceptance", *arguments)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        return str(ran.err)

    assert "no recording" in line("--recording", "nothing", "--output", "o")
    assert "not an empty folder" in line("--recording", folder, "--output", folder)
    index = (folder / "index.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "index.jsonl").write_text("".join(index[:9]), encoding="utf-8")
    assert "9 prompts to fit acceptance to; expected at least 10" in line("--recording", folder, "--output", "o")
    assert not (tmp_path / "o").exists()
