"""A taker of pages in a process of its own: `python peer_process.py SOCKET` prints a line for each load."""

from __future__ import annotations

import sys
import time

from peer_rig import KEY
from tier_rig import content, has, loaded, setup_of

from gapless.base.peers import PeerAddress
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.link import PeerCaller, PeerLink
from gapless.offload.tiers.peer import PeerTier
from gapless.offload.tiers.shelf import Shelf

PAGES = 8
"""Pages that the giver has, of which a load takes four"""


class Slow(CopyThreads):
    """Waits before it copies, so that most of its time is between the giver's word and its own."""

    def each(self, copy, *arguments):
        time.sleep(0.01)
        return super().each(copy, *arguments)


def main(path: str) -> None:
    setup = setup_of("")
    link = PeerLink(
        PeerCaller(PeerAddress(path=path), KEY, setup.namespace), Slow(), setup.slot_bytes, back_off=0.05
    ).start()
    tier = PeerTier(Shelf(0, setup.slot_bytes), [link], Slow())
    for turn in range(10**6):
        numbers = [number % PAGES for number in range(turn, turn + 4)]
        if all(has(tier, *numbers)):
            end, pages = loaded(tier, setup, *numbers)
            right = [page == content(number) for page, number in zip(pages, numbers, strict=False)]
            print("right" if all(right) else "wrong", len(right), "failed" if end.failed else "", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
