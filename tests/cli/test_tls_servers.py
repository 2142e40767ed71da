"""Servers with TLS, asked by every command: a certificate is checked, by the authority that SSL_CERT_FILE names."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority, needs_openssl
from lab.scripted import Model, serving

from gapless.cli.main import main
from gapless.lab import environment

pytestmark = needs_openssl
LOAD = ["--num-prompts", "2", "--input-len", "8", "--output-len", "2"]
COMMANDS = {
    "chat": ["chat", "-q", "x", "-n", "2", "--url"],
    "complete": ["complete", "-q", "x", "-n", "2", "--url"],
    "bench": ["bench", "serve", *LOAD, "--client-priority", "none", "--base-url"],
    "eval": ["eval", "--num-questions", "2", "--max-tokens", "4", "--base-url"],
    "top": ["top", "--once", "--interval", "0.1"],
    "trace": ["trace", "record", "--seconds", "1", "-o", "/dev/null"],
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def url(authority: Authority) -> Iterator[str]:
    files = authority.files("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certfile, files.keyfile)
    model = Model(ttft=0.001, itl=0.001)
    model.routes["/metrics"] = (200, (Path(__file__).parents[1] / "server/metrics_page.txt").read_bytes())
    with serving(model, context) as url:
        yield url


@pytest.mark.parametrize("command", COMMANDS)
def test_a_certificate_that_nobody_vouches_for_is_refused(url, command, capsys):
    assert main([*COMMANDS[command], url]) == 1
    err = capsys.readouterr().err
    assert (
        "its certificate is not trusted (" in err and "set SSL_CERT_FILE to the file of its authority, or give" in err
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_with_tls_answers_every_command(url, authority, command, capsys, monkeypatch):
    found = [main([*COMMANDS[command], url, "--insecure"])]
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    found.append(main([*COMMANDS[command], url]))
    err = capsys.readouterr().err
    if command == "trace":  # it is no gapless
        assert found == [1, 1] and err.count("/debug/trace?seconds=1&ahead=1 answered 404") == 2
    else:
        assert found == [0, 0], err


def test_running_servers_with_tls_are_compared(url, authority, capsys, monkeypatch):
    monkeypatch.setattr(environment, "BUSY_LOOK_SECONDS", 0.01)
    asked = ["ab", "--a-url", url, "--b-url", url, "--runs", "2", "--warmup-runs", "0", "--quiet", "1", "--pause", "0"]
    assert main([*asked, *LOAD]) == 1
    assert "its certificate is not trusted" in capsys.readouterr().err
    assert main([*asked, *LOAD, "--insecure"]) == 0
