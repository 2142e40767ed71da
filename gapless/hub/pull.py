"""Fetches one large file over HTTP, over several connections and starts if needed, and checks it before naming it.

huggingface_hub fetches a file in one go: a start that ends early leaves nothing of it, and a hash is not compared.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import BinaryIO

from gapless.base.errors import CheckpointError
from gapless.base.progress import Count, in_bytes
from gapless.hub.progress import say

WAITS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further connection; what arrives is a new beginning."""
BUSY = (408, 429, 500, 502, 503, 504)


def partial_of(blob: Path) -> Path:
    """The path of a file that is fetched in part, as huggingface_hub before 2 names it, which can finish it too."""
    return blob.with_name(f"{blob.name}.incomplete")


def pull(url: str, blob: Path, size: int, sha256: str, count: Count, what: str) -> None:
    """Fetch `url` to `blob`, from the byte at which an earlier start stopped. `what` is the file's name in messages.

    Raises:
        CheckpointError: the content differs from the hub's checksum; it is not kept.
        Exception: huggingface_hub's own, when the hub refuses or stays away.
    """
    partial = partial_of(blob)
    with partial.open("ab") as file:
        _fill(url, file, size, count, what)
    with partial.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != sha256:
        partial.unlink()
        raise CheckpointError(
            f"{what} arrived with other content than the hub says (SHA-256 {found}, not {sha256}) and was deleted: "
            "start again; if it stays so, the mirror in HF_ENDPOINT or a proxy changes it"
        )
    partial.replace(blob)


def _fill(url: str, file: BinaryIO, size: int, count: Count, what: str) -> None:
    most, waits = file.tell(), iter(WAITS)
    while file.tell() < size:
        lost = _connect(url, file, size, count)
        if file.tell() >= size:
            return
        if file.tell() > most:
            most, waits = file.tell(), iter(WAITS)
        wait = next(waits, None)
        if wait is None:
            raise lost or ConnectionError("the answer ends early")
        say(logging.WARNING, f"{what}: broken off at {in_bytes(file.tell())} ({_why(lost)}); going on in {wait:g} s")
        time.sleep(wait)


def _connect(url: str, file: BinaryIO, size: int, count: Count) -> Exception | None:
    """Append what one connection gives; returns why it ended when another one may do better."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    at = file.tell()
    headers = {**build_hf_headers(library_name="gapless"), "Range": f"bytes={at}-", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            if at and answer.status_code != 206:  # the whole file, whatever was asked for
                file.seek(0)
                file.truncate()
                count(-at)
            for chunk in answer.iter_bytes():  # a size of ours would lose the unfilled piece at a break
                file.write(chunk)
                count(len(chunk))
                if file.tell() > size:
                    break  # longer than it should be, perhaps without an end; its hash will be wrong
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY:
            raise
        return error
    return None


def _why(lost: Exception | None) -> str:
    if lost is None:
        return "the answer ended early"
    response = getattr(lost, "response", None)
    return f"{type(lost).__name__}: {lost}" if response is None else f"status {response.status_code}"
