"""How often a predictor is right about what a target wrote: the paper's accuracy, by layer and by suite.

Accuracy is the mean share of the K true experts among the K predicted, over tokens and MoE layers. It is taken over
the tokens that the target itself wrote, given all before them, as a predictor meets them while decoding; of a text
that was only read, over all but its first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table
from rich.text import Text

from ecospec.errors import UserError
from ecospec.policies import DraftTree
from ecospec.predictors.asking import AskedBatch
from ecospec.predictors.contract import BoundPredictor, NodeStates, PredictionRequest, Routing, TargetView
from ecospec.predictors.traces import TracedText

ALL = "all"


@dataclass
class Accuracy:
    """Hits and tokens of one predictor.

    Attributes:
        hits: by source, true experts that were predicted, in each MoE layer [L].
        tokens: by source.
        top_k: K.
    """

    top_k: int
    hits: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, source: str, hits: npt.NDArray[np.int64], tokens: int) -> None:
        """Count a text."""
        for name in (source, ALL):
            self.hits[name] = self.hits.get(name, np.zeros_like(hits)) + hits
            self.tokens[name] = self.tokens.get(name, 0) + tokens

    def by_layer(self, source: str = ALL) -> npt.NDArray[np.float64]:
        """Accuracy in each MoE layer [L]."""
        found: npt.NDArray[np.float64] = self.hits[source] / (self.tokens[source] * self.top_k)
        return found

    def mean(self, source: str = ALL) -> float:
        """Accuracy over tokens and layers."""
        return float(self.by_layer(source).mean())


def source_of(name: str) -> str:
    """The suite, or the kind of text, that a text of a trace comes from: its id without the number."""
    return name.rsplit("-", 1)[0]


def accuracy_of(
    name: str,
    bound: BoundPredictor,
    target: TargetView,
    texts: Iterable[TracedText],
    *,
    oracle: bool,
    states_of: Callable[[TracedText, DraftTree], NodeStates] | None = None,
) -> Accuracy:
    """The accuracy of a predictor over texts; one that looks at the true routing is shown that of the trace.

    Args:
        states_of: gives the drafter's states for the last tokens of a text, as a tree of a single path.

    Raises:
        PredictorError: it raised or broke its contract.
        UserError: there is no text with a token to predict.
    """
    found = Accuracy(target.top_k)
    shape = (target.moe_layers, target.experts, target.top_k)
    for text in texts:
        start = text.judged_from
        tokens = text.tokens[start:]
        if not len(tokens):
            continue
        true = text.routing[:, start:].astype(np.int64)
        seen = _no_drafter if states_of is None else partial(states_of, text)
        request = PredictionRequest(tuple(text.tokens[:start].tolist()), len(text.tokens), partial(_shown, true), seen)
        asked = AskedBatch(name, bound, shape, [request], oracle=oracle)
        # The written tokens are a draft tree of a single path.
        sets = asked.predict([DraftTree.chain(tokens.astype(np.int64), np.ones(len(tokens)))])[0]
        mask = np.zeros((len(tokens), target.moe_layers, target.experts), dtype=bool)
        np.put_along_axis(mask, true.transpose(1, 0, 2), True, axis=-1)
        hits = (sets.to_mask() & mask).sum((0, 2))
        found.add(source_of(text.id), hits, len(tokens))
    if not found.tokens:
        raise UserError(
            "the trace has no text with a token to predict; expected answers, or texts of two tokens or more"
        )
    return found


def _shown(true: Routing, tree: DraftTree) -> Routing:
    """The true routing of a tree that is the text itself."""
    return true


def _no_drafter(tree: DraftTree) -> NodeStates:
    raise UserError(
        "a predictor reads the drafter's states, but there is no drafter that has any; expected --drafter with an "
        "EAGLE-3 head"
    )


def held_out_of(folder: Path) -> set[str]:
    """The texts that a training from traces held out, by its ``training.json``, as `TracedText.given`.

    Raises:
        UserError: there is none, or it names none.
    """
    path = folder / "training.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))["held_out"]
        if not (isinstance(given, list) and given and all(isinstance(name, str) for name in given)):
            raise ValueError("held_out is no list of texts")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"--held-out-of {folder}: no training from traces ({type(error).__name__}: {error}); expected its --output"
        ) from error
    return set(given)


def accuracy_tables(found: Mapping[str, Accuracy]) -> list[Table]:
    """A table by source, one by layer; the predictors across."""
    first = next(iter(found.values()))
    sources = [*(name for name in first.tokens if name != ALL), ALL]
    by_source = [[name, *(_share(a.mean(name)) for a in found.values()), f"{first.tokens[name]:,}"] for name in sources]
    layers = range(len(first.by_layer()))
    by_layer = [[str(layer), *(_share(float(a.by_layer()[layer])) for a in found.values())] for layer in layers]
    title = "accuracy: share of the true experts that were predicted, over what the target wrote"
    return [
        plain_table(["text", *found, "tokens"], by_source, title),
        plain_table(["MoE layer", *found], by_layer, f"{title}, by layer"),
    ]


def accuracy_json(found: Mapping[str, Accuracy]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        label: {
            "accuracy": {name: a.mean(name) for name in a.tokens},
            "by_layer": [float(value) for value in a.by_layer()],
            "tokens": dict(a.tokens),
        }
        for label, a in found.items()
    }


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    """A table of text, its first column on the left."""
    named: dict[str, Any] = {"title": Text(title), "title_justify": "left"} if title else {}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, **named)
    for index, label in enumerate(header):
        table.add_column(Text(label), justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
