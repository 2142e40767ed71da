"""A commit of a model on the hub: its files in huggingface_hub's cache, and the files still to be fetched.

Files are fetched by name. The names are those that the engine reads: none holds code, none is a pickle.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import CheckpointError, GaplessError, ServerError
from gapless.base.files import INDEX, SINGLE, read_json, read_text
from gapless.base.progress import Count, in_bytes
from gapless.hub.faults import Asked, fault, no_room, readable_settings
from gapless.hub.progress import say, showing
from gapless.hub.pull import partial_of, pull

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_MORE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates, by name"""
MAIN = "main"
_COMMIT, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
UNLOGGED_SECONDS = 1.0
"""A start that waits longer for another logs it."""
QUIET_BYTES = 1_000_000
"""A fetch below this is over before a person could read about it."""


class Remote(NamedTuple):
    """A file at the hub. `sha256` is empty for small files, which git keeps itself."""

    size: int
    sha256: str


class Repo:
    """`folder` is the snapshot of `commit` in the cache. Made by `open_repo`."""

    def __init__(self, asked: Asked, commit: str, files: Mapping[str, Remote], away: GaplessError | None) -> None:
        self.asked = asked
        self.commit = commit
        self.folder = storage(asked) / "snapshots" / commit
        self._files = files
        """All files of the commit; none when the hub could not be asked."""
        self._away = away
        """Why it could not be asked."""

    def fetch(self, *required: str, more: Sequence[str] = ()) -> None:
        """Bring missing files into the cache; of `more` only the files of the commit.

        Raises:
            ConfigError, CheckpointError, ServerError: the commit lacks a required file, the cache has no room, the hub
                refuses or stays away, or a file arrives with other content than the hub says.
        """
        for name in required:
            if not self._has(name):
                raise self._lack(name)
        missing = self.missing((*required, *more))
        to_come = sum(map(self._to_come, missing.values()))
        with _told(self.asked), _announced(self.asked, to_come) as count:
            there, free = _room(Path(self.asked.cache))
            if to_come > free:  # now, and not after an hour
                raise no_room(self.asked, f"{in_bytes(to_come)} are needed and {there} has {in_bytes(free)} free")
            for name, file in missing.items():
                self._fetch(name, file, count)

    def fetch_tokenizer(self) -> None:
        """Bring all files of the tokenizer into the cache, as `fetch` does."""
        folder = [name for name in self._files if Path(name).parent == Path(TEMPLATES) and name.endswith(".jinja")]
        self.fetch(TOKENIZER, more=(*TOKENIZER_MORE, *folder))

    def missing(self, names: Sequence[str]) -> dict[str, Remote]:
        """Return the files of `names` that the commit has and the cache lacks, or has in another size."""
        asked = {name: self._files[name] for name in names if name in self._files}
        return {name: file for name, file in asked.items() if not _is_whole(self.folder / name, file)}

    def weights(self) -> tuple[str, ...]:
        """The files of the weights, as the loader chooses them; reads the index, if there is one.

        Raises CheckpointError when the commit has no safetensors.
        """
        if self._has(SINGLE):
            return (SINGLE,)
        if not self._has(INDEX):
            raise self._lack(SINGLE)
        self.fetch(INDEX)
        named = (read_json(self.folder / INDEX) or {}).get("weight_map")
        shards = {str(name) for name in named.values()} if isinstance(named, dict) else set()
        # The loader has the words for an index that names anything else.
        return (INDEX, *sorted(n for n in shards if Path(n).name == n and n.endswith(".safetensors")))

    def _has(self, name: str) -> bool:
        return name in self._files or (self.folder / name).exists()

    def _lack(self, name: str) -> GaplessError:
        if self._away is not None:
            return type(self._away)(f"{self._away}; the cached snapshot of commit {self.commit} lacks {name}")
        if name in (CONFIG_FILE, SINGLE) and not {SINGLE, INDEX} & self._files.keys():
            return CheckpointError(self._no_safetensors())
        return CheckpointError(
            f"{self.asked.what}: {self.asked.name} has no {name} at commit {self.commit}: choose a repository or a "
            "--revision that has it" + (", or name another with --tokenizer" if name == TOKENIZER else "")
        )

    def _no_safetensors(self) -> str:
        what, name = self.asked[:2]
        others = sorted(n for n in self._files if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".safetensors")))
        held = f"it holds {', '.join(others[:3])}, which are not read" if others else "it holds no weights at all"
        return (
            f"{what}: {name} has neither {SINGLE} nor {INDEX} at commit {self.commit}; {held}. Pickles are never "
            "fetched, since they can run code: choose a repository or a --revision with safetensors, or convert it "
            f"(save_pretrained writes {SINGLE}) and give the directory"
        )

    def _to_come(self, file: Remote) -> int:
        """Bytes that have to travel yet: an earlier start may have brought the beginning, another commit all of it."""
        blob = self._blob(file)
        if file.sha256 and _is_whole(blob, file):
            return 0
        partial = partial_of(blob)
        return max(0, file.size - (partial.stat().st_size if partial.exists() else 0))

    def _blob(self, file: Remote) -> Path:
        if file.sha256 and not _SHA256.fullmatch(file.sha256):  # it becomes a path
            raise ServerError(f"{self.asked.what}: the hub gives {self.asked.name} no SHA-256 but {file.sha256!r}")
        return storage(self.asked) / "blobs" / file.sha256

    def _fetch(self, name: str, file: Remote, count: Count) -> None:
        from huggingface_hub import hf_hub_download

        if file.sha256:
            self._fetch_large(name, file, count)
        asked, there = self.asked, self.folder / name
        broken = there.exists() and not _is_whole(there, file)
        if broken:
            say(logging.WARNING, f"{there} has another size than at the hub, and is fetched again")
            there.unlink()
        again = broken and not (file.sha256 and _is_whole(self._blob(file), file))
        hf_hub_download(
            asked.name, name, revision=self.commit, cache_dir=asked.cache, force_download=again,
            tqdm_class=_meter(count),
        )  # fmt: skip

    def _fetch_large(self, name: str, file: Remote, count: Count) -> None:
        """Put a file where huggingface_hub keeps it, so that it need only be linked; not one that comes by Xet."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import WeakFileLock

        url = hf_hub_url(self.asked.name, name, revision=self.commit)
        known = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, library_name="gapless")
        if known.xet_file_data and find_spec("hf_xet") and not constants.HF_HUB_DISABLE_XET:
            return  # it has connections and hashes of its own
        if known.etag != file.sha256:
            return  # a mirror that names its files in another way
        blob = self._blob(file)
        lock = Path(self.asked.cache, ".locks", storage(self.asked).name, f"{file.sha256}.lock")
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        what = f"{self.asked.name}: {name}"
        with ExitStack() as held:  # the lock is that of huggingface_hub: two starts must not write one file
            try:
                held.enter_context(WeakFileLock(lock, timeout=UNLOGGED_SECONDS))
            except TimeoutError:
                say(logging.INFO, f"{what}: another start fetches it; waiting for that")
                held.enter_context(WeakFileLock(lock))
            if not _is_whole(blob, file):
                pull(url, blob, file.size, file.sha256, count, what)


def open_repo(what: str, name: str, revision: str | None = None, cache: str | None = None) -> Repo:
    """Return the commit of `name` at `revision`, by one question to the hub. `what` is the flag that named it.

    When the hub does not answer, or refuses, the last commit in the cache is taken instead, with a warning.
    Raises ConfigError or ServerError when it has not.
    """
    with readable_settings():
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import RevisionNotFoundError

    asked = Asked(what, name, revision or MAIN, str(Path(cache or constants.HF_HUB_CACHE).expanduser().absolute()))
    try:
        with _told(asked):
            api = HfApi(library_name="gapless")
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            info = api.model_info(name, revision=asked.revision, files_metadata=True, timeout=timeout)
            now = info.sha or ""
            if not _COMMIT.fullmatch(now):
                raise ValueError(f"it names no commit but {info.sha!r}")
            files = {f.rfilename: Remote(f.size or 0, f.lfs.sha256 if f.lfs else "") for f in info.siblings or ()}
    except GaplessError as error:
        commit = _cached_commit(asked)
        if commit is None or isinstance(error.__cause__, RevisionNotFoundError):
            raise
        say(logging.WARNING, f"{error}. Using commit {commit}, which is in the cache", model=name, commit=commit)
        return Repo(asked, commit, {}, error)
    _remember(asked, now)
    say(logging.INFO, f"{name} is commit {now} of {constants.ENDPOINT}", model=name, commit=now)
    return Repo(asked, now, files, None)


def surroundings() -> str:
    """Return the hub and the cache that the environment names. Does not ask the hub."""
    with readable_settings():
        from huggingface_hub import constants, get_token

    how = "with a token" if get_token() else "no token"
    if constants.HF_HUB_OFFLINE:
        how = "not asked, since HF_HUB_OFFLINE is set"
    cache = Path(constants.HF_HUB_CACHE)
    return f"{constants.ENDPOINT} ({how}), cache {cache} ({in_bytes(_room(cache)[1])} free)"


def _room(cache: Path) -> tuple[Path, int]:
    """The innermost existing folder of `cache`, and the free bytes of its disk."""
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return there, shutil.disk_usage(there).free


def fetch_tokenizer(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a tokenizer on the hub, with nothing else fetched. Raises what open_repo and Repo.fetch raise."""
    repo = open_repo("tokenizer", name, revision, cache)
    repo.fetch_tokenizer()
    return repo.folder


def storage(asked: Asked) -> Path:
    """huggingface_hub's folder of a model: its blobs, and the snapshots and refs that point to them."""
    from huggingface_hub.file_download import repo_folder_name

    return Path(asked.cache) / repo_folder_name(repo_id=asked.name, repo_type="model")


def _cached_commit(asked: Asked) -> str | None:
    commit = (read_text(storage(asked) / "refs" / asked.revision) or asked.revision).strip()
    return commit if (storage(asked) / "snapshots" / commit).is_dir() else None


def _remember(asked: Asked, commit: str) -> None:
    """Note which commit the revision is, for a start without the hub."""
    ref = storage(asked) / "refs" / asked.revision
    if commit != asked.revision and read_text(ref) != commit:
        with contextlib.suppress(OSError):  # a cache that others fill may be mounted read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)


def _is_whole(path: Path, file: Remote) -> bool:
    """Whether the file is here in the hub's size: a machine that lost power may have kept less."""
    return path.exists() and file.size in (0, path.stat().st_size)


@contextmanager
def _told(asked: Asked) -> Iterator[None]:
    """Turn what huggingface_hub raises into an error of ours."""
    try:
        yield
    except GaplessError:
        raise
    except Exception as error:
        raise fault(error, asked) from error


@contextmanager
def _announced(asked: Asked, total: int) -> Iterator[Count]:
    """Progress of a fetch, in log records: the name, the share and, for a long one, the duration."""
    if total < QUIET_BYTES:
        yield lambda count: None
        return
    begin = time.monotonic()
    say(logging.INFO, f"{asked.name}: fetching {in_bytes(total)} to {asked.cache}")
    with showing(asked.name, total) as count:
        yield count
    seconds = time.monotonic() - begin
    say(logging.INFO, f"{asked.name}: fetched in {seconds:.0f} s ({in_bytes(total / max(seconds, 1e-3))}/s)")


def _meter(count: Count) -> type[Any]:
    """Stands in for huggingface_hub's class of progress bars, and counts the bytes."""

    class Meter:
        n: float = 0
        total: float | None = None

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count_of_bytes: float | None = 1) -> None:
            count(int(count_of_bytes or 0))

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

        def update_transfer(self, *_: object) -> None:
            """Bytes on the wire, compressed or not; `update` counts decoded bytes."""

    return Meter
