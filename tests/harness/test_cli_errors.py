"""A user's mistake ends in one line, exit code 2, and nothing on disk."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tiny_checkpoints import Checkpoints

from ecospec.harness import plugins as harness_plugins
from ecospec.harness.loading import embedded_folder
from ecospec.harness.plugins import load_plugins
from ecospec.policies import Policy, SelectionRequest


def only_line(err: str) -> str:
    """The error's one line, notes of unused options aside; a traceback or a second line fails."""
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("ecospec-bench: note: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("ecospec-bench: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "margnal"), "did you mean 'marginal'"),
        (("--policy", "marginal:epsilom=0.5"), "epsilon"),
        (("--policy", "marginal:epsilon=often"), "float"),
        (("--policy", "marginal:epsilon=-1"), "epsilon"),
        (("--baseline", "confidenc"), "did you mean 'confidence'"),
        (("--predictor", "learnd"), "did you mean 'learned'"),
        (("--predictor", "learned:path=nowhere"), "config.json"),
        (("--predictor", "learned"), "learned:path=FOLDER"),
        (("--polcy", "marginal"), "--policy"),
        (("--budget", "many"), "many"),
        (("--budget", "0"), "--budget 0"),
        (("--draft-steps", "0"), "--draft-steps 0"),
        (("--draft-topk", "0"), "--draft-topk 0"),
        (("--max-new-tokens", "0"), "--max-new-tokens 0"),
        (("--limit", "0"), "limit"),
        (("--temperature", "-1"), "temperature"),
        (("--temperature", "nan"), "temperature"),
        (("--top-p", "0"), "top-p"),
        (("--top-k", "-2"), "top-k"),
        (("--dtype", "float8"), "float32"),
        (("--device", "tpu"), "cpu"),
        (("--check", "some"), "sample"),
        (("--data", "missing.jsonl"), "missing.jsonl"),
        (("--resume", "--output", "empty"), "holds no run"),
        (("--resume",), "without --output"),
        (("--output", "x" * 300), "cannot be made"),
        (("--resume", "--output", "x" * 300), "--resume"),
        (("--draft-topk", "5000"), "at most 4096"),
        (("--threads", "3000000000"), "at most 1024"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_what_was_expected(
    bench: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    ran = bench(*arguments)
    assert ran.code == 2
    assert said in only_line(ran.err)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_suite_names_the_nearest(bench: Callable[..., Any]) -> None:
    ran = bench(suite="gsm8")
    assert ran.code == 2
    assert "did you mean 'gsm8k'" in only_line(ran.err)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rows"),
        ("not json\n", "line 1"),
        ('{"question": "a?", "answer": "#### 1"}\n[1]\n', "line 2"),
        ('{"question": "a?", "reply": "#### 1"}\n', "answer"),
        ('{"question": 3, "answer": "#### 1"}\n', "question"),
    ],
)
def test_unusable_data_is_one_line(bench: Callable[..., Any], tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "data.jsonl").write_text(content, encoding="utf-8")
    ran = bench("--data", "data.jsonl")
    assert ran.code == 2
    assert said in only_line(ran.err)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_prompt_longer_than_the_context_is_named(bench: Callable[..., Any], tmp_path: Path) -> None:
    row = {"question": "Why " + "so many words " * 3000 + "?", "answer": "Because.\n#### 1"}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    ran = bench("--data", "long.jsonl")
    assert ran.code == 2
    line = only_line(ran.err)
    assert "gsm8k-0" in line
    assert "context of 4096" in line
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]


def test_a_target_without_a_drafter_is_refused(command: Callable[..., Any], checkpoints: Checkpoints) -> None:
    ran = command("--suite", "gsm8k", "--target", checkpoints.target)
    assert ran.code == 2
    assert "--drafter" in only_line(ran.err)


def test_a_folder_that_is_no_checkpoint_is_refused(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = command("--suite", "gsm8k", "--data", "embedded", "--target", "empty", "--drafter", "empty")
    assert ran.code == 2
    assert "no config.json" in only_line(ran.err)


def test_a_drafter_of_another_target_is_refused(
    command: Callable[..., Any], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    raw = json.loads((checkpoints.drafter / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({**raw, "vocab_size": 999}), encoding="utf-8")
    (tmp_path / "head" / "model.safetensors").write_bytes((checkpoints.drafter / "model.safetensors").read_bytes())
    ran = command("--suite", "gsm8k", "--data", "embedded", "--target", checkpoints.target, "--drafter", "head")
    assert ran.code == 2
    assert "vocab_size is 999" in only_line(ran.err)


def test_a_used_output_folder_is_refused(bench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    ran = bench("--output", "out")
    assert ran.code == 2
    assert "not an empty folder" in only_line(ran.err)
    assert (tmp_path / "out" / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budgett: 4\n", "did you mean 'budget'"),
        ("- budget\n", "list"),
        ("budget: [1, 2]\n", "budget"),
        ("budget: {\n", "not YAML"),
        ("budget: many\n", "many"),
        ("seed: 2020-01-01\n", "date"),
        ("seed: !!set {1, 2}\n", "set"),
        ("budget: .inf\n", "inf"),
        ("budget: 3.7\n", "3.7"),
        ("budget: true\n", "True"),
        ("budget: 3\nbudget: 4\n", "2 times"),
        ("draft-steps: 2\ndraft_steps: 3\n", "2 times"),
        ("policy:\n", "empty"),
        ("policy: [{marginal: 1}]\n", "dict"),
        ("[" * 3000, "not YAML"),
    ],
)
def test_a_wrong_config_file_is_one_line(bench: Callable[..., Any], tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    ran = bench("--config", "run.yaml")
    assert ran.code == 2
    assert said in only_line(ran.err)


class Child(Policy):
    """A child without its parent."""

    name = "child"
    chosen: ClassVar[Any] = [0, 3]

    def select(self, request: SelectionRequest) -> Any:
        if isinstance(self.chosen, BaseException):
            raise self.chosen
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ([0, 3], "without its parent"),
        ([0, 1, 1], "more than once"),
        ([0, 1, 2, 3, 4, 5], "over the budget of 4"),
        ([1, 2], "without the root"),
        ([0.0, 1.0], "integers"),
        ([], "empty"),
        (None, "nothing"),
        ([0, 99], "unknown node 99"),
        (ValueError("no idea"), "raised ValueError"),
        (SystemExit(0), "raised SystemExit"),
    ],
)
def test_a_policy_that_breaks_the_contract_is_named(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: Any, said: str
) -> None:
    plugins = load_plugins()
    plugins.policies.register(Child, "a test")
    monkeypatch.setattr(Child, "chosen", chosen)
    monkeypatch.setattr(harness_plugins, "load_plugins", lambda: plugins)
    ran = bench("--policy", "child", "--output", "out")
    assert ran.code == 2
    assert list(tmp_path.iterdir()) == []
    line = only_line(ran.err)
    assert "policy 'child'" in line
    assert said in line


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['ecospec-bench', '--help']\n"
        "from ecospec.harness.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'transformers', 'lm_eval', 'datasets', 'scipy'} & set(sys.modules))"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    assert done.stdout.rstrip().endswith("set()")
    assert "--policy" in done.stdout
    assert seconds < 2.0  # half a second on an idle machine; a torch import takes several


@pytest.mark.parametrize(
    "damaged",
    [b"", b'{"suite": "gs', b"\xff\xfe", b"[]", b'{"copy_bytes_per_second": "fast"}'],
)
def test_a_damaged_manifest_cannot_be_resumed(bench: Callable[..., Any], tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_bytes(damaged)
    ran = bench("--output", "out", "--resume")
    assert ran.code == 2
    assert "damaged" in only_line(ran.err)


@pytest.mark.parametrize("damaged", [b'{"prompt_id": 1}\n', b"\xff\xfe\n"])
def test_damaged_records_cannot_be_resumed(bench: Callable[..., Any], tmp_path: Path, damaged: bytes) -> None:
    assert bench("--output", "out").code == 0
    path = tmp_path / "out" / "prompts.jsonl"
    path.write_bytes(damaged + path.read_bytes())
    ran = bench("--output", "out", "--resume")
    assert ran.code == 2
    assert "line 1" in only_line(ran.err)


CORPUS = b'{"source": "s", "license": "MIT", "text": "a b c"}\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--threads", "-1"), "--threads -1"),
        (("--threads", "0"), "--threads 0"),
        (("--steps", "0"), "--steps 0"),
        (("--seed", "99999999999999999999999"), "--seed"),
        (("--seed", "-1"), "--seed"),
        (("--seconds", "-1"), "--seconds"),
        (("--seconds", "nan"), "--seconds"),
        (("--learning-rate", "nan"), "--learning-rate"),
        (("--learning-rate", "0"), "--learning-rate"),
        (("--device", "foo"), "--device foo"),
        (("--output", "corpus.jsonl"), "a file"),
        (("--corpus", "empty.jsonl"), "no record"),
        (("--corpus", "cut.jsonl.gz"), "not readable"),
        (("--corpus", "plain.jsonl.gz"), "not readable"),
        (("--corpus", "binary.jsonl"), "not readable"),
        (("--corpus", "nowhere.jsonl"), "no such file"),
    ],
)
def test_a_training_that_cannot_be_is_one_line_and_writes_nothing(
    command: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(CORPUS)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(CORPUS * 500)[:-12])
    (tmp_path / "plain.jsonl.gz").write_bytes(CORPUS)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\xfa\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ran = command("train", "target", "--corpus", "corpus.jsonl", "--output", "out", *arguments)
    assert ran.code == 2
    assert said in only_line(ran.err)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("report", "record", "said"),
    [
        (None, "{}", "report.json"),
        ("{", "{}", "not readable as JSON"),
        ('{"rows": [{}]}', "{}", "label"),
        ('{"rows": []}', "{", "not readable as JSON"),
        ("[" * 100_000, "{}", "not readable as JSON"),
        ('{"rows": []}', "{}", "training.json"),
    ],
)
def test_a_bundle_of_damaged_parts_is_one_line_and_writes_nothing(
    command: Callable[..., Any], tmp_path: Path, report: str | None, record: str, said: str
) -> None:
    whole = embedded_folder()
    for part in ("target", "drafter", "predictor"):
        shutil.copytree(whole / part, tmp_path / part)
        (tmp_path / part / "training.json").write_text(record, encoding="utf-8")
    if report is not None:
        (tmp_path / "report.json").write_text(report, encoding="utf-8")
    ran = command(
        "bundle", "target", "drafter", "predictor", "--output", "out", "--widen", 1, "--report", "report.json"
    )
    assert ran.code == 2
    assert said in only_line(ran.err)
    assert not (tmp_path / "out").exists()
