"""The prompts that a workload stands for: token ids if the API takes them, else words of a known number of tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median_high

from gapless.base.errors import ConfigError
from gapless.lab import probe
from gapless.lab.datasets import Lengths, Prompt, Source, Workload, random_prompts
from gapless.lab.http import Client
from gapless.lab.target import PromptContent

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face others level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force "
    "education foot boy age policy music market sense nation plan college interest death course experience effect use "
    "class control field development role effort rate heart drug show leader light voice wife police mind price report "
    "decision son view relationship town road difference value building action season society tax director position "
    "player record paper space ground form event official matter center couple site project activity star table need "
    "court oil situation cost industry figure street image phone data picture practice piece land product doctor wall "
    "news test movie north love step film tree source hair look page term bar focus floor future arm evidence"
)
MADE_UP_WORDS = tuple(_TEXT.split())

SAFE_IDS = range(100, 1000)
"""Ids that any tokenizer of a language model has."""
ENOUGH_WORDS = 32
TokenCounter = Callable[[str], Awaitable[int | None]]
"""Tokens of a text, or None if unknown."""

WARM_UP_SEED = 1 << 40
"""Warm-up prompts share nothing with measured ones, or the prefix cache would have them."""


async def id_source(client: Client, tokenizer: str | None) -> Source:
    """Token ids of a tokenizer's directory, or of the server's list."""
    if tokenizer is not None:
        return Source(_vocabulary(_tokenizer_file(tokenizer)))
    ids = await probe.server_vocabulary(client)
    if ids is not None:
        return Source(ids)
    note = f"the server does not tell its vocabulary: prompts use ids {SAFE_IDS.start} to {SAFE_IDS.stop - 1}"
    return Source(SAFE_IDS, note=f"{note} (--tokenizer widens that)")


def _tokenizer_file(name: str) -> Path:
    path = Path(name)
    return path / "tokenizer.json" if path.is_dir() else path


def _vocabulary(file: Path) -> list[int]:
    """Ids of a tokenizer.json, special ones left out. Raises ConfigError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        vocab = value["model"]["vocab"]
        ids = set(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
        special = {token["id"] for token in value.get("added_tokens") or () if token.get("special")}
        found = sorted(number for number in ids - special if isinstance(number, int))
    except OSError as error:
        raise ConfigError(f"tokenizer: cannot read {file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"tokenizer: {file} is not a tokenizer.json: {error!r}") from error
    if len(found) < 2:
        raise ConfigError(f"tokenizer: {file} holds no vocabulary")
    return found


def local_codec(tokenizer: str) -> probe.Codec:
    """The codec of a tokenizer.json on this machine. Raises ConfigError."""
    file = _tokenizer_file(tokenizer)
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError("tokenizer: texts are counted with the tokenizers package: pip install tokenizers") from error
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"tokenizer: {file} cannot be read: {error}") from error

    async def encode(client: Client, text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    async def decode(client: Client, tokens: Sequence[int]) -> str:
        return str(backend.decode(list(tokens), skip_special_tokens=False))

    return probe.Codec(encode, decode)


async def word_source(client: Client, tokenizer: str | None) -> Source:
    """Words that are one token each, if tokens can be counted; else words and how many tokens they are on average."""
    codec = local_codec(tokenizer) if tokenizer else probe.Codec()
    words = await single_tokens(partial(codec.length, client), MADE_UP_WORDS)
    if len(words) >= ENOUGH_WORDS:
        return Source(words)
    scale = await _tokens_per_word(partial(codec.length, client))
    if scale is not None:
        return Source(MADE_UP_WORDS, scale, codec=codec)
    scale = await _tokens_per_word(partial(_count_by_usage, client))
    if scale is None:
        return Source(MADE_UP_WORDS, note="tokens cannot be counted here: a word is taken for one")
    return Source(MADE_UP_WORDS, scale, f"prompts are words of {scale:.2f} tokens on average: lengths are not exact")


async def _cut(codec: probe.Codec, client: Client, prompt: Prompt) -> PromptContent:
    assert isinstance(prompt.content, str)
    rng, want = random.Random(f"cut {prompt.place}"), prompt.input_len
    longer = " ".join([prompt.content, *rng.choices(MADE_UP_WORDS, k=8 + want // 8)])
    tokens = await codec.encode(client, longer)
    # The end of a text that was cut may be read as other tokens than before, so the neighbours are tried too.
    for end in (want, want + 1, want - 1, want + 2, want - 2) if tokens else ():
        text = await codec.decode(client, (tokens or [])[:end])
        if text is not None and await codec.length(client, text) == want:
            return text
    return prompt.content


async def single_tokens(count: TokenCounter, words: Sequence[str]) -> list[str]:
    """Return the words that are one token each, both at the beginning of a text and after another word."""
    if not words:
        return []
    texts = [" ".join(words), " ".join(reversed(words))]
    counts = [await count(text) for text in texts]
    if None in counts:
        return []
    if counts == [len(words)] * 2:
        return list(words)
    if len(words) == 1:
        return []
    half = len(words) // 2
    return [*await single_tokens(count, words[:half]), *await single_tokens(count, words[half:])]


async def _tokens_per_word(count: TokenCounter) -> float | None:
    """Tokens per word, from the difference of two texts, so that what a chat template adds cancels out."""
    rng = random.Random(0)
    short, long = rng.choices(MADE_UP_WORDS, k=40), rng.choices(MADE_UP_WORDS, k=240)
    few, many = await count(" ".join(short)), await count(" ".join(long))
    return (many - few) / (len(long) - len(short)) if few and many and many > few else None


async def _count_by_usage(client: Client, text: str) -> int | None:
    _, reply = await probe.one_reply(client, text, 1)
    return reply.prompt_tokens or None


async def find_source(work: Workload, client: Client, tokenizer: str | None) -> Source:
    """Return where made-up prompts come from: token ids, or words where the API or the data set needs text."""
    wants_text = work.dataset == "multi_turn" or client.target.chat
    return await (word_source if wants_text else id_source)(client, tokenizer)


async def cut(work: Workload, found: Source, prompts: list[Prompt], client: Client) -> list[Prompt]:
    """Cut made-up texts to their lengths, if tokens can be counted; one that cannot be cut stays as it is."""
    if found.codec is None or work.dataset in ("custom", "sharegpt"):
        return prompts
    return [p._replace(content=await _cut(found.codec, client, p)) if p.input_len else p for p in prompts]


def warm_up_prompts(prompts: list[Prompt], source: Source, count: int) -> list[Prompt]:
    """Warm-up prompts: as long as the measured ones, with other tokens."""
    length = median_high([p.input_len for p in prompts if p.input_len] or [64])
    output = median_high(p.output_len for p in prompts)
    return random_prompts(source, count, Lengths(length), Lengths(output), seed=WARM_UP_SEED)
