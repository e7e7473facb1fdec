"""Where a command may write: one rule for all of them, checked before the work.

A command writes into a folder that is new, empty, or its own, which is one with a file that only
this kind of command writes there. Any other folder is refused, and left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from mirrorhead._files import is_temporary
from mirrorhead_lab.runtime.errors import RunError, UserError

#: Folders that jobs and workers make where they are started.
OF_BACKENDS = ("jobs", "dask-scratch-space")


def check_folder(
    folder: Path, what: str, marks: Sequence[str], leftovers: Collection[str] = ()
) -> None:
    """Refuse a folder that has files and is not the command's own.

    Args:
        folder: where the command is going to write.
        what: such a folder holds, for the message.
        marks: patterns of files, one of which shows that the folder is the command's own.
        leftovers: names that do not count, beside those of temporary files: what a kill may leave.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        check_writable(folder)  # which says what is wrong
        raise
    except OSError as error:
        raise RunError(f"{folder} cannot hold {what}: {error.strerror}") from error
    known = {*leftovers, *OF_BACKENDS}
    foreign = sorted(name for name in names if name not in known and not is_temporary(name))
    if foreign and not any(any(folder.glob(mark)) for mark in marks):
        raise RunError(
            f"{folder} is not empty and holds no {what} (it has {foreign[0]!r}):"
            " choose a new or empty folder"
        )


def check_writable(folder: Path) -> None:
    """Refuse a folder in which no file can be made; one that does not exist can be made."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise UserError(f"{folder} cannot be written: {there} is not a folder")
    ids = os.access in os.supports_effective_ids
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=ids):
        raise UserError(f"{folder} cannot be written: no permission to write into {there}")


def check_no_file(folder: Path, name: str) -> None:
    """Refuse a file where a folder is read; a folder that does not exist holds nothing."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{name} {folder} is not a folder")


def check_new_file(path: Path, option: str) -> None:
    """Refuse a file whose folder does not exist, for its name is more likely mistyped than new."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: give the name of a file")
    if path.is_symlink() and not path.exists():
        raise UserError(f"{option} {path} is a link that leads nowhere")
    if not path.parent.is_dir():
        raise UserError(
            f"{option} {path}: there is no folder {path.parent}; make it, or correct the name"
        )
    check_writable(path.parent)
