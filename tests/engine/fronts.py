"""A front over a tiny tokenizer, and cores that say what a test wants."""

from vocabularies import byte_level

from gapless.base.records import Request
from gapless.engine.frontdoor import ModelAssets
from gapless.testing.core import FakeCore

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def front(**options) -> ModelAssets:
    from gapless.text.chat import ChatTemplate

    tokenizer = byte_level(template=ChatTemplate(CHATML))
    return ModelAssets(tokenizer, (tokenizer.eos_token_id,), **options)


FRONT = front()
TOKENIZER = FRONT.tokenizer
EOS = TOKENIZER.eos_token_id


def core(**options) -> FakeCore:
    """A core over that vocabulary."""
    return FakeCore(TOKENIZER.vocab_size, **options)


def says(text: str, **options) -> FakeCore:
    """A core that answers every request with this text, one byte a token, then end of sequence."""
    ids = [TOKENIZER.token_id(c) for c in _letters(text)]

    def script(request: Request, count: int) -> int:
        return ids[count] if count < len(ids) else EOS

    return core(script=script, **options)


def _letters(text: str) -> str:
    from gapless.text.tokens import BYTE_OF

    letter = {byte: char for char, byte in BYTE_OF.items()}
    return "".join(letter[byte] for byte in text.encode())
