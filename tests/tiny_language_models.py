"""Small random causal LMs with a tokenizer, as checkpoint folders, for drafting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_backbones import write_backbone
from tiny_deepseek import tiny_tokenizer


def write_language_model(folder: Path, vocab: int, family: str = "llama", **changes: Any) -> Path:
    """A causal LM of so many tokens, with the tokenizer that `tiny_tokenizer` makes of that size."""
    write_backbone(folder, family, vocab_size=vocab, **{"positions": 256, **changes})
    tiny_tokenizer(folder, vocab)
    return folder
