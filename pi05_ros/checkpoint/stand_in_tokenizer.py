"""A small tokenizer of our own in the manner of PaliGemma's, for checkpoints that cannot ship the real one.

Its ids are not PaliGemma's: with trained weights it would be noise.
"""

from __future__ import annotations

_CORPUS = (
    "Task: pick up the red cube and put it in the bowl, State: 0 1 2 3 4 5 6 7 8 9 10 128 255 -1;\nAction: ",
    "Task: fold the towel, State: 11 22 33 44 55 66 77 88 99 100 200;\nAction: ",
    "Task: open the drawer and place the cup on the plate, State: 127 129 64 192 32;\nAction: ",
    "transfer the cube to the left arm, uncap the pen, insert the peg into the socket, close the lid, push the button",
)


def stand_in_tokenizer(vocab: int) -> str:
    """The JSON of a byte-fallback BPE with pad 0, eos 1, bos 2, unk 3, space as U+2581, of at most ``vocab`` tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, 512), special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *bytes_], show_progress=False
    )
    # Words are merged within themselves only: a corpus this small would otherwise become one token a sentence.
    words = [("" if index == 0 else " ") + word for line in _CORPUS for index, word in enumerate(line.split(" "))]
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer.to_str(pretty=False)
