"""Results on disk: whole or not there, and never mixed with others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import toy_experiment
from mirrorhead_lab.experiments import load, storage
from mirrorhead_lab.experiments.experiment import split
from mirrorhead_lab.runtime.errors import UserError

TOY = load("toy_experiment")
CHUNK = split(TOY.quick, TOY.chunk)[1]


def stored_chunk(out: Path) -> Path:
    """The file of CHUNK, freshly saved."""
    storage.save(out, TOY, TOY.compute(CHUNK))
    (path,) = (out / "toy").glob("00004-*.npz")
    return path


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
            "mirrorhead/problem.py": "edited",
        }
        patch.setattr(storage, "code_of", lambda *_: edited)
        with pytest.raises(UserError, match=r"the code has changed in mirrorhead/problem.py\."):
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
    """A flipped bit is an error, or it is in a byte that says nothing, such as the time."""
    path, result, noticed = stored_chunk(tmp_path), TOY.compute(CHUNK), 0
    good = path.read_bytes()
    for size in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(storage.DamagedResult):
            storage.load(tmp_path, TOY, CHUNK)
    places = range(0, len(good), 61)
    for place in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            found = storage.load(tmp_path, TOY, CHUNK)
        except storage.DamagedResult:
            noticed += 1
            continue
        assert found is not None and found.arrays.keys() == result.arrays.keys()
        assert all(found[name].tobytes() == result[name].tobytes() for name in found.arrays)
    assert noticed > 0.8 * len(places)


@pytest.mark.parametrize("about", ["", "[]", "null", "[{}, 1]"])
def test_a_chunk_that_says_something_else_is_damaged(tmp_path: Path, about: str) -> None:
    np.savez(stored_chunk(tmp_path), about=np.array(about), x=np.zeros(4))
    with pytest.raises(storage.DamagedResult):
        storage.load(tmp_path, TOY, CHUNK)


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    path = stored_chunk(tmp_path)
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()  # the trap works
    (tmp_path / "sprung").unlink()
    stored = dict(np.load(path))
    stored["array.x"] = np.array([Trap(tmp_path / "sprung")] * 4, dtype=object)
    np.savez(path, allow_pickle=True, **stored)
    with pytest.raises(storage.DamagedResult, match="allow_pickle"):
        storage.load(tmp_path, TOY, CHUNK)
    assert not (tmp_path / "sprung").exists()


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
