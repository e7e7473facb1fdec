"""Files and folders that are either whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def write_atomically(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write data to path such that no reader, and no crash, ever sees a part of it.

    With replace=False, an existing file is left as it is and FileExistsError raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
        if replace:
            os.replace(name, path)
        else:
            os.link(name, path)  # a rename would replace without a word
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to fill that gets its name when the block ends well, and is gone otherwise.

    For content that is too large to be in memory at once; FileExistsError if the name is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
        os.link(name, path)  # a rename would replace an existing file without a word
        sync_folder(path.parent)
    finally:
        os.unlink(name)


def write_json(path: Path, content: Any) -> None:
    """The same for JSON; NaN and infinity are refused."""
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


@contextmanager
def new_folder(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A folder to fill, that gets its name when the block ends well, and is gone otherwise.

    If another process made a folder of that name meanwhile, theirs stays and ours goes. With
    `durable`, its files are on the disk before it has its name: no power cut leaves it hollow.

    >>> with tempfile.TemporaryDirectory() as here:
    ...     with new_folder(Path(here) / "results") as folder:
    ...         _ = (folder / "a.txt").write_text("whole")
    ...     (Path(here) / "results" / "a.txt").read_text()
    'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner alone
        if durable:
            _sync_files(temporary)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock on a file, which is made; BlockingIOError if somebody has it. It dies with us.

    Other machines that share the file system see it if that has locks: NFS does.
    """
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # on NFS it may be either
                raise BlockingIOError(f"{path} is locked by another process") from None
            except OSError as error:
                why = f"the file system cannot lock files ({error.strerror})"
                raise OSError(error.errno, why, str(path)) from error
        yield


def remove_folder(path: Path) -> None:
    """Remove a folder so that nobody meets a part of it under its name."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    path.rename(hidden / path.name)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left in `folder`: hidden names, as made in this module."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut, where the system can."""
    # The new name is on the disk only when the folder is; Windows cannot open one.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)
