"""Results on disk: whole or not there, and never mixed with others."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import toy_experiment
from mirrorhead._files import write_atomically
from mirrorhead_lab.experiments import load, storage
from mirrorhead_lab.experiments.experiment import split
from mirrorhead_lab.runtime.errors import UserError

TOY = load("toy_experiment")
CHUNK = split(TOY.quick, TOY.chunk)[1]


def stored_chunk(out: Path) -> tuple[Path, Path]:
    """The json and the npz of CHUNK, freshly saved."""
    storage.save(out, TOY, TOY.compute(CHUNK))
    (description,) = (out / "toy").glob("00004-*.json")
    (arrays,) = (out / "toy").glob("00004-*.npz")
    return description, arrays


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert storage.load(tmp_path, TOY, CHUNK) is None
    result = TOY.compute(CHUNK)
    storage.save(tmp_path, TOY, result)
    again = storage.load(tmp_path, TOY, CHUNK)
    assert again is not None and again.settings == CHUNK and again.seconds == result.seconds
    assert again.arrays.keys() == result.arrays.keys()
    for name, array in result.arrays.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)
    for other in (replace(CHUNK, first=8), replace(CHUNK, trials=3), replace(CHUNK, scale=2.0)):
        assert storage.load(tmp_path, TOY, other) is None


def test_a_folder_of_other_settings_is_not_touched(tmp_path: Path) -> None:
    storage.claim(tmp_path, TOY, TOY.quick)
    before = (tmp_path / "toy" / "run.json").read_bytes()
    storage.claim(tmp_path, TOY, TOY.quick)
    with pytest.raises(UserError) as caught:
        storage.claim(tmp_path, TOY, replace(TOY.quick, scale=2.0, steps=(1,)))
    message = str(caught.value)
    assert "scale 1.0 there, 2.0 here; steps [1, 10] there, [1] here" in message
    assert "another --out" in message and str(tmp_path / "toy") in message
    with pytest.MonkeyPatch.context() as patch:
        edited = {
            **storage.code_of(TOY.run, storage.PRESENTING),
            "mirrorhead.problem": "edited",
        }
        patch.setattr(storage, "code_of", lambda *_: edited)
        with pytest.raises(UserError, match=r"the code has changed in mirrorhead.problem\."):
            storage.claim(tmp_path, TOY, TOY.quick)
        assert storage.stored(tmp_path, TOY) is None
    assert (tmp_path / "toy" / "run.json").read_bytes() == before
    (tmp_path / "toy" / "run.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        storage.claim(tmp_path, TOY, TOY.quick)


def test_more_trials_add_to_a_folder(tmp_path: Path) -> None:
    settings = replace(TOY.quick, trials=8)
    for trials in (8, 12, 8):
        whole = replace(settings, trials=trials)
        storage.claim(tmp_path, TOY, whole)
        for chunk in split(whole, TOY.chunk):
            if storage.load(tmp_path, TOY, chunk) is None:
                storage.save(tmp_path, TOY, TOY.compute(chunk))
        found = storage.stored(tmp_path, TOY)
        assert found is not None
        np.testing.assert_array_equal(found["x"], TOY.compute(whole)["x"])
    assert len(list((tmp_path / "toy").glob("*.npz"))) == 3


def test_an_incomplete_folder_has_no_result(tmp_path: Path) -> None:
    assert storage.stored(tmp_path, TOY) is None
    storage.claim(tmp_path, TOY, TOY.quick)
    stored_chunk(tmp_path)
    assert storage.stored(tmp_path, TOY) is None


def test_every_truncation_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    description, arrays = stored_chunk(tmp_path)
    good = arrays.read_bytes()
    for size in (0, 1, len(good) // 2, len(good) - 1):
        arrays.write_bytes(good[:size])
        with pytest.raises(storage.DamagedResult, match="checksum"):
            storage.load(tmp_path, TOY, CHUNK)
    for place in range(0, len(good), 97):
        arrays.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(storage.DamagedResult, match="checksum"):
            storage.load(tmp_path, TOY, CHUNK)
    arrays.unlink()
    with pytest.raises(storage.DamagedResult, match="missing"):
        storage.load(tmp_path, TOY, CHUNK)
    arrays.write_bytes(good)
    text = description.read_text()
    for bad in (
        "",
        text[: len(text) // 2],
        "[]",
        "null",
        text.replace('"scale": 1.0', '"scale": 5.0'),
    ):
        description.write_text(bad)
        with pytest.raises(storage.DamagedResult):
            storage.load(tmp_path, TOY, CHUNK)
    description.write_text(text)
    assert storage.load(tmp_path, TOY, CHUNK) is not None


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    description, arrays = stored_chunk(tmp_path)
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()  # the trap works
    (tmp_path / "sprung").unlink()
    np.savez(arrays, x=np.array([Trap(tmp_path / "sprung")] * 4, dtype=object), allow_pickle=True)
    table = json.loads(description.read_text())
    table["sha256"] = hashlib.sha256(arrays.read_bytes()).hexdigest()
    description.write_text(json.dumps(table))
    with pytest.raises(storage.DamagedResult, match="damaged"):
        storage.load(tmp_path, TOY, CHUNK)
    assert not (tmp_path / "sprung").exists()


def test_the_arrays_of_a_piece_lie_beside_it(tmp_path: Path) -> None:
    """A description cannot point out of its folder."""
    description, arrays = stored_chunk(tmp_path)
    table = json.loads(description.read_text())
    arrays.rename(tmp_path / arrays.name)
    table["arrays"] = f"../{arrays.name}"
    description.write_text(json.dumps(table))
    with pytest.raises(storage.DamagedResult, match="missing"):
        storage.load(tmp_path, TOY, CHUNK)


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(FileExistsError):
        write_atomically(path, b"new", replace=False)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            with pytest.raises(OSError, match="disk is full"):
                write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.slow
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Both claim, save and load the same pieces again and again; neither sees a broken one."""
    program = """
import sys
from pathlib import Path
from mirrorhead_lab.experiments import load, storage
from mirrorhead_lab.experiments.experiment import split
toy, out = load("toy_experiment"), Path(sys.argv[1])
results = [toy.compute(chunk) for chunk in split(toy.quick, toy.chunk)]
for _ in range(25):
    storage.claim(out, toy, toy.quick)
    for result in results:
        storage.save(out, toy, result)
        assert storage.load(out, toy, result.settings) is not None
"""
    tests = str(Path(toy_experiment.__file__ or "").parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, tests])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    two = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait() for process in two] == [0, 0]
    found = storage.stored(tmp_path, TOY)
    assert found is not None
    np.testing.assert_array_equal(found["x"], TOY.compute(TOY.quick)["x"])
    assert not list((tmp_path / "toy").glob(".*"))
