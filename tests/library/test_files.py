"""Files that are whole or not there: links, modes, long names, names that others take."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mirrorhead as mh
from mirrorhead._files import (
    is_temporary,
    new_folder,
    remove_folder,
    remove_leftovers,
    remove_leftovers_of,
    write_atomically,
    write_json,
)


@pytest.fixture
def mask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def a_patch() -> mh.Patch:
    return mh.Patch.between({"w": torch.zeros(3)}, {"w": torch.ones(3)})


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_stays_and_its_target_is_written(relative: bool, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    target, link = tmp_path / "store" / "p", tmp_path / "p"
    link.symlink_to("store/p" if relative else target)
    for _ in range(2):  # the target is not there at first
        a_patch().save(link)
        assert link.is_symlink() and target.is_file() and not target.is_symlink()
        assert mh.Patch.load(target).count == 3
    write_json(link, {"a": 1})
    assert target.read_text().startswith("{") and link.is_symlink()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["p"]


def test_a_link_to_nothing_is_a_name_that_is_taken(tmp_path: Path) -> None:
    link = tmp_path / "p"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        write_atomically(link, b"", replace=False)
    with pytest.raises(FileExistsError), new_folder(link):
        pass
    assert link.is_symlink() and not (tmp_path / "nowhere").exists()


@pytest.mark.usefixtures("mask")
def test_an_existing_file_keeps_its_mode_and_a_new_one_gets_the_umasks(tmp_path: Path) -> None:
    path = tmp_path / "p"
    a_patch().save(path)
    assert mode(path) == 0o640
    for kept in (0o600, 0o664, 0o440):
        path.chmod(kept)
        a_patch().save(path)
        assert mode(path) == kept
    with new_folder(tmp_path / "f"):
        pass
    assert mode(tmp_path / "f") == 0o750


@pytest.mark.parametrize("name", ["n" * 255, "\u0451" * 127])
def test_any_name_that_the_system_takes_can_be_written(name: str, tmp_path: Path) -> None:
    a_patch().save(tmp_path / name)
    assert mh.Patch.load(tmp_path / name).count == 3
    with new_folder(tmp_path / name[:-1]) as fresh:
        assert is_temporary(fresh.name)
    remove_folder(tmp_path / name[:-1])
    # What a killed process left is found by the same short name.
    left = tmp_path / fresh.name
    left.write_text("")
    remove_leftovers_of(tmp_path / name[:-1])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_leftovers_of_a_link_are_beside_its_target(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "p").symlink_to(tmp_path / "store" / "real")
    left = tmp_path / "store" / ".mirrorhead-tmp-abcdefgh-real"
    left.write_text("")
    remove_leftovers_of(tmp_path / "p")
    assert not left.exists()


def test_a_new_folder_whose_name_is_taken_meanwhile(tmp_path: Path) -> None:
    for make in (Path.mkdir, Path.touch):
        path = tmp_path / make.__name__
        with pytest.raises(FileExistsError) as caught, new_folder(path):
            make(path)
        assert caught.value.filename == str(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mkdir", "touch"]
    assert not any((tmp_path / "mkdir").iterdir())
    # Folders of equal content are as good whoever made them.
    with new_folder(tmp_path / "shared", shared=True):
        (tmp_path / "shared").mkdir()


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(FileExistsError):
        write_atomically(path, b"new", replace=False)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(OSError, match="disk is full"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*result\.json'"):
        write_atomically(tmp_path / "result.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_leftovers_are_known_by_their_names(tmp_path: Path) -> None:
    keep = [".git", ".result.json.tmp", ".mirrorhead-tmp-", ".mirrorhead-tmp-abcdefgh-other.json"]
    for name in [*keep, ".mirrorhead-tmp-abcdefgh-result.json"]:
        (tmp_path / name).write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_text("")
    (tmp_path / ".mirrorhead-tmp-12345678-result.json").symlink_to(tmp_path / "outside")
    remove_leftovers(tmp_path, r"result\.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*keep, "outside"])
    assert (tmp_path / "outside" / "a").exists()
