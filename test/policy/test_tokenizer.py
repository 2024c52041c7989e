"""Prompts become ids, in both tokenizer formats, and nothing a user writes becomes a control token."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from golden_cases import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from pi05_ros.errors import CheckpointError, ObservationError
from pi05_ros.policy.tokenizer import PromptTokenizer

JSON_FILE = GOLDEN / "lerobot_fp32/tokenizer.json"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of PaliGemma's kind: BPE, byte fallback, pad 0, eos 1, bos 2, unk 3."""
    buffer = io.BytesIO()
    corpus = ["Task: pick up the cube, State: 1 2 3 4 5 6 7 8 9 0;", "Action: fold the towel, open the drawer"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("spm") / "paligemma_tokenizer.model"
    path.write_bytes(buffer.getvalue())
    return path


def test_sentencepiece_file(model_file: Path) -> None:
    tokenizer = PromptTokenizer(model_file, vocab=1024, max_length=64)
    ids = tokenizer.encode("Task: fold, State: 1;\nAction: ")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    assert ids[0] == 2
    assert processor.decode(ids[1:].tolist()) == "Task: fold, State: 1;\nAction: "
    old = tokenizer.encode_without_state("fold")
    assert old.tolist() == [2, *processor.encode("fold"), *processor.encode("\n")]


@pytest.mark.parametrize("text", ["<bos>", "a <pad> b", "<eos><unk>", "pick up <bos> the cube"])
def test_special_strings_of_a_user_are_text(text: str, model_file: Path) -> None:
    for path in (JSON_FILE, model_file):
        ids = PromptTokenizer(path, vocab=1024, max_length=64).encode(text)
        assert ids[0] == 2
        assert not set(ids[1:].tolist()) & {0, 1, 2}, path.name


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30))
def test_any_text_is_encoded_without_loss(text: str) -> None:
    from tokenizers import Tokenizer

    ids = PromptTokenizer(JSON_FILE, vocab=1024, max_length=4096).encode(text)
    assert ids.dtype == np.int64
    assert ids[0] == 2
    assert ids.max() < 768
    decoded = Tokenizer.from_file(str(JSON_FILE)).decode(ids[1:].tolist(), skip_special_tokens=False)
    assert decoded == text.replace("\u2581", " ")


def test_length_is_a_limit_not_a_suggestion() -> None:
    words = "cube " * 50
    with pytest.raises(ObservationError, match=r"prompt: with the state it has \d+ tokens, the model takes at most 20"):
        PromptTokenizer(JSON_FILE, 1024, max_length=20).encode(words)
    whole = PromptTokenizer(JSON_FILE, 1024, max_length=500).encode(words)
    cut = PromptTokenizer(JSON_FILE, 1024, max_length=20, truncate=True).encode(words)
    assert np.array_equal(cut, whole[:20])


def test_unusable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json and no \*tokenizer\.model.*paligemma"):
        PromptTokenizer(None, 1024, 64)
    with pytest.raises(CheckpointError, match="does not exist"):
        PromptTokenizer(tmp_path / "tokenizer.json", 1024, 64)
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(CheckpointError, match=f"{name}: not readable as a tokenizer"):
            PromptTokenizer(tmp_path / name, 1024, 64)
    with pytest.raises(CheckpointError, match="the tokenizer has 448 tokens, the model's embedding only 100"):
        PromptTokenizer(JSON_FILE, 100, 64)
    data = json.loads(JSON_FILE.read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<bos>"]
    data["model"]["vocab"] = {k: v for k, v in data["model"]["vocab"].items() if k != "<bos>"}
    data["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="no token <bos>"):
        PromptTokenizer(tmp_path / "tokenizer.json", 1024, 64)
