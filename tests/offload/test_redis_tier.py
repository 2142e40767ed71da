"""The Redis tier: its commands, and servers whose answers break off, have no end, or repeat a password."""

from __future__ import annotations

import struct

import pytest
from fake_resp import FakeResp, free_port
from tier_rig import SLOT, content, key, loaded, setup_of, stored
from waiting import until

from gapless.base.errors import ConfigError
from gapless.offload.tiers.redis import KEY_PREFIX, RedisTier


@pytest.fixture
def fake():
    server = FakeResp()
    yield server
    server.stop()


@pytest.fixture
def redis(fake, opened):
    """(a tier over that server, its setup)"""
    setup = setup_of(fake.url)
    return opened(RedisTier(setup, seconds=0.5, back_off=0.0)), setup


def said_by(error):
    """The words of an error, and of all that led to it."""
    return "" if error is None else f"{error!r}{error}{said_by(error.__cause__)}{said_by(error.__context__)}"


MOODS = ["closed", "short", "silent", "error", "noise"]


@pytest.mark.parametrize("mood", MOODS)
def test_pages_that_came_before_a_failure_stay(fake, redis, mood):
    tier, setup = redis
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
    end, data = loaded(tier, setup, 2, 1)
    assert not end.failed and data == [content(2), content(1)], "an answer that was left over was taken for another"


@pytest.mark.parametrize("answer", [b"$999999999999\r\n", b"+" + b"x" * 1_000_000])
def test_an_answer_without_a_bound_is_not_read(fake, opened, monkeypatch, answer):
    setup = setup_of(fake.url)
    tier = opened(RedisTier(setup, seconds=1e6))
    stored(tier, setup, 0)
    monkeypatch.setattr(fake, "answer", lambda words: answer)
    assert loaded(tier, setup, 0)[0].failed


def test_commands_of_many_pages_go_out_together_and_pages_that_are_there_are_not_sent_again(fake, redis):
    tier, setup = redis
    stored(tier, setup, 0, 1)
    fake.calls.clear()
    end = stored(tier, setup, 0, 1, 2)
    assert fake.calls == [b"EXISTS"] * 3 + [b"SET"] and end.nbytes == SLOT and len(end.checksums) == 3


@pytest.mark.parametrize("user", ["", "me:s3cret@"])
def test_a_server_that_is_not_there_is_an_error_at_the_start_which_shows_no_password(user):
    with pytest.raises(ConfigError, match=r"no Redis answers at 127\.0\.0\.1:"):
        RedisTier(setup_of(f"redis://{user}127.0.0.1:{free_port()}/0"))


def test_a_server_that_still_loads_is_an_error_at_the_start_and_its_connection_is_closed(fake):
    answer = fake.answer
    fake.answer = lambda words: b"-LOADING the dataset\r\n" if words[0] == b"PING" else answer(words)
    with pytest.raises(ConfigError, match="LOADING"):
        RedisTier(setup_of(fake.url))
    until(lambda: fake.calls == [b"PING"] and fake.open == 0)


def test_name_password_and_database_are_sent_first(fake):
    setup = setup_of(fake.url.replace("//", "//ann:s%20t@").replace("/0", "/7"))
    said = []
    answer = fake.answer
    fake.answer = lambda words: (said.append(words), answer(words))[1]
    RedisTier(setup).close()
    assert said == [[b"AUTH", b"ann", b"s t"], [b"SELECT", b"7"], [b"PING"]]


def test_a_value_has_its_length_and_checksum_in_front(fake, redis):
    tier, setup = redis
    (sum_,) = stored(tier, setup, 0).checksums
    value = fake.values[KEY_PREFIX + key(0)]
    assert struct.unpack("<8sQq", value[:24]) == (b"gaplesK1", SLOT, sum_) and value[32:] == content(0)


NO_REDIS = "what answers does not speak its protocol"


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        *((some, NO_REDIS) for some in (b"SSH-2.0-OpenSSH_9", b"HTTP/1.1 400 secret\r\n", b":secret")),
        (b"-ERR unknown command, with args beginning with: 'secret'", "it answers ERR"),
    ],
)
def test_a_server_that_refuses_a_name_and_password_is_not_quoted(fake, monkeypatch, refusal, said):
    answer = fake.answer
    monkeypatch.setattr(fake, "answer", lambda words: refusal + b"\r\n" if words[0] == b"AUTH" else answer(words))
    with pytest.raises(ConfigError, match=rf"no Redis answers at 127\.0\.0\.1:\d+/0: {said}$") as error:
        RedisTier(setup_of(fake.url.replace("//", "//me:secret@"), 64))
    assert "secret" not in said_by(error.value)
