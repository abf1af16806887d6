"""What the tests start in several processes by torchrun: ``in_processes.py WHAT OUTPUT FOLDER MODE [FOLDER MODE ...]``.

Each checkpoint, split in that mode, is decoded, and what each rank has got is written to OUTPUT.RANK. WHAT is
``decode``; with ``part`` rank 1, after some steps, selects other nodes than rank 0 does, with ``fail`` it meets an
error of its own, and with ``die`` it is gone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_decoding import decoded, load

from ecospec.errors import UserError
from ecospec.harness import steps
from ecospec.harness.distributed import together
from ecospec.harness.placement import Placement

torch.set_num_threads(1)


def decode(output: str, *pairs: str) -> tuple[int, str]:
    found = [
        decoded(load(Path(folder), Placement(parallel=mode)))
        for folder, mode in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")
    return 0, ""


def spoil(what: str) -> None:
    """Let rank 1 leave the others."""
    real, calls = steps.run_policy, [0]

    def changed(policy: Any, request: Any) -> Any:
        calls[0] += 1
        if os.environ["RANK"] == "1" and calls[0] > 3:
            if what == "fail":
                raise UserError("rank 1 has had enough")
            if what == "die":
                os._exit(0)
            return np.array([0])
        return real(policy, request)

    steps.run_policy = changed


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what != "decode":
        spoil(what)
    together(lambda: decode(*sys.argv[1:]))
