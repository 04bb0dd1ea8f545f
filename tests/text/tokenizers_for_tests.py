"""Tiny tokenizers: byte-level BPE, Llama 2's byte fallback, and a WordPiece (neither)."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*, add_bos: bool = False) -> str:
    """All bytes, two merges, and the special tokens <s> </s>; one added token that is not special."""
    vocab = {token: i for i, token in enumerate([*BYTE_ALPHABET, "Ġt", "he", "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<pad>")])
    tokenizer.add_tokens([AddedToken("two words 語", normalized=False), AddedToken("é", normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer.to_str()


def sentencepiece() -> str:
    """Llama 2's arrangement with BOS in front."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "ab",
        "語",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a"), ("▁", "b"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def wordpiece() -> str:
    """A decoder whose tokens have no fixed bytes."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "un", "##do", "##ing", "go", ",", "語", "\ufffd"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer.to_str()
