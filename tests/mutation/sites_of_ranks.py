"""Protections of engines of several ranks: orders, their ring, graphs, and the news of rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mutation.tools import Site, both, replaced
from simulation.scenario import RANKS
from torch import Tensor

from gapless.kernels.layout import LENGTH
from gapless.step import follower, program
from gapless.step.follower import FollowerProgram
from gapless.step.orders import OrderWriter
from gapless.testing.meetings import RankGroup
from gapless.testing.world import RankHost, World


def orders_change_places() -> AbstractContextManager[None]:
    """A rank that follows takes the second order first."""

    def obey(original: Callable[..., None], self: RankHost) -> None:
        if len(self.inbox) > 1:
            first, second = self.inbox.popleft(), self.inbox.popleft()
            self.inbox.extendleft((first, second))
        original(self)

    return replaced(RankHost, "obey", obey)


def orders_unchained() -> AbstractContextManager[None]:
    """An order has no sum of those before it, and they change places."""
    return both(replaced(zlib, "crc32", lambda original, *data: 0), orders_change_places())


def key_book_off_by_one() -> AbstractContextManager[None]:
    """The number of a key that was sent before is that of the key before it."""
    sent: list[Any] = []

    def write(original: Callable[..., bytes], self: OrderWriter, order: Any) -> bytes:
        key = getattr(order, "key", None)
        if key is not None and key in sent:
            order = order._replace(key=sent[sent.index(key) - 1])
        elif key is not None and key.load is None:
            sent.append(key)
        return original(self, order)

    return replaced(OrderWriter, "write", write)


def ring_without_room() -> AbstractContextManager[None]:
    """The leader sends whether there is room or not."""
    return replaced(World, "room", lambda original, self, orders: orders)


def graph_kept_on_one_rank() -> AbstractContextManager[None]:
    """The leader keeps a graph that it has, whatever the others have."""
    return replaced(World, "captured", lambda original, self, order: [True for _ in original(self, order)])


def capture_meets_others() -> AbstractContextManager[None]:
    """A capture runs the operations of its program with the other ranks."""
    return replaced(RankGroup, "muted", lambda original, self: nullcontext())


def one_line_is_skipped() -> AbstractContextManager[None]:
    """A rank that follows leaves out what the leader made of rows, once in a while."""
    count = [0]

    def tell(original: Callable[..., None], self: FollowerProgram, rows: Tensor) -> None:
        before = self.tables.state.clone(), self.tables.history.clone()
        original(self, rows)
        count[0] += 1
        if count[0] % 5 == 0:
            self.tables.state.copy_(before[0])
            self.tables.history.copy_(before[1])

    return replaced(FollowerProgram, "tell", tell)


def news_one_token_short() -> AbstractContextManager[None]:
    """The news of a row lack the first token of the most that a step adds."""

    def short(original: Callable[..., Tensor], length: Tensor, width: int, most: int) -> Tensor:
        return original(length, max(1, width - 1), most)

    return both(replaced(program, "newest", short), replaced(follower, "newest", short))


def news_without_drafts() -> AbstractContextManager[None]:
    """The news of a row end with its last token."""

    def short(original: Callable[..., Tensor], length: Tensor, width: int, most: int) -> Tensor:
        return original(length, width, most)[:, :width]

    return both(replaced(program, "newest", short), replaced(follower, "newest", short))


def follower_drafts_itself() -> AbstractContextManager[None]:
    """A rank that follows puts a draft of its own in the place of the leader's."""

    def tell(original: Callable[..., None], self: FollowerProgram, rows: Tensor) -> None:
        original(self, rows)
        if self.width > 1:
            length = self.tables.state[rows, LENGTH].long().clamp(max=self.tables.history.shape[1] - 1)
            self.tables.history[rows, length] = (self.tables.history[rows, length] + 1) % self.model.vocab_size

    return replaced(FollowerProgram, "tell", tell)


SITES = (
    Site("a rank obeys in the order of its leader", 21, orders_change_places, first=RANKS),
    Site("an order carries the sum of all before it", 21, orders_unchained, first=RANKS),
    Site("a key has one number on all ranks", 21, key_book_off_by_one, first=RANKS),
    Site("a full ring takes no order", 21, ring_without_room, first=RANKS),
    Site("a graph is kept if every rank has it", 21, graph_kept_on_one_rank, first=RANKS),
    Site("a capture meets no other rank", 21, capture_meets_others, first=RANKS),
    Site("a rank hears the news of every step", 21, one_line_is_skipped, first=RANKS),
    Site("news of a row have all tokens of a step", 21, news_one_token_short, first=RANKS),
    Site("news of a row have its drafts", 21, news_without_drafts, first=RANKS),
    Site("a rank that follows has no drafts of its own", 21, follower_drafts_itself, first=RANKS),
)
