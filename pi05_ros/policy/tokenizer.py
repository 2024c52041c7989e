"""Text to token ids: PaliGemma's tokenizer as a ``tokenizer.json`` or as a SentencePiece ``.model`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from pi05_ros.errors import CheckpointError, ObservationError

WHERE_FROM = (
    "It is PaliGemma's: tokenizer.json from the Hugging Face repository google/paligemma-3b-pt-224 (accept its licence "
    "there), or openpi's paligemma_tokenizer.model. Put it into the checkpoint folder or name it with tokenizer=."
)


class _Encoder(Protocol):
    bos: int
    size: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, with no special token added and none recognised in it."""


class _JsonEncoder:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        # What a user writes is text, also if it reads "<bos>": SentencePiece sees it so, and so did the training.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        bos = self._tokenizer.token_to_id("<bos>")
        if bos is None:
            raise ValueError("it has no token <bos>")
        self.bos: int = bos
        self.size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class _SentencePieceEncoder:
    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(path))
        self.bos: int = self._processor.bos_id()
        if self.bos < 0:
            raise ValueError("it has no begin-of-sequence piece")
        self.size: int = self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))


class PromptTokenizer:
    """Encodes prompts, and insists that they fit."""

    def __init__(self, path: Path | None, vocab: int, max_length: int, truncate: bool = False) -> None:
        """path: tokenizer.json or *.model, None if there is none. vocab: size of the model's embedding table.

        max_length: most tokens of a prompt. truncate: cut a longer one as both references do (its end, with part of
        the state, is lost) instead of refusing it.
        Raises CheckpointError: no tokenizer, unreadable, or of another vocabulary.
        """
        self.max_length, self.truncate = max_length, truncate
        if path is None:
            raise CheckpointError(f"The checkpoint folder has no tokenizer.json and no *tokenizer.model. {WHERE_FROM}")
        if not path.is_file():
            raise CheckpointError(f"{path}: the tokenizer file does not exist. {WHERE_FROM}")
        try:
            self._encoder: _Encoder = _JsonEncoder(path) if path.suffix == ".json" else _SentencePieceEncoder(path)
        except Exception as error:  # both libraries raise plain Exception
            raise CheckpointError(f"{path}: not readable as a tokenizer: {error}. {WHERE_FROM}") from error
        if self._encoder.size > vocab:
            raise CheckpointError(
                f"{path}: the tokenizer has {self._encoder.size} tokens, the model's embedding only {vocab}."
            )

    def encode(self, text: str) -> np.ndarray:
        """A text with the state in it -> int64 [length], begin-of-sequence first."""
        return self._fit([self._encoder.bos, *self._encoder.encode(text)])

    def encode_without_state(self, instruction: str) -> np.ndarray:
        """An instruction alone, in pi0's older format: begin-of-sequence, the text, a newline of its own."""
        return self._fit([self._encoder.bos, *self._encoder.encode(instruction), *self._encoder.encode("\n")])

    def _fit(self, ids: list[int]) -> np.ndarray:
        if len(ids) > self.max_length and not self.truncate:
            raise ObservationError(
                "prompt",
                f"with the state it has {len(ids)} tokens, the model takes at most {self.max_length}; shorten it",
            )
        return np.asarray(ids[: self.max_length], dtype=np.int64)
