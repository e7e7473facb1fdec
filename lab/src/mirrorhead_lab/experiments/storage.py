"""Results on disk, chunk by chunk, so that a run can be stopped anywhere and resumed.

    out/figure-4/run.json               what the folder holds: experiment, code, settings
    out/figure-4/00025-00049-<key>.npz  a chunk: its arrays, and in "about" the same of the chunk

The key is a hash of the experiment's name, of its settings with their seeds, and of all code that
its `run` depends on (`runtime.fingerprints`). A file is there as a whole or not at all, also when
two processes compute a chunk at once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mirrorhead._files import write_atomically
from mirrorhead._version import __version__
from mirrorhead_lab.experiments.experiment import (
    Experiment,
    Result,
    TrialSettings,
    merge,
    settings_from_json,
    settings_to_json,
    split,
)
from mirrorhead_lab.runtime.errors import UserError
from mirrorhead_lab.runtime.fingerprints import code_of, digest

FORMAT = 3
#: Functions of an experiment's module that do not change what it computes.
PRESENTING = ("draw", "verdict")
RUN = "run.json"


class DamagedResult(ValueError):
    """A stored chunk is damaged; it must be computed again."""


def claim(out: Path, experiment: Experiment[Any], settings: TrialSettings) -> None:
    """Reserve out/<name> for these settings, or say what the folder holds instead.

    Only the number of trials may differ: more of them add to what is there, fewer use a part.
    """
    path = out / experiment.name / RUN
    wanted = _identity(experiment, settings)
    content = json.dumps({**wanted, "version": __version__}, indent=1).encode()
    try:
        write_atomically(path, content, replace=False)
        return
    except FileExistsError:
        found = _read_run(path)
    different = _differences(found, wanted)
    if different:
        raise UserError(
            f"{path.parent} holds results of other settings: {'; '.join(different)}. "
            f"Choose another --out, or delete {path.parent}"
        )
    if found["settings"] != wanted["settings"]:
        write_atomically(path, content)


def save(out: Path, experiment: Experiment[Any], result: Result[Any]) -> None:
    """Store the result of a chunk. An equal one that is there already is replaced."""
    experiment.check(result)
    about = json.dumps([_identity(experiment, result.settings), result.seconds])
    arrays: dict[str, Any] = {f"array.{key}": array for key, array in result.arrays.items()}
    buffer = io.BytesIO()
    np.savez(buffer, about=np.array(about), **arrays)
    write_atomically(_chunk_path(out, experiment, result.settings), buffer.getvalue())


def load(out: Path, experiment: Experiment[Any], settings: TrialSettings) -> Result[Any] | None:
    """Return the stored chunk, or None if there is none; raise DamagedResult if it is damaged."""
    path = _chunk_path(out, experiment, settings)
    try:
        content = io.BytesIO(path.read_bytes())
        with np.load(content, allow_pickle=False) as file:  # whose entries have checksums
            stored = dict(file)
        identity, seconds = json.loads(str(stored.pop("about")))
        if identity != _identity(experiment, settings):
            raise ValueError("it is of other settings than its name says")
        arrays = {key.removeprefix("array."): array for key, array in stored.items()}
        result = Result(experiment.name, settings, arrays, float(seconds))
        experiment.check(result)
        return result
    except FileNotFoundError:
        return None
    except Exception as error:  # the libraries raise many kinds
        raise DamagedResult(f"{path} is damaged: {error}") from error


def stored(out: Path, experiment: Experiment[Any]) -> Result[Any] | None:
    """Return the whole result that the folder holds; None if it is incomplete or of other code."""
    path = out / experiment.name / RUN
    if not path.exists():
        return None
    try:
        found = _read_run(path)
        settings = settings_from_json(type(experiment.quick), found["settings"])
        if _differences(found, _identity(experiment, settings)):
            return None
        parts = [load(out, experiment, chunk) for chunk in split(settings, experiment.chunk)]
    except (UserError, DamagedResult, TypeError, ValueError):
        return None
    whole = [part for part in parts if part is not None]
    return merge(whole) if len(whole) == len(parts) else None


def _identity(experiment: Experiment[Any], settings: TrialSettings) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "experiment": experiment.name,
        "code": code_of(experiment.run, PRESENTING),
        "settings": settings_to_json(settings),
    }


def _chunk_path(out: Path, experiment: Experiment[Any], settings: TrialSettings) -> Path:
    key = digest(_identity(experiment, settings))[:12]
    last = settings.first + settings.trials - 1
    return out / experiment.name / f"{settings.first:05d}-{last:05d}-{key}.npz"


def _read_run(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found["settings"], dict):
            raise TypeError("settings are not a table")
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Choose another --out, or delete {path.parent}"
        ) from error


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say in words how a folder's description differs from the one that is wanted."""
    pairs = [(f"the {key}", found.get(key), wanted[key]) for key in ("format", "experiment")]
    there, here = found["settings"], wanted["settings"]
    names = [name for name in {**there, **here} if name not in ("trials", "first")]
    pairs += [(name, there.get(name), here.get(name)) for name in names]
    different = [f"{word} {old} there, {new} here" for word, old, new in pairs if old != new]
    old, new = found.get("code"), wanted["code"]
    if old != new:
        old = old if isinstance(old, dict) else {}
        changed = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
        shown = ", ".join(changed[:4]) + (" and others" if len(changed) > 4 else "")
        different.append(f"the code has changed in {shown}")
    return different
