"""Files and folders that are either whole or not there.

Temporary files and folders are named `.mirrorhead-tmp-xxxxxxxx-<final name>`. Only names of this
form are ever removed as leftovers, so that no file of a user can be taken for one of ours. Where
this name would be too long for a file system, the end of the final name is cut off.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_PREFIX = ".mirrorhead-tmp-"
_TEMPORARY = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}-(.+)")  # as `tempfile` makes them
_MOST_BYTES = 255 - len(f"{_PREFIX}xxxxxxxx-")  # of the final name in a temporary one


def write_atomically(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write data to path such that no reader, and no crash, ever sees a part of it.

    An existing file keeps its mode, and a symbolic link stays: its target is written. With
    replace=False, an existing file is left as it is and FileExistsError raised.
    """
    with new_file(path, replace=replace) as file:
        file.write(data)


@contextmanager
def new_file(path: Path, *, replace: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to fill; it gets its name when the block succeeds, and is removed otherwise.

    For content that is too large to be in memory at once; FileExistsError if the name is taken.
    """
    with _error_names(path):
        if replace:
            path = Path(os.path.realpath(path))  # a rename would replace a symbolic link
        _make_folder(path.parent)
        handle, name = tempfile.mkstemp(_suffix(path), _PREFIX, path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, _mode(path))  # mkstemp's files are for their owner alone
            if replace:
                os.replace(name, path)
            else:
                os.link(name, path)  # a rename would replace an existing file
            sync(path.parent)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def write_json(path: Path, content: Any) -> None:
    """Write JSON in the same way; NaN and infinity are refused."""
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


@contextmanager
def new_folder(path: Path, *, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; it gets its name when the block succeeds, and is removed otherwise.

    If another process has taken the name meanwhile, theirs stays, ours is removed, and
    FileExistsError raised. With `shared`, for folders whose content is the same whoever makes
    them, their folder is as good as ours and no error. With `durable`, the files are on the disk
    before the folder has its name, so that a power cut cannot leave empty files under it.
    """
    with _error_names(path):
        _make_folder(path.parent)
        temporary = Path(tempfile.mkdtemp(_suffix(path), _PREFIX, path.parent))
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())  # mkdtemp's folder is for its owner alone
            for inner in (*temporary.rglob("*"), temporary) if durable else ():
                sync(inner)
            _take_name(temporary, path, shared)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder so that no reader ever sees a part of it under its name."""
    hidden = Path(tempfile.mkdtemp(_suffix(path), _PREFIX, path.parent))
    path.rename(hidden / path.name)
    shutil.rmtree(hidden, ignore_errors=True)


def is_temporary(name: str) -> bool:
    """Whether this module made a file or folder of this name, to be renamed or removed soon.

    >>> is_temporary(".mirrorhead-tmp-1a_b2c3d-result.json"), is_temporary(".git")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: Path, final_name: str) -> None:
    """Remove temporaries of a killed process in `folder` whose final name would match a pattern.
    Call it only on a folder that belongs to this process: a temporary file there may otherwise be
    one that another process is writing.
    """
    for path in folder.glob(f"{_PREFIX}*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or not re.fullmatch(final_name, match[1]):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_leftovers_of(path: Path) -> None:
    """Remove temporaries that a killed process left while it wrote the file at `path`."""
    path = Path(os.path.realpath(path))
    remove_leftovers(path.parent, re.escape(_suffix(path)[1:]))


def sha256_of(*parts: bytes | memoryview) -> str:
    """The SHA-256 of these parts, one after the other, in hexadecimal digits.

    >>> sha256_of(b"a", b"bc") == sha256_of(b"abc")
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut, where the system can."""
    # A new name is on the disk only when the folder is; Windows cannot open one.
    if os.name == "posix" or path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _take_name(temporary: Path, path: Path, shared: bool) -> None:
    """Rename our folder to `path`, where nothing may be, or with `shared` a folder."""
    try:
        # A rename replaces an empty folder and would replace one that a link names.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        temporary.rename(path)
    except OSError as error:
        if shared and path.is_dir():
            return
        if os.path.lexists(path):
            code = errno.EEXIST  # a rename onto it may say ENOTEMPTY or ENOTDIR
            raise FileExistsError(code, os.strerror(code), str(path)) from error
        raise


def _suffix(path: Path) -> str:
    """The end of a temporary name for `path`, cut to what file systems allow."""
    return "-" + os.fsencode(path.name)[:_MOST_BYTES].decode(errors="ignore")


def _mode(path: Path) -> int:
    """The mode of the file at `path`; of a new one, what the umask leaves."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o666 & ~_umask()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # it is a file
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


@contextmanager
def _error_names(path: Path) -> Iterator[None]:
    """Make a system error name `path`: "no space left" has no name, others a temporary one."""
    try:
        yield
    except OSError as error:
        parts = Path(error.filename).parts if isinstance(error.filename, str) else ()
        if error.errno is None or (error.filename and not any(map(is_temporary, parts))):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
