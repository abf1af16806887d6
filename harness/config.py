"""All that a run is asked for, in one dataclass; the command line and ``--config`` fill the same fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHECKS = ("all", "sample", "none")
SAMPLE_EVERY = 4
"""With ``--check sample``, every fourth prompt is checked."""


@dataclass(frozen=True)
class RunConfig:
    """One run. The fields are the options of ``ecospec-bench`` with underscores.

    Attributes:
        predictor: with several, every policy that needs predicted expert sets is run with each.
        acceptance: estimator for the policies that look at estimates of acceptance.
        cost_model: file to take in place of the saved cost model of this device and target.
        target: None for the embedded model, else a checkpoint folder or hub name.
        target_revision, drafter_revision: of a hub name: branch, tag or commit; None for the newest.
        trust_remote_code: whether Python files of the target's checkpoint may run.
        drafter: an EAGLE-3 head's folder or hub name, or a drafter's spec; None for the embedded head (embedded target
            only).
        data: ``embedded``, ``hub``, or a JSONL or parquet file or folder in the data set's columns; None for
            ``embedded`` with the embedded target, else ``hub``.
        revision: of the data set on the hub; None for the newest.
        chat_template: on, off, or auto for on where the target's tokenizer has one.
        thinking: on, off, or auto for what the chat template does by itself.
        system_prompt: for a chat model; None for none.
        limit: at most so many prompts; None for all.
        batch_size: prompts decoded together; consecutive ones.
        widen: widening factor of the routed experts; None for what the embedded model asks for, else 1.
        device, dtype: ``auto`` means CUDA and bfloat16 where there is a GPU, else CPU and float32; the
            embedded model is always float32.
        device_map, max_memory, offload_folder: how a large target is spread over devices; see `placement_of`.
        parallel: tensor or expert, how a target is split over the processes of a launcher; None for tensor.
        run_code: whether code that the model wrote may run on this machine, to be scored.
        output: the run folder; None for a new one under ``runs/``.
    """

    suite: str
    policy: tuple[str, ...]
    baseline: str = "confidence"
    predictor: tuple[str, ...] = ("feature",)
    acceptance: str = "learned"
    cost_model: Path | None = None
    target: str | None = None
    target_revision: str | None = None
    trust_remote_code: bool = False
    drafter: str | None = None
    drafter_revision: str | None = None
    data: str | None = None
    revision: str | None = None
    chat_template: str = "auto"
    thinking: str = "auto"
    system_prompt: str | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    budget: int = 4
    draft_steps: int = 3
    draft_topk: int = 2
    batch_size: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    widen: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    max_memory: str | None = None
    offload_folder: str | None = None
    parallel: str | None = None
    threads: int | None = None
    check: str = "all"
    run_code: bool = False
    output: Path | None = None
    resume: bool = False
