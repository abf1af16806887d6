"""What no target can have, by its config; everything else is found by trying, see `Target`."""

from __future__ import annotations

from typing import Any

from ecospec.errors import UserError

_RUNNING = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "ssm", "moe_mamba")
"""Kinds of layers that sum up what they have read in a state."""
_SPARSE = ("compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse", "indexed_attention")
"""Kinds of layers that choose or compress the keys that they see."""


def check_config(name: str, config: Any) -> None:
    """Refuse what cannot be verified and rolled back exactly.

    Args:
        name: the model class, for the message. config: of the decoder.

    Raises:
        UserError: naming what it is, and why.
    """
    kinds = {str(kind) for key in ("layer_types", "layers_block_type") for kind in getattr(config, key, None) or ()}
    running = sorted(kind for kind in kinds if kind in _RUNNING)
    if running:
        raise UserError(
            f"{name} has {running[0]} layers: they keep a running state in place of keys and values, which cannot "
            "be taken back to before a rejected draft token, nor branch as a draft tree does; it is not supported"
        )
    sparse = sorted(kind for kind in kinds if kind in _SPARSE)
    if sparse:
        raise UserError(
            f"{name} has {sparse[0]} layers: they choose or compress the keys that they see in a memory of their own, "
            "from which a rejected draft token cannot be taken back; it is not supported"
        )
    if (
        getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", True) is False
    ):
        raise UserError(
            f"{name} is bidirectional: a token sees those behind it, so that it cannot be decoded one after another; "
            "expected a causal LM"
        )
    positions = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    for kind in ("longrope", "dynamic"):
        if f"'{kind}'" in positions:
            raise UserError(
                f"{name} has {kind} positions, whose scale depends on the longest row of a pass: "
                "what a token gives would depend on what it is verified with; they are not supported"
            )
