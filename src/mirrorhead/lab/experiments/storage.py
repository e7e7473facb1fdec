"""Results on disk, piece by piece, so that a run can stop anywhere and go on.

    out/figure-4/run.json                     what the folder holds: experiment, code, settings
    out/figure-4/00025-00049-<key>.json       a piece: settings, seconds, name and checksum of
    out/figure-4/00025-00049-<key>-<sum>.npz  its arrays

The key is a hash of the settings with their seeds, of the experiment's name, of the code that its
`run` depends on, in its file and in the library, and of the package's version. The json is written
last and says which npz belongs to it, so a piece is there as a whole or not at all, also when two
processes compute it at once.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mirrorhead._files import write_atomically
from mirrorhead._version import __version__
from mirrorhead.lab.experiments.base import Experiment, Result, TrialSettings, merge, pieces, plain
from mirrorhead.lab.experiments.base import restore as restore_settings
from mirrorhead.lab.experiments.source import library_hash

FORMAT = 1


class FolderError(ValueError):
    """The folder holds results of something else."""


class PieceError(ValueError):
    """A stored piece is damaged."""


def claim(out: Path, experiment: Experiment, settings: TrialSettings) -> None:
    """Reserve out/<name> for these settings, or say what the folder holds instead.

    Only the number of trials may differ: more of them add to what is there, fewer use a part.
    """
    path = out / experiment.name / "run.json"
    wanted = _identity(experiment, settings)
    try:
        write_atomically(path, _encode(wanted), replace=False)
        return
    except FileExistsError:
        found = _read_run(path)
    different = _differences(found, wanted)
    if different:
        raise FolderError(
            f"{path.parent} holds results of other settings: {'; '.join(different)}. "
            f"Choose another --out, or delete {path.parent}"
        )
    if found != wanted:
        write_atomically(path, _encode(wanted))


def save(out: Path, experiment: Experiment, result: Result[Any]) -> None:
    """Store a piece. An equal one that is there already is replaced."""
    experiment.check(result)
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {f"array.{key}": array for key, array in result.arrays.items()}
    np.savez(buffer, **arrays)
    data = buffer.getvalue()
    checksum = hashlib.sha256(data).hexdigest()
    path = _piece_path(out, experiment, result.settings)
    npz = path.with_name(f"{path.stem}-{checksum[:12]}.npz")
    write_atomically(npz, data)
    description = {
        **_identity(experiment, result.settings),
        "seconds": result.seconds,
        "arrays": npz.name,
        "sha256": checksum,
    }
    write_atomically(path, _encode(description))


def load(out: Path, experiment: Experiment, settings: TrialSettings) -> Result[Any] | None:
    """The stored piece, None where there is none, PieceError where it is damaged."""
    path = _piece_path(out, experiment, settings)
    try:
        description = json.loads(path.read_bytes())
        identity = _identity(experiment, settings)
        if {key: description[key] for key in identity} != identity:
            raise PieceError(f"{path} is of other settings than its name says")
        data = (path.parent / Path(description["arrays"]).name).read_bytes()
        if hashlib.sha256(data).hexdigest() != description["sha256"]:
            raise PieceError(f"the arrays of {path} do not have their checksum")
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = {key.removeprefix("array."): stored[key] for key in stored.files}
        result = Result(experiment.name, settings, arrays, float(description["seconds"]))
        experiment.check(result)
        return result
    except FileNotFoundError as error:
        if path.exists():
            raise PieceError(f"the arrays of {path} are missing") from error
        return None
    except PieceError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise PieceError(f"{path} is damaged: {error}") from error


def stored(out: Path, experiment: Experiment) -> Result[Any] | None:
    """The whole result that the folder holds, None where there is none that is complete and of
    this code."""
    path = out / experiment.name / "run.json"
    if not path.exists():
        return None
    try:
        found = _read_run(path)
        settings = restore_settings(type(experiment.quick), found["settings"])
        if found != _identity(experiment, settings):
            return None
        parts = [load(out, experiment, piece) for piece in pieces(settings, experiment.piece)]
    except (FolderError, PieceError, TypeError, ValueError):
        return None
    whole = [part for part in parts if part is not None]
    return merge(whole) if len(whole) == len(parts) else None


def _identity(experiment: Experiment, settings: TrialSettings) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "experiment": experiment.name,
        "version": __version__,
        "code": experiment.code,
        "library": library_hash(),
        "settings": plain(settings),
    }


def _piece_path(out: Path, experiment: Experiment, settings: TrialSettings) -> Path:
    text = json.dumps(_identity(experiment, settings), sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    last = settings.first + settings.trials - 1
    return out / experiment.name / f"{settings.first:05d}-{last:05d}-{key}.json"


def _read_run(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found["settings"], dict):
            raise TypeError("settings are no table")
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{path} cannot be read ({error}). Choose another --out, or delete {path.parent}"
        ) from error


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    words = {"format": "the format", "version": "the version of mirrorhead"}
    words |= {"experiment": "the experiment", "code": "the experiment's code"}
    words |= {"library": "the library's code"}
    pairs = [(word, found.get(key), wanted[key]) for key, word in words.items()]
    there, here = found["settings"], wanted["settings"]
    names = [name for name in {**there, **here} if name not in ("trials", "first")]
    pairs += [(name, there.get(name), here.get(name)) for name in names]
    return [f"{word} {old} there, {new} here" for word, old, new in pairs if old != new]


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
