"""Names of tensors: what checkpoints call them and what ``Pi05Model`` calls them.

LeRobot and openpi write the same names; older and newer versions of both (and of transformers below them) differ in a
prefix or a segment, which ``canonical`` removes.
"""

from __future__ import annotations

import re

_PALIGEMMA = "paligemma_with_expert.paligemma.model."
_VISION = _PALIGEMMA + "vision_tower.vision_model."
EMBEDDING_NAME = "prefix.embed_tokens.weight"
EMBED_TOKENS_KEY = _PALIGEMMA + "language_model.embed_tokens.weight"
LM_HEAD_KEY = "paligemma_with_expert.paligemma.lm_head.weight"
"""Where published files keep the token embedding: the saver of tied tensors keeps the alphabetically first name."""
EXPERT_LM_HEAD_KEY = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""Present in published files, random, and used by nobody."""

# (prefix of the model's name, prefix of the checkpoint's canonical name), the more special ones first
_PREFIXES = (
    ("vision.patch_embedding.", _VISION + "embeddings.patch_embedding."),
    ("vision.position_embedding.", _VISION + "embeddings.position_embedding."),
    ("vision.layers.", _VISION + "encoder.layers."),
    ("vision.post_layernorm.", _VISION + "post_layernorm."),
    ("projector.", _PALIGEMMA + "multi_modal_projector.linear."),
    ("prefix.", _PALIGEMMA + "language_model."),
    ("expert.", "paligemma_with_expert.gemma_expert.model."),
    ("action_in_proj.", "action_in_proj."),
    ("action_out_proj.", "action_out_proj."),
    ("time_mlp_in.", "time_mlp_in."),
    ("time_mlp_out.", "time_mlp_out."),
)

_VARIANTS = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^PaligemmaWithExpert\."), "paligemma_with_expert."),
    (re.compile(r"\.paligemma\.(language_model|vision_tower|multi_modal_projector)\."), r".paligemma.model.\1."),
    (re.compile(r"\.vision_tower\.(?!vision_model\.)"), ".vision_tower.vision_model."),
    (re.compile(r"\.paligemma\.model\.lm_head\."), ".paligemma.lm_head."),
    (re.compile(r"^action_time_mlp_"), "time_mlp_"),
)

_DROPPED = re.compile(
    r"state_proj\."
    r"|proprio_history_proj\."
    r"|paligemma_with_expert\.gemma_expert\.lm_head\.weight$"
    r"|paligemma_with_expert\.gemma_expert\.model\.embed_tokens\.weight$"
    r"|paligemma_with_expert\.gemma_expert\.model\.(layers\.\d+\.\w*layernorm|norm)\.weight$"
)


def canonical(key: str) -> str:
    """The name that a checkpoint's key has in the published pi05_base file."""
    for pattern, replacement in _VARIANTS:
        key = pattern.sub(replacement, key)
    return key


def is_dropped(key: str) -> bool:
    """True for tensors that checkpoints may hold and inference never uses."""
    return _DROPPED.match(canonical(key)) is not None


def is_lm_head(key: str) -> bool:
    """True for the output head that holds the token embedding where a file has no ``embed_tokens``."""
    return canonical(key) == LM_HEAD_KEY


def model_name(key: str) -> str | None:
    """The parameter of ``Pi05Model`` that a checkpoint's key belongs to, None if no parameter could be meant."""
    key = canonical(key)
    if key == LM_HEAD_KEY:
        return EMBEDDING_NAME
    for ours, theirs in _PREFIXES:
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return None


def checkpoint_key(name: str) -> str:
    """The key of a parameter of ``Pi05Model`` in the published layout."""
    if name == EMBEDDING_NAME:
        return LM_HEAD_KEY
    for ours, theirs in _PREFIXES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise KeyError(name)
