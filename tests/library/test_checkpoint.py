"""Files that `descend(checkpoint=)` finds in place of its own: none is overwritten or blamed."""

from __future__ import annotations

import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mirrorhead as mh
from mirrorhead.synthetic import random_problem

PROBLEM = random_problem(2)


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps({"key": 1, "step": 2}))


def single(file: Path) -> None:
    with open(file, "wb") as stream:
        np.save(stream, np.ones(3))


def arrays(file: Path) -> None:
    with open(file, "wb") as stream:
        np.savez(stream, X=np.ones(3), y=np.array([{}], dtype=object))


def compressed(file: Path) -> None:
    with open(file, "wb") as stream:
        np.savez_compressed(stream, X=np.ones(3))


def archive(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as entries:
        entries.writestr("notes.txt", "my notes")


FOREIGN: list[Callable[[Path], object]] = [
    pickled,
    single,
    arrays,
    compressed,
    archive,
    lambda file: file.write_text("epoch,loss\n1,0.5\n"),
    lambda file: file.write_bytes(b""),
    lambda file: torch.save({"weight": torch.ones(2)}, file),
]


@pytest.mark.parametrize("write", FOREIGN)
def test_a_file_of_another_program_is_named_and_kept(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    file = tmp_path / "run.npz"
    write(file)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="is not a checkpoint of descend") as caught:
        mh.descend(PROBLEM, 1.5, 10, checkpoint=file)
    message = str(caught.value)
    assert str(file) in message
    assert "give another file name" in message
    assert not re.search("delete|pickle", message)
    assert file.read_bytes() == before


@pytest.mark.parametrize("steps", [10, 5])
def test_every_message_leaves_the_file_alone(steps: int, tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    mh.descend(PROBLEM, 1.5, 8, checkpoint=file, record=[8])
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the text is checked below
        mh.descend(PROBLEM, 1.5, steps, checkpoint=file, record=[3])
    assert "delete" not in str(caught.value)
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        mh.descend(PROBLEM, 1.7, 10, checkpoint=file)
    assert "delete" not in str(caught.value)


@pytest.mark.slow
def test_a_checkpoint_with_a_changed_byte_is_refused_or_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.npz"
    expected = mh.descend(PROBLEM, 1.5, 10, checkpoint=file).W
    whole = file.read_bytes()
    draw, refusals = random.Random(0), []
    for _ in range(400):
        damaged = bytearray(whole)
        place = draw.randrange(len(whole))
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged if draw.random() < 0.8 else whole[:place])
        try:
            assert torch.equal(mh.descend(PROBLEM, 1.5, 10, checkpoint=file).W, expected)
        except ValueError as error:
            refusals.append(str(error))
    assert all("give another file name" in refusal for refusal in refusals)
    assert len(refusals) > 200


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        mh.descend(PROBLEM, 1.5, 10, checkpoint=tmp_path)
