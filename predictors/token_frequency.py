"""The token-frequency predictor: a table of the experts each token id was routed to most often."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ecospec.errors import UserError
from ecospec.policies import DraftTree
from ecospec.predictors.checkpoint import read_predictor, save_predictor, target_facts
from ecospec.predictors.contract import BoundPredictor, PredictionRequest, PredictorSession, Routing, TargetView

KIND = "token-frequency"


def build_table(counts: npt.NDArray[np.int64], top_k: int) -> npt.NDArray[np.int64]:
    """The top-K experts per layer for every token id.

    Args:
        counts: [V, L, E], how often token v was routed to expert e of layer l.
        top_k: K.

    Returns:
        [V, L, K]. A token id never seen gets the experts most used over all tokens; ties, and places that
        a seen token leaves open, go to the expert more used over all tokens, then to the lower index.
    """
    overall = counts.sum(axis=0)
    # Counts are integers, so a bonus below one breaks ties and never overturns a count.
    bonus = overall / (overall.sum(axis=-1, keepdims=True) + 1)
    return np.argsort(-(counts + bonus), axis=-1, kind="stable")[..., :top_k].astype(np.int64)


def save_table(folder: Path, table: npt.NDArray[np.int64], target: TargetView) -> None:
    """Write a table [V, L, K] as a predictor folder."""
    config = {"kind": KIND, "target": target_facts(target)}
    save_predictor(folder, config, {"top_experts": torch.from_numpy(table).to(torch.int16)})


def load_table(folder: Path, target: TargetView) -> BoundTable:
    """Read a table.

    Raises:
        UserError: see `read_predictor`; also when the table's shape or an expert in it is not the target's.
    """
    _, tensors = read_predictor(folder, KIND, target)
    expected = (target.vocab_size, target.moe_layers, target.top_k)
    table = tensors.get("top_experts")
    if table is None or tuple(table.shape) != expected:
        found = "nothing" if table is None else tuple(table.shape)
        raise UserError(f"predictor {folder}: tensor top_experts has shape {found}, expected {expected}")
    experts = table.numpy().astype(np.int64)
    wrong = experts[(experts < 0) | (experts >= target.experts)]
    if len(wrong):
        raise UserError(f"predictor {folder}: top_experts names expert {wrong[0]}, expected 0 to {target.experts - 1}")
    return BoundTable(experts)


class BoundTable(BoundPredictor):
    """A table [V, L, K]."""

    def __init__(self, table: npt.NDArray[np.int64]) -> None:
        self.table = table

    def start(self, request: PredictionRequest) -> PredictorSession:
        """The context does not matter."""
        return TableSession(self.table)


class TableSession(PredictorSession):
    """Looks token ids up."""

    def __init__(self, table: npt.NDArray[np.int64]) -> None:
        self._table = table

    def predict(self, tree: DraftTree) -> Routing:
        """[L, N, K]."""
        return self._table[tree.tokens].transpose(1, 0, 2)

    def commit(self, nodes: Sequence[int]) -> None:
        """Nothing is kept."""
