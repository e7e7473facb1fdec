"""Downloads that resume and are verified, and safe unpacking of archives."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mirrorhead._files import new_folder, sync_folder
from mirrorhead.lab.runtime.errors import DataError
from mirrorhead.lab.runtime.progress import ProgressBars

CHUNK = 1 << 18
#: No data set here is larger than this when unpacked.
MOST_BYTES = 4 << 30


def fetch(
    url: str,
    path: Path,
    *,
    size: int,
    sha256: str,
    attempts: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
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
            moved = partial(bars.advance, path.name)
            _complete(url, file, size, attempts, timeout, pause, moved)
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
    sync_folder(path.parent)
    return path


def extract(archive: Path, folder: Path) -> Path:
    """Unpack the folder `folder.name` of a tar archive to `folder`, whole or not at all.

    Only plain files and folders below that name are taken. A link, a device, an absolute
    path or one with "..", and an archive that is cut short are errors.
    """
    with new_folder(folder) as fresh:
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
    url: str,
    file: BinaryIO,
    size: int,
    attempts: int,
    timeout: float,
    pause: float,
    moved: Callable[[int], None],
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
            _request(url, file, have, size, timeout, moved)
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


def _request(
    url: str, file: BinaryIO, have: int, size: int, timeout: float, moved: Callable[[int], None]
) -> None:
    """Ask once for what is missing, and append what comes."""
    request = urllib.request.Request(url, headers={"User-Agent": "mirrorhead"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
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
