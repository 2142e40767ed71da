"""Tiny tokenizers of the kinds that models use, built in memory."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from gapless.text.tokenizer import Tokenizer
from gapless.text.tokens import BYTE_OF

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def _finish(backend: Backend, **options) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<plain>", special=False)])
    return Tokenizer(backend, special=SPECIAL, **options)


def byte_level(**options) -> Tokenizer:
    """Like Llama 3 and Qwen: 256 bytes and a few merges."""
    alphabet = sorted(BYTE_OF)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "a"), ("Ġ", "b"), ("ä", "½"), ("ä½", "ł"), ("ð", "Ł")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, **options)


def byte_fallback(**options) -> Tokenizer:
    """Like Llama 2: sentencepiece BPE whose unknown characters fall back to <0xAB> tokens."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehlo你", "▁a", "▁b", "he", "ll", "�", "▁▁"]
    merges = [("▁", "a"), ("▁", "b"), ("h", "e"), ("l", "l"), ("▁", "▁")]
    vocab = {token: i for i, token in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _finish(backend, **options)
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return tokenizer


def wordpiece(**options) -> Tokenizer:
    pieces = ["[UNK]", "hello", "world", "##ly", "a", "##b", ".", ",", "n't"]
    backend = Backend(models.WordPiece(vocab={t: i for i, t in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _finish(backend, **options)


def nested_byte_level(**options) -> Tokenizer:
    """A byte-level decoder inside a sequence: the window way, with characters across tokens."""
    tokenizer = byte_level(**options)
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Tokenizer(tokenizer.backend, special=SPECIAL, **options)


ALL = {"byte_level": byte_level, "byte_fallback": byte_fallback, "wordpiece": wordpiece, "nested": nested_byte_level}
