"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gapless.base.peers import PeerFiles

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


class Authority:
    """Signs certificates. Its files are in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.certificate = folder / "ca.pem"
        self._run("req -x509 -subj /CN=authority -days 2 -keyout ca.key -out ca.pem" + NEW_KEY)

    def files(self, name: str, host: str = "127.0.0.1", days: int = 2) -> PeerFiles:
        """Return a new certificate for this address, its key, and the authority's own certificate."""
        (self._folder / "names").write_text(f"subjectAltName=IP:{host}\n")
        self._run(f"req -subj /CN={name} -keyout {name}.key -out {name}.request" + NEW_KEY)
        signed = f"-CA ca.pem -CAkey ca.key -CAcreateserial -days {days} -extfile names"
        self._run(f"x509 -req -in {name}.request -out {name}.pem {signed}")
        return PeerFiles(*[str(self._folder / file) for file in (f"{name}.pem", f"{name}.key", "ca.pem")])

    def locked(self, name: str) -> PeerFiles:
        """Return the same with a key that has a password."""
        files = self.files(name)
        self._run(f"pkey -in {name}.key -aes256 -passout pass:secret -out {name}.locked")
        return files._replace(keyfile=str(self._folder / f"{name}.locked"))

    def _run(self, words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=self._folder, check=True, capture_output=True, timeout=60)


NEW_KEY = " -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
