"""Tokenizer: text to ids and back, straight on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from gapless.base.errors import CheckpointError, RequestError
from gapless.base.files import read_text
from gapless.text.chat import SPECIAL_NAMES, ChatTemplate
from gapless.text.tokenizer_files import read_files, template_sources
from gapless.text.tokens import Memo, byte_ids, byte_level_map, decoder_types


class Tokenizer:
    """A model's tokenizer, special tokens and chat template. Safe to use from several threads.

    Build it with `from_dir`; the constructor takes parts, for tests.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special = dict(special or {})
        self.template = template
        self._config = dict(config or {})
        _mark_special(backend, self.special.values())
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Token ids of the tokenizer itself; a model's vocabulary may be padded beyond it."""
        added = backend.get_added_tokens_decoder()
        self.added = {token.content: i for i, token in added.items()}
        """Tokens that were added to the vocabulary whole, with their ids."""
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        steps = decoder_types(backend)
        self.byte_level = steps == ["ByteLevel"]
        """Decoding is nothing but joining the tokens' bytes."""
        self.joins_bytes = "ByteLevel" in steps
        self.byte_ids = byte_ids(backend) if "ByteFallback" in steps else frozenset[int]()
        """Tokens that are a byte each; empty where decoding takes `<0xAB>` for text."""
        self.bytes_of = tuple(Memo(partial(self._shown_bytes, skip)) for skip in (False, True))
        """Indexed by skip_special_tokens: token id -> the bytes it shows."""
        self.whole_text_of = tuple(Memo(partial(self._whole_text, skip)) for skip in (False, True))
        """Indexed by skip_special_tokens: token id -> its bytes as text; None when they are no whole characters."""
        self.text_of = Memo(lambda token: self.token_bytes(token).decode(errors="replace"))
        """Token id -> its own text; one string for all who show it, since log-probabilities name twenty a token."""

    @classmethod
    def from_dir(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read a Hugging Face tokenizer directory.

        `chat_template` is another template: the name of a file, or the template itself.
        Raises CheckpointError naming the file that is missing or broken.
        """
        root = Path(path)
        backend, config, special = read_files(root)
        sources = {"default": template_text(chat_template)} if chat_template else template_sources(root, config)
        name = "the given chat template" if chat_template else f"the chat template of {root}"
        template = ChatTemplate(sources, special, name) if sources else None
        return cls(backend, special=special, config=config, template=template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised.

        tokenizer.json decides which special tokens are added; add_bos_token and add_eos_token of
        tokenizer_config.json do not count beside it, as in transformers 5.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Unknown ids give no text."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str | None) -> int | None:
        """Id of a token written as in the vocabulary; None when there is none."""
        found: int | None = None if token is None else self.backend.token_to_id(token)
        return found

    @property
    def eos_token(self) -> str | None:
        return self.special.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.eos_token)

    @property
    def bos_token(self) -> str | None:
        return self.special.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.bos_token)

    @cached_property
    def max_token_bytes(self) -> int:
        """Length of the longest token: text longer than context * this cannot fit, whatever its tokens are."""
        added = max((len(text.encode()) for text in self.added), default=1)
        tokens = self.backend.get_vocab(with_added_tokens=False)
        # A byte-level vocabulary writes each byte as one character.
        plain = max(map(len, tokens if self.byte_level else map(str.encode, tokens)), default=1)
        return max(added, plain)

    def token_str(self, token: int) -> str:
        """The token as the vocabulary writes it; empty for an unknown id."""
        return self.backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token adds to a text; empty for an unknown id."""
        text = self.token_str(token)
        if self.byte_level:
            return byte_level_map(text)
        return bytes.fromhex(text[3:5]) if token in self.byte_ids else text.replace("\u2581", " ").encode()

    def _shown_bytes(self, skip: bool, token: int) -> bytes:
        return b"" if skip and token in self.special_ids else self.token_bytes(token)

    def _whole_text(self, skip: bool, token: int) -> str | None:
        try:
            return self.bytes_of[skip][token].decode()
        except UnicodeDecodeError:
            return None

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt of a conversation; options as in ChatTemplate.render. Encode it without special tokens."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template, so it cannot answer messages; "
                "start with --chat-template FILE, or send a prompt",
                "messages",
                "no_chat_template",
            )
        return self.template.render(messages, **options)

    @property
    def response_template(self) -> Any:
        """The checkpoint's description of its replies, as transformers defines it; None without one."""
        return self._config.get("response_template")

    def info(self) -> dict[str, Any]:
        """Return the answer of /tokenizer_info: the tokenizer's settings, special tokens and chat template."""
        kept = {k: v for k, v in self._config.items() if isinstance(v, (str, int, float, bool)) or v is None}
        template = self.template.default if self.template else None
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **kept,
            **{name: self.special.get(name) for name in SPECIAL_NAMES},
            "vocab_size": self.vocab_size,
            "chat_template": template,
        }


def template_text(given: str) -> str:
    """The text of a --chat-template: the flag's own when it looks like a template, else the file it names."""
    if "{%" in given or "{{" in given or "\n" in given:
        return given
    text = read_text(Path(given))
    if text is None:
        raise CheckpointError(f"chat template file {given} does not exist; name a file or give the template itself")
    return text


def _mark_special(backend: Backend, tokens: Iterable[str]) -> None:
    known = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    new = [AddedToken(t, special=True) for t in tokens if t not in known and backend.token_to_id(t) is not None]
    if new:
        backend.add_special_tokens(new)
