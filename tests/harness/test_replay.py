"""Recording and replaying: a replay is what a live run does; files, kills and misuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.decoding import Speculation
from ecospec.harness.preparing import bound_predictor
from ecospec.harness.recording import recorder as recorder_module
from ecospec.harness.recording.folder import RecordingWriter, open_recording
from ecospec.harness.recording.recorder import Recorder
from ecospec.harness.recording.replay import DRAFT, TRUE, ReplayMethod, plain_decoding, replay
from ecospec.harness.recording.steps import RecordedRequest, from_bytes, to_bytes
from ecospec.harness.runner import Bench, Method
from ecospec.policies import (
    Adaptive,
    Clairvoyant,
    Confidence,
    CostModel,
    GlobalCost,
    MarginalCost,
    Optimal,
    Oracle,
    Policy,
    Throughput,
)

POLICIES: list[Policy] = [
    *(Confidence(), GlobalCost(), MarginalCost(), Oracle()),
    *(Adaptive(), Throughput(), Optimal(), Clairvoyant()),
]
COST = CostModel(0.004, 2e-5, 2e-4, 0.003, (48.0, 76.0, 98.0, 116.0, 130.0, 142.0))
PREDICTOR = "token-frequency"
ESTIMATOR = "learned"


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["T=0", "T=1"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Path]:
    """Three prompts of the embedded model, one of them a conversation, without widening: that changes no routing."""
    folder = tmp_path_factory.mktemp("recording") / "out"
    config = RunConfig(
        suite="mtbench",
        policy=("confidence",),
        predictor=(PREDICTOR,),
        limit=2,
        max_new_tokens=24,
        widen=1,
        temperature=request.param,
        seed=5,
    )
    recorder = Recorder(config, [ESTIMATOR], states=True)
    recorder.record(folder, resume=False, on_request=lambda _: None)
    return recorder, folder


def live_steps(bench: Bench, speculation: Speculation) -> dict[str, list[tuple[int, int, int, float | None]]]:
    """What a live run does at every step, by request; conversations go on from plain decoding's answer."""
    found: dict[str, list[tuple[int, int, int, float | None]]] = {}
    for first in bench.requests:
        request = first
        while request is not None:
            (generation,) = bench.generate([request], Method("live", speculation))
            found[request.id] = [(s.emitted, s.selected, s.expert_pairs, s.predicted_overlap) for s in generation.steps]
            following = bench.renderer.follow(request, generation.text)
            if following is None:
                break
            request = following
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.name))
def test_a_replay_is_the_live_run(recorded: tuple[Recorder, Path], policy: Policy) -> None:
    recorder, folder = recorded
    bench = recorder.bench
    requests = {entry.id: request for entry, request in open_recording(folder).requests()}
    assert len(requests) == 4
    live = Speculation(
        policy,
        bench.parts.drafter,
        4,
        bench.config.draft_steps,
        bench.config.draft_topk,
        predictor=bound_predictor(PREDICTOR, bench.predictors[PREDICTOR], bench.parts),
        predictor_name=PREDICTOR,
        estimator=recorder.estimators[ESTIMATOR],
        cost_model=COST,
    )
    for budget in (3, 4, 5, 6):
        method = ReplayMethod("replayed", policy, budget, PREDICTOR, ESTIMATOR, COST)
        replayed = {each[0].request: each[0] for each in replay(requests.items(), [method], 64)}
        steps = live_steps(bench, replace(live, budget=budget))
        assert replayed.keys() == steps.keys()
        for name, own in steps.items():
            each = replayed[name]
            assert (each.steps, each.emitted) == (len(own), sum(step[0] for step in own)), (name, budget)
            assert each.selected == sum(step[1] for step in own), (name, budget)
            assert each.expert_pairs == sum(step[2] for step in own), (name, budget)
            overlaps = [step[3] for step in own if step[3] is not None]
            expected = sum(overlaps) / len(overlaps) if overlaps else None
            assert each.overlap == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_plain_decoding_reads_k_experts_a_token(recorded: tuple[Recorder, Path]) -> None:
    requests = {entry.id: request for entry, request in open_recording(recorded[1]).requests()}
    for each in plain_decoding(requests, COST):
        assert each.expert_pairs == each.steps * 6 * 8
        assert each.seconds == pytest.approx(each.steps * (0.004 + 48 * 2e-5 + 2e-4))


def test_seconds_are_those_of_the_cost_model(recorded: tuple[Recorder, Path]) -> None:
    requests = {entry.id: request for entry, request in open_recording(recorded[1]).requests()}
    method = ReplayMethod("c", Confidence(), 4, PREDICTOR, DRAFT, COST)
    for (each,) in replay(requests.items(), [method], 64):
        expected = each.steps * 0.007 + each.expert_pairs * 2e-5 + each.selected * 2e-4
        assert each.seconds == pytest.approx(expected)


def test_the_true_routing_can_stand_in_for_a_predictor(recorded: tuple[Recorder, Path]) -> None:
    requests = {entry.id: request for entry, request in open_recording(recorded[1]).requests()}
    methods = [
        ReplayMethod("a", MarginalCost(), 4, TRUE, DRAFT, None),
        ReplayMethod("b", Oracle(), 4, PREDICTOR, DRAFT, None),
    ]
    for a, b in replay(requests.items(), methods, 64):
        assert replace(a, method="") == replace(b, method="")
        assert a.overlap == 1.0
        assert a.seconds is None


def test_states_and_entropies_are_those_of_the_drafter(recorded: tuple[Recorder, Path]) -> None:
    _, folder = recorded
    for _, request in open_recording(folder).requests():
        assert request.states is not None
        assert request.state_rows is not None
        assert request.entropies is not None
        assert request.states.shape[1] == 256
        assert int(request.state_rows.max()) < len(request.states)
        for position in range(request.positions):
            tree, at = request.tree(position), request.rows(position)
            entropies = request.entropies[at]
            # Siblings were drafted from one distribution; the draft vocabulary has 2048 tokens.
            for children in tree.children:
                assert len({float(entropies[child]) for child in children}) <= 1
                assert len({int(request.state_rows[at][child]) for child in children}) <= 1
            assert (entropies[1:] > 0).all()
            assert (entropies <= np.log(2048)).all()


# --- hand-made ---


def by_hand() -> RecordedRequest:
    """Output 10, 11, 12, 13: at the first position node 1 is right and so is its child; at the second nothing is."""
    return RecordedRequest(
        tokens=np.array([10, 11, 12, 13], dtype=np.int32),
        sizes=np.array([4, 2, 1], dtype=np.int32),
        node_tokens=np.array([10, 11, 50, 12, 11, 60, 12], dtype=np.int32),
        parents=np.array([-1, 0, 0, 1, -1, 0, -1], dtype=np.int32),
        probs=np.array([1.0, 0.5, 0.4, 0.5, 1.0, 0.9, 1.0]),
        choices=np.array([11, 12, 99, 13, 12, 99, 13], dtype=np.int32),
        routing=np.array([[[0, 1], [1, 2], [4, 5], [2, 3], [0, 1], [6, 7], [0, 1]]], dtype=np.uint8),
    )


def test_a_replay_by_hand() -> None:
    def sums(policy: Policy, budget: int) -> tuple[int, int, int, int]:
        method = ReplayMethod("m", policy, budget, TRUE, DRAFT, None)
        ((found,),) = replay([("a", by_hand())], [method], 8)
        return found.steps, found.emitted, found.selected, found.expert_pairs

    # γ = 1: a token a step, two experts each.
    assert sums(Confidence(), 1) == (3, 3, 3, 6)
    # γ = 2: node 1 is accepted, two tokens; {0, 1, 2}. Then the third position, a root alone.
    assert sums(Confidence(), 2) == (2, 3, 3, 5)
    # γ = 4: the whole tree, {0 … 5}; three tokens, and that is the end.
    assert sums(Confidence(), 4) == (1, 3, 4, 6)
    assert sums(Clairvoyant(), 4) == (1, 3, 3, 4)


def test_what_is_emitted_ends_with_the_output() -> None:
    request = replace(by_hand(), tokens=np.array([10, 11], dtype=np.int32), sizes=np.array([7], dtype=np.int32))
    request = replace(request, parents=np.array([-1, 0, 0, 1, 3, 0, 0], dtype=np.int32))
    method = ReplayMethod("m", Confidence(), 7, TRUE, DRAFT, None)
    ((found,),) = replay([("a", request)], [method], 8)
    assert (found.steps, found.emitted) == (1, 1)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens and 3 trees"):
        replace(by_hand(), tokens=np.array([1, 2, 3], dtype=np.int32))
    with pytest.raises(ValueError, match="choices has shape"):
        replace(by_hand(), choices=np.zeros(3, dtype=np.int32))
    with pytest.raises(ValueError, match="mine has shape"):
        replace(by_hand(), predicted={"mine": np.zeros((2, 7, 2), dtype=np.uint8)})


def test_bytes_come_back_as_they_were() -> None:
    full = replace(
        by_hand(),
        predicted={"learned:path=/a/b": np.array([[[0, 1]] * 7], dtype=np.uint8)},
        estimated={"isotonic": np.linspace(0, 1, 7)},
        entropies=np.zeros(7, dtype=np.float32),
        states=np.ones((2, 3), dtype=np.float16),
        state_rows=np.zeros(7, dtype=np.int32),
    )
    back = from_bytes(to_bytes(full), Path("x"))
    assert back.predicted.keys() == {"learned:path=/a/b"}
    assert np.array_equal(back.estimated["isotonic"], full.estimated["isotonic"])
    assert back.states is not None
    assert back.states.dtype == np.float16
    with pytest.raises(UserError, match="x: not a recorded request"):
        from_bytes(to_bytes(full)[:-3], Path("x"))


# --- the folder and the commands ---


@pytest.fixture
def record(bench: Callable[..., Any], command: Callable[..., Any], checkpoints: Any) -> Callable[..., Any]:
    """Record three short answers of the small random checkpoint."""

    def run(*arguments: object) -> Any:
        parts = ("--target", checkpoints.target, "--drafter", checkpoints.drafter, "--data", "embedded")
        given = () if "--predictor" in arguments else ("--predictor", f"learned:path={checkpoints.learned}")
        limits = ("--limit", 3, "--max-new-tokens", 8, "--acceptance", "draft")
        return command("record", "--suite", "gsm8k", *parts, *given, *limits, *arguments)

    return run


def test_record_and_replay_by_command(record: Callable[..., Any], command: Callable[..., Any], tmp_path: Path) -> None:
    ran = record("--output", "rec")
    assert ran.code == 0, ran.err
    assert "3 requests" in ran.out
    ran = command("replay", "rec", "--policy", "confidence,marginal,oracle,clairvoyant", "--budget", "3,4")
    assert ran.code == 0, ran.err
    for word in ("AR", "marginal-cost", "clairvoyant", "those of a live run", "a yardstick"):
        assert word in ran.out
    assert "speed-up" not in ran.out
    ran = command(
        *("replay", "rec", "--policy", "confidence,adaptive,throughput,optimal"),
        *("--cost-model", "qwen3-235b-a22b", "--output", "out.json"),
    )
    assert ran.code == 0, ran.err
    assert "PROJECTION" in ran.out
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in found["rows"]] == ["AR", "confidence", "adaptive", "throughput", "optimal"]
    confidence = found["rows"][1]
    # The small model has K = 2, the projected one 8.
    assert confidence["projected_experts"] == pytest.approx(4 * confidence["active_experts"])


@pytest.mark.parametrize("kill_at", range(1, 10))
def test_a_killed_recording_goes_on_to_the_same_files(
    record: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    assert record("--output", "whole").code == 0
    calls = 0
    own_add, own_steps = RecordingWriter.add, Recorder._steps

    def died() -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise KeyboardInterrupt

    def add(self: RecordingWriter, *arguments: Any) -> None:
        died()
        own_add(self, *arguments)
        died()

    def steps(self: Recorder, *arguments: Any) -> Any:
        died()
        return own_steps(self, *arguments)

    monkeypatch.setattr(RecordingWriter, "add", add)
    monkeypatch.setattr(recorder_module.Recorder, "_steps", steps)
    assert record("--output", "cut").code == 130
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    index = tmp_path / "cut" / "index.jsonl"
    with index.open("a", encoding="utf-8") as file:
        file.write('{"id": "torn')
    (tmp_path / "cut" / "requests" / "00002.safetensors.partial").write_bytes(b"half")
    ran = record("--output", "cut", "--resume")
    assert ran.code == 0, ran.err
    assert index.read_bytes() == (tmp_path / "whole" / "index.jsonl").read_bytes()
    for path in (tmp_path / "whole" / "requests").iterdir():
        assert (tmp_path / "cut" / "requests" / path.name).read_bytes() == path.read_bytes()


def test_misuse_ends_in_one_line(record: Callable[..., Any], command: Callable[..., Any], tmp_path: Path) -> None:
    assert record("--output", "rec").code == 0

    def line(*arguments: object) -> str:
        ran = command(*arguments)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        return str(ran.err)

    assert "not an empty folder" in record("--output", "rec").err
    assert "with max_new_tokens = 8, now it is 9" in record("--output", "rec", "--resume", "--max-new-tokens", 9).err
    assert "No such option" in record("--output", "r2", "--batch-size", 2).err
    assert "looks at the true routing" in record("--output", "r2", "--predictor", "oracle").err
    assert "no recording" in line("replay", "nothing")
    assert "did you mean" in line("replay", "rec", "--policy", "confidenc")
    assert "not in the recording" in line("replay", "rec", "--predictor", "feature")
    assert "not in the recording" in line("replay", "rec", "--acceptance", "coin")
    assert "nothing fitted belongs to this target" in line("replay", "rec", "--acceptance", "isotonic")
    assert "needs a cost model" in line("replay", "rec", "--policy", "adaptive")
    assert "--budget 0" in line("replay", "rec", "--budget", 0)
    for limit in (0, -1):
        assert f"--limit {limit}: expected" in line("replay", "rec", "--limit", limit)
    assert "2 requests of gsm8k" in command("replay", "rec", "--limit", 2).out
    assert "did you mean 'gpt-oss-120b'" in line("replay", "rec", "--cost-model", "gpt-oss")
    (tmp_path / "bad.yaml").write_text("name: x\nsource: y\nbandwidth: -1\n", encoding="utf-8")
    assert "bad.yaml: bandwidth: Input should be greater than or equal" in line(
        "replay", "rec", "--cost-model", "bad.yaml"
    )
    (tmp_path / "bad.yaml").write_text("[1, 2", encoding="utf-8")
    assert "not YAML" in line("replay", "rec", "--cost-model", "bad.yaml")
    path = next((tmp_path / "rec" / "requests").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert "not the file that was recorded" in line("replay", "rec")


def test_a_policy_that_misbehaves_is_named() -> None:
    class Greedy(Confidence):
        """All of it."""

        def select(self, request: Any) -> list[int]:
            return list(range(request.tree.size + 1))

    with pytest.raises(UserError, match="policy 'confidence' selected unknown node"):
        list(replay([("a", by_hand())], [ReplayMethod("m", Greedy(), 9, TRUE, DRAFT, None)], 8))
