"""Orders on the wire: what goes in comes out, in order, and nothing else does."""

import random

import pytest

from gapless.kernels.views import Filters
from gapless.model.seam import BatchShape
from gapless.step.graphs import bucket_key
from gapless.step.keys import ForwardKey, Load, LoadKey, SampleKey, StepKey
from gapless.step.lanes.cut import CutKey
from gapless.step.orders import BOOK, CaptureOrder, Order, OrderReader, OrderWriter, WireError, followed
from gapless.step.packet import PacketShape


def step(rng):
    """A step of any kind, as a leader orders it."""
    rows, chunks = rng.randrange(1, 60), rng.randrange(3)
    packet = PacketShape(rows + chunks, rng.randrange(9), chunks, chunks, 7 * chunks)
    batch = BatchShape(rows, tuple((rng.randrange(99), 7) for _ in range(chunks)), rng.randrange(200))
    load = None if rng.random() < 0.7 else LoadKey((Load(3, (("slot", 2, 5),), 40),), 45, rng.randrange(2))
    lists = rng.randrange(3)
    lanes = (CutKey(4, Filters(True, False)),) if lists else ()
    key = StepKey(ForwardKey(batch, packet, rows), SampleKey(rows, rows, bool(chunks)), lanes, (), lists, 0, load)
    before = 45 if load else 16 * lists
    return Order(key, None if rng.random() < 0.2 else rng.randbytes(4 * (before + packet.words)))


def test_a_reader_gets_every_order_as_followers_need_it():
    rng, writer, reader = random.Random(1), OrderWriter(), OrderReader()
    steps, found = [step(rng) for _ in range(40)], []
    for _ in range(500):
        order = rng.choice(steps)
        found.append(read := reader.read(writer.write(order)))
        assert read == followed(order)
        assert read.words is None or order.key.load or len(read.words) == 4 * order.key.forward.packet.words
    keys = {order.key for order in found if order.key.load is None}
    assert len({id(order.key) for order in found if order.key.load is None}) == len(keys), "one object for a key"


def test_a_known_key_costs_no_bytes_and_an_old_one_is_sent_again():
    writer, reader = OrderWriter(), OrderReader()
    orders = [Order(StepKey(bucket_key(1 + i, 0), SampleKey(1, 1, False)), None) for i in range(BOOK + 1)]
    first, again = writer.write(orders[0]), writer.write(orders[0])
    assert reader.read(first) == reader.read(again) == orders[0] and len(again) < 20 < len(first)
    for order in orders[1:]:
        assert reader.read(writer.write(order)) == order
    data = writer.write(orders[0])
    assert len(data) == len(first) and reader.read(data) == orders[0], "the book was full, and dropped it"


def test_captures_travel_without_what_the_leader_alone_runs():
    order = CaptureOrder((SampleKey(4, 4, False), bucket_key(4, 0)), (bucket_key(8, 0), CutKey(4, Filters(True, True))))
    read = OrderReader().read(OrderWriter().write(order))
    assert read == CaptureOrder((bucket_key(4, 0),), (bucket_key(8, 0),))


@pytest.mark.parametrize("fault", ["lost", "twice", "changed", "short"])
def test_another_stream_of_orders_is_refused(fault):
    rng, writer, reader = random.Random(2), OrderWriter(), OrderReader()
    data = [writer.write(step(rng)) for _ in range(9)]
    for one in data[:5]:
        reader.read(one)
    bad = {"lost": data[6], "twice": data[4], "short": data[5][:-1]}.get(fault)
    if bad is None:
        changed = bytearray(data[5])
        changed[-1] ^= 1
        bad = bytes(changed)
    with pytest.raises(WireError):
        reader.read(bad)
