"""The Redis tier on a server that closes, stops short, is slow, has no room, or talks nonsense."""

from __future__ import annotations

import struct
import time

import pytest
from fake_resp import FakeResp, free_port
from tier_rig import SLOT, content, has, key, loaded, setup_of, stored

from gapless.base.errors import ConfigError
from gapless.tiers.redis import KEY_PREFIX, RedisTier
from gapless.tiers.seam import Namespace

BACK_OFF = 0.3


@pytest.fixture
def fake():
    server = FakeResp()
    yield server
    server.stop()


def opened(fake, namespace=None):
    setup = setup_of(fake.url, 64, *([namespace] if namespace else []))
    return RedisTier(setup, seconds=0.5, back_off=BACK_OFF), setup


def said_by(error):
    """The words of an error, and of all that led to it."""
    return "" if error is None else f"{error!r}{error}{said_by(error.__cause__)}{said_by(error.__context__)}"


MOODS = ["closed", "short", "slow", "error", "noise"]


@pytest.mark.parametrize("mood", MOODS)
def test_a_server_that_fails_has_nothing_and_is_asked_again_later(fake, mood):
    tier, setup = opened(fake)
    stored(tier, setup, 0, 1)
    fake.mood = mood
    begin = time.monotonic()
    assert has(tier, 0, 1) == [False, False]
    end, _ = loaded(tier, setup, 0, 1)
    assert end.failed and end.checksums == ()
    end = stored(tier, setup, 2)
    assert end.failed and end.checksums == ()
    tier.touch([key(0)])
    tier.drop([key(0)])
    assert time.monotonic() - begin < 4
    fake.mood = "sound"
    time.sleep(BACK_OFF + 0.05)
    assert has(tier, 1) == [True]
    assert loaded(tier, setup, 1)[1] == [content(1)]
    tier.close()


def test_a_server_that_comes_back_is_found_by_a_tier_that_is_asked_all_the_time(fake):
    tier, setup = opened(fake)
    fake.mood = "closed"
    assert stored(tier, setup, 0).failed
    fake.mood, end = "sound", time.monotonic() + 20 * BACK_OFF
    while stored(tier, setup, 0).failed and loaded(tier, setup, 0)[1] == []:
        assert time.monotonic() < end, "each question was meant to leave the time of the next try as it was"
        time.sleep(BACK_OFF / 10)
    tier.close()


@pytest.mark.parametrize("mood", MOODS)
def test_pages_that_came_before_a_failure_stay(fake, mood):
    tier, setup = opened(fake)
    stored(tier, setup, 0, 1, 2)
    answer = fake.answer

    def turns(words):
        if words[0] == b"GET" and words[1] == KEY_PREFIX + key(2):
            fake.mood = mood
        return answer(words)

    fake.answer = turns
    end, data = loaded(tier, setup, 0, 1, 2)
    assert end.failed and data == [content(0), content(1)]
    fake.mood, fake.answer = "sound", answer
    time.sleep(BACK_OFF + 0.05)
    end, data = loaded(tier, setup, 2, 1)
    assert not end.failed and data == [content(2), content(1)], "an answer that was left over was taken for another"
    tier.close()


def test_values_that_are_not_ours_are_not_there(fake):
    tier, setup = opened(fake)
    stored(tier, setup, 0, 1, 2, 3, 4)
    values = fake.values
    values[KEY_PREFIX + key(0)] = b"short"
    values[KEY_PREFIX + key(1)] = bytes(len(values[KEY_PREFIX + key(1)]))
    values[KEY_PREFIX + key(2)] = values[KEY_PREFIX + key(3)]
    values[KEY_PREFIX + key(4)] += b"more"
    for number in (0, 1, 2, 4):
        end, _ = loaded(tier, setup, number)
        assert end.failed and end.checksums == (), number
    assert loaded(tier, setup, 3)[1] == [content(3)]
    tier.close()


@pytest.mark.parametrize("answer", [b"$999999999999\r\n", b"+" + b"x" * 1_000_000])
def test_an_answer_without_a_bound_is_not_read(fake, monkeypatch, answer):
    tier, setup = opened(fake)
    stored(tier, setup, 0)
    monkeypatch.setattr(fake, "answer", lambda words: answer)
    begin = time.monotonic()
    end, _ = loaded(tier, setup, 0)
    assert end.failed and time.monotonic() - begin < 0.4, "its end is waited for"
    tier.close()


def test_a_flipped_byte_keeps_the_checksum_of_what_was_stored(fake):
    tier, setup = opened(fake)
    sums = stored(tier, setup, 0).checksums
    value = fake.values[KEY_PREFIX + key(0)]
    fake.values[KEY_PREFIX + key(0)] = value[:-1] + b"!"
    end, data = loaded(tier, setup, 0)
    assert end.checksums == sums and data != [content(0)], "the device compares"
    tier.close()


def test_another_namespace_does_not_believe_a_value(fake):
    tier, setup = opened(fake)
    stored(tier, setup, 0)
    other, setup = opened(fake, Namespace.of({"model": "another"}))
    end, _ = loaded(other, setup, 0)
    assert end.failed
    tier.close()
    other.close()


def test_commands_of_many_pages_go_out_together_and_what_is_there_is_not_sent_again(fake):
    tier, setup = opened(fake)
    stored(tier, setup, 0, 1)
    fake.calls.clear()
    end = stored(tier, setup, 0, 1, 2)
    assert fake.calls == [b"EXISTS"] * 3 + [b"SET"] and end.nbytes == SLOT and len(end.checksums) == 3
    tier.close()


@pytest.mark.parametrize("user", ["", "me:s3cret@"])
def test_no_server_is_an_error_at_the_start_which_shows_no_password(user):
    with pytest.raises(ConfigError, match=r"no Redis answers at 127\.0\.0\.1:"):
        RedisTier(setup_of(f"redis://{user}127.0.0.1:{free_port()}/0"))


def test_a_server_that_still_loads_is_an_error_at_the_start_and_its_connection_is_closed(fake):
    answer = fake.answer
    fake.answer = lambda words: b"-LOADING the dataset\r\n" if words[0] == b"PING" else answer(words)
    with pytest.raises(ConfigError, match="LOADING"):
        opened(fake)
    end = time.monotonic() + 5
    while fake.open and time.monotonic() < end:
        time.sleep(0.01)
    assert fake.calls == [b"PING"] and fake.open == 0


def test_name_password_and_database_are_sent_first(fake):
    setup = setup_of(fake.url.replace("//", "//ann:s%20t@").replace("/0", "/7"))
    said = []
    answer = fake.answer
    fake.answer = lambda words: (said.append(words), answer(words))[1]
    RedisTier(setup).close()
    assert said == [[b"AUTH", b"ann", b"s t"], [b"SELECT", b"7"], [b"PING"]]


def test_a_value_has_its_length_and_checksum_in_front(fake):
    tier, setup = opened(fake)
    (sum_,) = stored(tier, setup, 0).checksums
    value = fake.values[KEY_PREFIX + key(0)]
    assert struct.unpack("<8sQq", value[:24]) == (b"gaplesK1", SLOT, sum_) and value[32:] == content(0)
    tier.close()


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 400 secret\r\n\r\n", b":secret\r\n"])
def test_what_is_no_redis_is_named_so_and_not_quoted(fake, monkeypatch, answer):
    monkeypatch.setattr(fake, "answer", lambda words: answer)
    with pytest.raises(ConfigError, match=r"at 127\.0\.0\.1:\d+/0: what answers does not speak its protocol$") as error:
        RedisTier(setup_of(fake.url.replace("//", "//me:secret@"), 64))
    assert "secret" not in said_by(error.value)


def test_a_server_that_repeats_what_it_refuses_is_not_quoted_with_the_password(fake, monkeypatch):
    answer = fake.answer
    repeats = b"-ERR unknown command, with args beginning with: 'secret'\r\n"
    monkeypatch.setattr(fake, "answer", lambda words: repeats if words[0] == b"AUTH" else answer(words))
    url = fake.url.replace("//", "//me:secret@")
    with pytest.raises(ConfigError, match=r"no Redis answers at 127\.0\.0\.1:\d+/0: it answers ERR$") as error:
        RedisTier(setup_of(url, 64))
    assert "secret" not in said_by(error.value)
