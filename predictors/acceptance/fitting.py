"""Fitting the learned estimator: logistic regression with one hidden layer, on nodes whose parent was accepted.

It starts as the draft's own log odds: the hidden layer adds nothing yet.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecospec.predictors.acceptance.learned import INPUTS, LOG_ODDS, Floats, Weights, normed

RANK = 32
BATCH, EPOCHS, PATIENCE = 2048, 60, 6
LEARNING_RATE, STATE_DECAY = 1e-3, 0.3
"""The states have hundreds of values, the other inputs sixteen: only the former's weights are held small."""


@dataclass(frozen=True)
class Examples:
    """n nodes, each given that its parent was accepted.

    Attributes:
        features: float32 [n, INPUTS], see `features_of`. states: float32 [M, H], the drafter's.
        rows: int64 [n], which of them each node was drafted from. accepted: bool [n].
    """

    features: Floats
    states: Floats
    rows: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.bool_]


class _Model(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(INPUTS, RANK)
        self.state = nn.Linear(hidden, RANK, bias=False)
        self.direct = nn.Linear(INPUTS, 1, bias=False)
        self.out = nn.Linear(RANK, 1)
        nn.init.zeros_(self.direct.weight)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        nn.init.normal_(self.state.weight, std=0.1 * hidden**-0.5)

    def forward(self, features: Tensor, states: Tensor) -> Tensor:
        logits: Tensor = self.direct(features) + self.out(F.silu(self.inputs(features) + self.state(states)))
        return logits[:, 0]


def fit_weights(examples: Examples, judged_by: Examples, *, seed: int = 0) -> tuple[Weights, int]:
    """Weights with the least log loss on ``judged_by``, and the epoch that gave them.

    Args:
        judged_by: other prompts' nodes, that decide when to stop.

    Raises:
        ValueError: there is nothing to fit to, or to judge by.
    """
    if not len(examples.accepted) or not len(judged_by.accepted):
        raise ValueError("no node to fit to, or to judge by")
    torch.manual_seed(seed)
    means = examples.features.mean(0)
    scales = np.where(examples.features.std(0) > 1e-6, examples.features.std(0), 1.0)

    def prepared(each: Examples) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            torch.from_numpy((each.features - means) / scales),
            torch.from_numpy(normed(each.states)),
            torch.from_numpy(each.rows),
            torch.from_numpy(each.accepted.astype(np.float32)),
        )

    features, states, rows, wanted = prepared(examples)
    test_features, test_states, test_rows, test_wanted = prepared(judged_by)
    model = _Model(states.shape[1])
    with torch.no_grad():
        model.direct.weight[0, LOG_ODDS] = float(scales[LOG_ODDS])
        model.out.bias[0] = float(means[LOG_ODDS])
    free = [*model.inputs.parameters(), *model.direct.parameters(), *model.out.parameters()]
    held_small = list(model.state.parameters())
    groups: list[dict[str, Any]] = [{"params": free}, {"params": held_small, "weight_decay": STATE_DECAY}]
    optimiser = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.0)
    best, best_loss, best_epoch = copy.deepcopy(model.state_dict()), float("inf"), 0
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for batch in torch.randperm(len(wanted), generator=generator).split(BATCH):
            loss = F.binary_cross_entropy_with_logits(model(features[batch], states[rows[batch]]), wanted[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        model.eval()
        with torch.no_grad():
            judged = model(test_features, test_states[test_rows])
            loss_now = float(F.binary_cross_entropy_with_logits(judged, test_wanted))
        if loss_now < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(model.state_dict()), loss_now, epoch
        elif epoch - best_epoch >= PATIENCE:
            break
    model.load_state_dict(best)
    # The features' means and scales become part of the weights.
    inputs = model.inputs.weight.detach().numpy().T / scales[:, None]
    direct = model.direct.weight.detach().numpy()[0] / scales
    return (
        Weights(
            inputs=inputs.astype(np.float32),
            state=model.state.weight.detach().numpy().T.astype(np.float32),
            hidden_bias=(model.inputs.bias.detach().numpy() - means @ inputs).astype(np.float32),
            direct=direct.astype(np.float32),
            out=model.out.weight.detach().numpy()[0].astype(np.float32),
            out_bias=(model.out.bias.detach().numpy() - means @ direct).astype(np.float32),
        ),
        best_epoch,
    )
