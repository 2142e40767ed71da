"""The layout of the device tables, the packet and the outbox, for every kernel that reads or writes them."""

from __future__ import annotations

from gapless.base.params import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_IDS, PARAMS, columns
from gapless.base.processors import MAX_ARGUMENTS, MAX_PROCESSORS
from gapless.base.speculative import MAX_DRAFTS, SHORTEST_MATCH

# Columns of the table `state`, which the device advances. CUT_VALUE and CUT_ID belong to the row's last token; two
# columns for each draft follow.
GENERATION, ACTIVE, LENGTH, COMPUTED, LATE, DRAFTED, CUT_VALUE, CUT_ID = range(8)
STATE_COLUMNS = CUT_VALUE + 2 * (1 + MAX_DRAFTS)

KEEP_VALUE, KEEP_ID = -(2**23), 2**31 - 1
"""CUT_VALUE and CUT_ID that keep every token: the bits of -inf, and an id that none exceeds."""

# Columns of the table `params`, written once at admission: bounds, the slots of the row's adjusted logits and adapter,
# whether it gets masks, its most drafts, the tenant that shares its answers (0: none), stop ids, the registered
# sampling parameters. Reals are stored as the bits of a float32. Lines and stop ids begin at multiples of four words:
# `finish` would not fit into its registers otherwise.
MIN_LEN, MAX_LEN, ADJUST_SLOT, ADAPTER_SLOT, MASKED, DRAFTS, TENANT = range(7)
STOP_IDS = 8
FIRST_PARAM = STOP_IDS + MAX_STOP_IDS
PARAM_OF = columns(PARAMS, FIRST_PARAM)
TEMPERATURE, TOP_P, TOP_K, MIN_P = (PARAM_OF[name] for name in ("temperature", "top_p", "top_k", "min_p"))
SEED_LOW = PARAM_OF["seed"]
SEED_HIGH = SEED_LOW + 1
PARAM_COLUMNS = FIRST_PARAM + sum(entry.words.count for entry in PARAMS if entry.words)
PARAM_COLUMNS += -PARAM_COLUMNS % 4

SUFFIX_LENGTHS = (SHORTEST_MATCH, 4, 8)
"""Lengths of the ends of a history whose next token is recorded, each in a part of the table `suffixes`"""
# Words of an entry of that table: its tenant, the digest of the tokens before, the next token, the occurrences of these
# tokens since it took the entry, the occurrences followed by it, and the writing row of a step.
OWN_TENANT, DIGEST, NEXT, SEEN, SAME, CLAIM = range(6)
SUFFIX_WORDS = CLAIM + 1
SEEN_MOST = 64
"""The counts of an entry are halved when SEEN reaches this: old occurrences count less"""
DIGEST_BEGIN, DIGEST_MIX, DIGEST_SHIFT = 0x85EBCA6B, 0x9E3779B1, 15
"""A digest is 32 bits: the tenant's number times the first; then for each token, the last one first, (digest ^ token)
times the second, and that ^ itself shifted right."""

# Words of a slot's wishes: three counts, the start of the output, a bit for each logits processor, their arguments,
# then consecutive lists: biased ids, biases, allowed ids, for each bad word the end of its tokens, these tokens. Reals
# are the bits of a float32.
BIASES, ALLOWED, BAD_WORDS, OUTPUT, PROCESSORS, ARGUMENTS = range(6)
WISHES = ARGUMENTS + MAX_PROCESSORS * MAX_ARGUMENTS
MOST_BAD_WORDS = 2 * MAX_BAD_WORDS
"""Each with and without a leading space"""
WISH_WORDS = WISHES + 3 * MAX_BIASES + MOST_BAD_WORDS + MAX_BAD_TOKENS

IN_PROMPT = 1 << 30
"""Added to a token's count in the output if the prompt has it"""
BANNED = -1e30
"""Logit of a banned bad-word token: below every finite logit, but above -inf, so that some token stays."""

# Words of a row's mail. The host writes masks: the tag of the mask at each place, the draft before each mask after the
# first, and from MAIL_MASK on the masks, a bit for each token of the vocabulary. It also writes its expectation: the
# tag of the row's tokens, and the number and ids of the tokens after them. The device writes replies: their tag, the
# row's new tokens, the number of its next drafts, these drafts. A tag is one int64: the row's generation, and in the
# low half a number of its tokens.
MAIL_TAG = 0
MAIL_TOLD = MAIL_TAG + 2 * (1 + MAX_DRAFTS)
MAIL_TOKENS = MAIL_TOLD + 2
MAIL_DRAFTED = MAIL_TOKENS + 1 + MAX_DRAFTS
MAIL_DRAFTS = MAIL_DRAFTED + 1
MAIL_ALONG = MAIL_DRAFTS + MAX_DRAFTS
MAIL_AHEAD = MAIL_ALONG + MAX_DRAFTS
MAIL_EXPECTED = MAIL_AHEAD + 2
MAIL_RUN = MAIL_EXPECTED + 1
MOST_EXPECTED = 2 * MAX_DRAFTS + 1
"""Most tokens that the host may expect: a step's most tokens, and the drafts after them"""
MAIL_MASK = 80
assert MAIL_AHEAD % 2 == 0 and MAIL_RUN + MOST_EXPECTED <= MAIL_MASK


def mask_words(vocab: int) -> int:
    """Return the words of a mask."""
    return -(-vocab // 32)


# The packet begins with these, then row numbers.
PACKET_STEP, PACKET_SLOT = range(2)
HEADER_WORDS = 2
MAX_STEP_WORD = 0x7FFFFFFF
"""The last step number: 0 follows it."""
PAGE_WORDS = 2
"""Words of a page write: flat index into the page table, and the page."""

LINE_ROW, LINE_GENERATION, LINE_FLAG, LINE_TOKENS = range(4)
"""Words of an outbox line, then tokens, and NO_TOKEN up to its end. The header is a line too: step, lines, 0."""


def line_words(width: int) -> int:
    """Return the words of an outbox line for up to `width` tokens: whole 16 bytes, so that one token is one store."""
    return -(-(LINE_TOKENS + width) // 4) * 4


SCORE_ROW, SCORE_GENERATION, SCORE_POSITION, SCORE_LOGPROB, SCORE_RANK, SCORE_TOP = range(6)
"""Words of a score in the outbox, then ids of the most likely tokens, then their log-probabilities (float32 bits)."""


def score_words(width: int) -> int:
    """Return the words of a score with `width` most likely tokens."""
    return SCORE_TOP + 2 * width
