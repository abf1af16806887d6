"""Text of the target's own: what it would go on to write, greedily, after real beginnings.

At run time a drafter reads the target's words, not an author's. A head that is trained on these too meets
at run time what it has seen before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track

from ecospec.errors import UserError
from ecospec.harness.training.corpus import Corpus

FILE = "own_text.npy"
BATCH = 64
REAL_SHARE = 0.625
"""Share of a window that is the corpus's: long enough to set a scene, and the rest short enough that a
small model, which ends in loops, has seldom got there."""


def real_tokens(length: int) -> int:
    """How many tokens of a window of ``length`` are the corpus's."""
    return round(length * REAL_SHARE)


def own_text(
    model: Any, corpus: Corpus, folder: Path, *, windows: int, length: int, seed: int, device: str = "cpu"
) -> npt.NDArray[np.int64]:
    """Windows [windows, length] that begin with the corpus's words and go on with the model's.

    A document may end within a window; the model then begins another, as in the stream it was trained on.
    The windows are written to ``own_text.npy`` in ``folder`` and read from there the next time.

    Raises:
        UserError: the file there holds windows of another number or length.
    """
    path = folder / FILE
    if path.exists():
        try:
            found: npt.NDArray[np.int64] = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: not readable ({error}); remove it") from error
        if found.shape != (windows, length):
            raise UserError(f"{path}: windows {found.shape}, expected {(windows, length)}; remove it")
        return found
    real = real_tokens(length)
    written = np.empty((windows, length), dtype=np.int64)
    starts = range(0, windows, BATCH)
    for start in track(starts, description="own text"):
        count = min(BATCH, windows - start)
        prefix = torch.from_numpy(corpus.windows(count, real, seed=seed, step=start)).to(device)
        with torch.inference_mode():
            ids = model.generate(
                prefix,
                attention_mask=torch.ones_like(prefix),
                do_sample=False,
                max_new_tokens=length - real,
                min_new_tokens=length - real,
                eos_token_id=None,
                pad_token_id=0,
            )
        written[start : start + count] = ids.cpu().numpy()
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, written)
    os.replace(partial, path)
    return written
