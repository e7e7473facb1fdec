"""Where each data set is kept and comes from, verified downloads that resume, safe unpacking."""

from __future__ import annotations

import hashlib
import http.client
import os
import shlex
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

from filelock import FileLock
from platformdirs import user_cache_path

from mirrorhead._files import new_folder, sync
from mirrorhead_lab.runtime.errors import DataError
from mirrorhead_lab.runtime.folders import check_no_file, check_writable
from mirrorhead_lab.runtime.progress import ProgressBars

Folder: TypeAlias = "str | Path | None"  # of all data sets; None: see `data_root`
CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without an answer
#: No data set here is larger than this when unpacked.
MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class Remote:
    """A file at its home."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Source:
    """A data set: the folder it is published in, and either one archive or some files."""

    name: str
    folder: str
    remotes: tuple[Remote, ...]


#: What was published, by name; see `publish`.
SOURCES: dict[str, Source] = {}


def publish(name: str, folder: str, base: str, files: str) -> None:
    """Say where files are published, so that they can be downloaded, and checked, by name.

    Args:
        folder: which they are in, in the folder of all data sets.
        base: the address, without the name of a file.
        files: a line for each, with its name, size and SHA-256; or one .tar.gz of the folder.
    """
    rows = (line.split() for line in files.strip().splitlines())
    remotes = tuple(Remote(base + file, int(size), sha256) for file, size, sha256 in rows)
    SOURCES[name] = Source(name, folder, remotes)


def data_root(folder: str | Path | None = None) -> Path:
    """Return the folder of all data sets: the argument, $MIRRORHEAD_DATA, or the cache's data/."""
    if folder is None:
        folder = os.environ.get("MIRRORHEAD_DATA") or cache_root() / "data"
    return Path(folder).expanduser()


def cache_root() -> Path:
    """Return the folder of remakeable files: $MIRRORHEAD_CACHE or the user's cache folder."""
    named = os.environ.get("MIRRORHEAD_CACHE")
    return Path(named).expanduser() if named else user_cache_path("mirrorhead")


def published_sha256(name: str, file: str) -> str:
    """Return the checksum of a data set's file, for sets that are published as plain files."""
    return next(remote.sha256 for remote in SOURCES[name].remotes if remote.name == file)


def locate(name: str, folder: Folder = None, *, download: bool = False) -> Path:
    """Return the folder of one data set; with `download` it is downloaded if missing."""
    require(name, folder=folder, download=download)
    return data_root(folder) / SOURCES[name].folder


def require(*names: str, folder: Folder = None, download: bool = False) -> None:
    """Refuse to begin while data sets are missing, and name all of them; or download them."""
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"name must be one of {', '.join(sorted(SOURCES))}, got {name!r}")
    root = data_root(folder)
    check_no_file(root, "the folder of data sets")
    missing = [name for name in names if not (root / SOURCES[name].folder).is_dir()]
    if download:
        for name in missing:
            fetch_source(SOURCES[name], root)
    elif missing:
        raise DataError(_how_to_get(missing, root))


def _how_to_get(missing: list[str], root: Path) -> str:
    folders = [SOURCES[name].folder for name in missing]
    one = len(missing) == 1
    there = f"is no folder {folders[0]}" if one else f"are no folders {', '.join(folders)}"
    size = sum(remote.size for name in missing for remote in SOURCES[name].remotes) / 1e6
    command = ["mirrorhead", "download", *missing]
    command += ["--data", str(root)] if root.absolute() != data_root().absolute() else []
    them, they_are = ("it", "it is") if one else ("them", "they are")
    return (
        f"{', '.join(missing)}: there {there} in {root}. To download {them} ({size:,.1f} MB):"
        f" {shlex.join(command)} (train and tune do it with --download). If {they_are}"
        " elsewhere, give that folder by --data or MIRRORHEAD_DATA"
    )


def fetch_source(source: Source, root: Path, *, pause: float = 1.0) -> Path:
    """Download a source's files, check them, and put them into `root`, all or none.

    One process does it at a time. Another one waits, and finds the data set.
    """
    path, waiting = root / source.folder, root / f".mirrorhead-download-{source.name}"
    lock = waiting.with_suffix(".lock")
    check_writable(root)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, poll_interval=0.5):
        if not path.is_dir():
            files = [
                fetch(r.url, waiting / r.name, size=r.size, sha256=r.sha256, pause=pause)
                for r in source.remotes
            ]
            if files[0].name.endswith(".tar.gz"):
                extract(files[0], path)
            else:
                with new_folder(path, shared=True) as fresh:
                    for file in files:
                        shutil.copyfile(file, fresh / file.name)
            shutil.rmtree(waiting, ignore_errors=True)
        with suppress(OSError):  # Windows removes no open file
            lock.unlink()
    return path


def fetch(
    url: str, path: Path, *, size: int, sha256: str, attempts: int = 5, pause: float = 1.0
) -> Path:
    """Download `url` to `path`, and check its size and SHA-256 before it gets its name.

    The part received so far is kept in `path` + ".part": after a lost connection, a crash or a
    kill the next attempt asks the server for the rest (HTTP Range). `attempts` in a row that
    receive nothing are an error. Only one process may fetch to a path at a time.
    """
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return path
    with part.open("ab+") as file:
        with ProgressBars({path.name: size}, "bytes") as bars:
            _complete(url, file, size, attempts, pause, partial(bars.advance, path.name))
        digest = hashlib.sha256()
        file.seek(0)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        got = digest.hexdigest()
        if got != sha256:
            part.unlink()
            raise DataError(
                f"{url} has SHA-256 {got}, not {sha256}: the download is corrupted, or the"
                " published file has changed. Nothing was kept; try again"
            )
        os.fsync(file.fileno())
        os.replace(part, path)
    sync(path.parent)
    return path


def extract(archive: Path, folder: Path) -> Path:
    """Unpack the folder `folder.name` of a tar archive to `folder`, whole or not at all.

    Only plain files and folders below that name are taken. A link, a device, an absolute
    path or one with "..", and an archive that is cut short are errors.
    """
    with new_folder(folder, shared=True) as fresh:
        room = MOST_BYTES
        try:
            with tarfile.open(archive) as tar:
                for member in tar:
                    top, *inner = _parts(member)
                    if top != folder.name or not inner:  # metadata beside the folder, or itself
                        continue
                    target = fresh.joinpath(*inner)
                    if member.isdir():
                        target.mkdir(parents=True, exist_ok=True)
                        continue
                    room -= member.size
                    if room < 0:
                        raise DataError(f"{archive} unpacks to over {MOST_BYTES:,} bytes")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    source = tar.extractfile(member)
                    assert source is not None, "a plain file can be read"
                    with source, target.open("xb") as file:
                        shutil.copyfileobj(source, file)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from error
        if not any(fresh.iterdir()):
            raise DataError(f"{archive} has no folder {folder.name}")
    return folder


def _parts(member: tarfile.TarInfo) -> tuple[str, ...]:
    """The parts of a member's path, which must stay inside, of a plain file or a folder."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
        raise DataError(f"the archive has {member.name!r}, which leads out of its folder")
    if not (member.isreg() or member.isdir()):
        raise DataError(f"the archive has {member.name!r}, which is a link or a device")
    return path.parts or ("",)


def _complete(
    url: str, file: BinaryIO, size: int, attempts: int, pause: float, moved: Callable[[int], None]
) -> None:
    """Append to `file` until it has `size` bytes."""
    failures = 0
    have = file.seek(0, os.SEEK_END)
    if have > size:
        file.truncate(have := 0)
    moved(have)
    while have < size:
        before, problem = have, "the connection ended early"
        try:
            _request(url, file, have, size, moved)
        except urllib.error.HTTPError as error:
            problem = f"the server says {error.code} {error.reason}"
            if error.code in (401, 403, 404, 410):
                raise DataError(f"{url}: {problem}") from error
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
        have = file.seek(0, os.SEEK_END)
        if have > size:
            file.truncate(0)
            raise DataError(f"{url} has more than the {size:,} bytes that it should have")
        failures = 0 if have > before else failures + 1
        if failures >= attempts:
            raise DataError(
                f"{url}: {problem}, {attempts} times; {have:,} of {size:,} bytes are kept"
                " for the next try"
            )
        if have < size:
            time.sleep(pause * 2**failures)


def _request(url: str, file: BinaryIO, have: int, size: int, moved: Callable[[int], None]) -> None:
    """Ask once for what is missing, and append what comes."""
    request = urllib.request.Request(url, headers={"User-Agent": "mirrorhead"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        sent = answer.headers.get("Content-Range", "")
        resumed = answer.status == 206 and sent.startswith(f"bytes {have}-")
        if have and not resumed:  # a server that sends all of it again
            moved(-have)
            file.truncate(have := 0)
        while have <= size and (chunk := answer.read(CHUNK)):
            file.write(chunk)
            moved(len(chunk))
            have += len(chunk)
    file.flush()
