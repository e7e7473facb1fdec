"""The real download code, against a server that cuts, lies and refuses."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data_slices import FileServer, make_imdb, serving, tar_of
from mirrorhead_lab.cli.download import Download
from mirrorhead_lab.cli.main import COMMANDS, main, parse
from mirrorhead_lab.datasets import DataError, sources
from mirrorhead_lab.datasets.imdb import load_imdb
from mirrorhead_lab.datasets.sources import (
    SOURCES,
    Source,
    data_root,
    extract,
    fetch,
    fetch_source,
    locate,
)
from run_cases import make_text_run, make_vit_run

CONTENT = np.random.default_rng(0).bytes(600_000)


def get(server: FileServer, path: Path, **options: object) -> Path:
    remote = server.remote
    settings = {"size": remote.size, "sha256": remote.sha256, "pause": 0.0}
    return fetch(remote.url, path, **{**settings, **options})  # pyright: ignore[reportArgumentType]


def get_source(server: FileServer, root: Path) -> Path:
    """Fetch a data set of one file, and return that file."""
    source = Source("one", "folder", (server.remote,))
    return fetch_source(source, root, pause=0) / server.remote.name


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("left", "cuts", "ranges", "asked"),
    [
        (0, [], True, [None]),
        (0, [100_000, 250_001, 7], True,
         [None, "bytes=100000-", "bytes=350001-", "bytes=350008-"]),
        (123_456, [], True, ["bytes=123456-"]),  # what an earlier process left
        (0, [100_000], False, [None, "bytes=100000-"]),  # it sends all of it again
    ],
)  # fmt: skip
def test_a_file_arrives_whole_however_often_the_connection_breaks(
    tmp_path: Path, left: int, cuts: list[int], ranges: bool, asked: list[str | None]
) -> None:
    if left:
        (tmp_path / "file.part").write_bytes(CONTENT[:left])
    with serving(FileServer(CONTENT)) as server:
        server.cuts, server.ranges = cuts, ranges
        path = get(server, tmp_path / "file", attempts=1)
    assert path.read_bytes() == CONTENT and left_in(tmp_path) == ["file"]
    assert server.asked == asked


@pytest.mark.parametrize(
    ("options", "status", "part", "says", "requests", "kept"),
    [
        ({"sha256": "0" * 64}, 200, b"", "SHA-256", 1, []),
        ({}, 200, b"x" * 1000, "SHA-256", 1, []),
        ({"size": 1000}, 200, b"", "more than", 1, ["file.part"]),
        ({"attempts": 3}, 404, b"", "the server says 404", 1, ["file.part"]),
        ({"attempts": 3}, 503, b"", "the server says 503", 3, ["file.part"]),
    ],
)
def test_what_is_not_the_file_never_gets_its_name(
    tmp_path: Path, options: dict[str, object], status: int, part: bytes, says: str,
    requests: int, kept: list[str],
) -> None:  # fmt: skip
    (tmp_path / "file.part").write_bytes(part)
    with serving(FileServer(CONTENT)) as server:
        server.status = status
        with pytest.raises(DataError, match=says):
            get(server, tmp_path / "file", **options)
        assert left_in(tmp_path) == kept and len(server.asked) == requests
        server.status = 200
        assert get(server, tmp_path / "file").read_bytes() == CONTENT


def test_no_server_is_told(tmp_path: Path) -> None:
    with serving(FileServer(CONTENT)) as server:
        pass
    with pytest.raises(DataError, match=r"2 times; 0 of 600,000 bytes"):
        get(server, tmp_path / "file", attempts=2)


def test_two_at_once_fetch_it_once(tmp_path: Path) -> None:
    with serving(FileServer(CONTENT, "file")) as server, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(get_source, server, tmp_path) for _ in range(2)]
        assert [job.result().read_bytes() for job in jobs] == [CONTENT, CONTENT]
    assert left_in(tmp_path) == ["folder"]
    assert len(server.asked) == 1


def test_after_a_failure_the_next_in_line_starts_afresh(tmp_path: Path) -> None:
    waiting = tmp_path / ".mirrorhead-download-one"
    waiting.mkdir()
    (waiting / "file.part").write_bytes(b"x" * 1000)  # spoils the first attempt
    with serving(FileServer(CONTENT, "file")) as server, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(get_source, server, tmp_path) for _ in range(2)]
        failures = [job.exception() for job in jobs]
    assert {type(failure) for failure in failures} == {DataError, type(None)}
    assert (tmp_path / "folder" / "file").read_bytes() == CONTENT
    assert left_in(tmp_path) == ["folder"]


@pytest.mark.slow
def test_a_killed_download_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mirrorhead_lab.datasets.sources import fetch;"
        "fetch(sys.argv[1], Path(sys.argv[2]), size=int(sys.argv[3]), sha256='', pause=60)"
    )
    with serving(FileServer(CONTENT)) as server:
        server.cuts = [200_000]
        args = [server.url, str(tmp_path / "file"), str(len(CONTENT))]
        child = subprocess.Popen([sys.executable, "-c", code, *args])
        part = tmp_path / "file.part"
        for _ in range(600):
            if part.exists() and part.stat().st_size == 200_000:
                break
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert get(server, tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=200000-"]


def test_an_archive_is_unpacked_whole(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(tar_of({"top/a/b.txt": b"one", "top/c.txt": b"two", "._top": b"mac"}))
    folder = extract(archive, tmp_path / "out" / "top")
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == {"a/b.txt": b"one", "c.txt": b"two"}
    assert left_in(tmp_path / "out") == ["top"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tar_of({"top/a": b"1", "../evil": b"2"}), "leads out"),
        (tar_of({"top/a": b"1", "top/../../evil": b"2"}), "leads out"),
        (tar_of({"top/a": b"1", "/tmp/evil": b"2"}), "leads out"),
        (tar_of({"top/a": b"1", "top\\..\\evil": b"2"}), "leads out"),
        (tar_of({"top/a": b"1"}, {"top/link": "/etc/passwd"}), "link"),
        (tar_of({"top/a": b"1"}, {"top/link": "a"}), "link"),
        (tar_of({"top/a": b"1", "top/a/b": b"2"}), "cannot be unpacked"),
        (tar_of({"top/a": CONTENT})[:300_000], "cannot be unpacked"),
        (b"no archive", "cannot be unpacked"),
        (tar_of({"other/a": b"1"}), "has no folder top"),
    ],
    ids=range(10),  # an archive has its time in it, and would be another name in every process
)
def test_a_bad_archive_leaves_nothing(tmp_path: Path, content: bytes, says: str) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(DataError, match=says):
        extract(archive, tmp_path / "out" / "top")
    assert left_in(tmp_path / "out") == []
    assert left_in(tmp_path) == ["a.tar.gz", "out"]


def test_an_archive_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorhead_lab.datasets.sources.MOST_BYTES", 1000)
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(tar_of({"top/a": b"0" * 2000}))
    with pytest.raises(DataError, match="over 1,000 bytes"):
        extract(archive, tmp_path / "top")
    assert left_in(tmp_path) == ["a.tar.gz"]


def test_download_makes_a_set_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_imdb(tmp_path / "made")
    files = {str(path.relative_to(made.parent)): path.read_bytes() for path in made.rglob("*.txt")}
    with serving(FileServer(tar_of(files))) as server:
        source = Source("imdb", "aclImdb", (server.remote,))
        monkeypatch.setitem(sources.SOURCES, "imdb", source)
        got = load_imdb("train", tmp_path / "data", download=True, partial=True)
        assert got.texts == load_imdb("train", tmp_path / "made", partial=True).texts
        load_imdb("test", tmp_path / "data", download=True, partial=True)
    assert len(server.asked) == 1
    assert not list((tmp_path / "data").glob(".mirrorhead-download-*"))


def test_plain_files_are_laid_out_together(tmp_path: Path) -> None:
    with serving(FileServer(b"one", "a.tsv")) as one, serving(FileServer(b"two", "b.tsv")) as two:
        source = Source("pair", "pair-folder", (one.remote, two.remote))
        two.status = 404
        with pytest.raises(DataError, match="404"):
            fetch_source(source, tmp_path, pause=0)
        assert not (tmp_path / "pair-folder").exists()
        two.status = 200
        folder = fetch_source(source, tmp_path, pause=0)
    assert one.asked == [None]  # what had arrived was not fetched again
    assert (folder / "a.tsv").read_bytes() + (folder / "b.tsv").read_bytes() == b"onetwo"


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    for name, source in SOURCES.items():
        with pytest.raises(DataError, match="MIRRORHEAD_DATA") as caught:
            locate(name, tmp_path)
        assert f"{name}: there is no folder {source.folder} in {tmp_path}" in str(caught.value)
        assert f": mirrorhead download {name} --data {tmp_path} (" in str(caught.value)
    with pytest.raises(ValueError, match=r"one of .*imdb.*got 'mnist'"):
        locate("mnist", tmp_path)


def test_the_root_is_argument_then_variable_then_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRRORHEAD_DATA", str(tmp_path / "b"))
    assert data_root(tmp_path / "a") == tmp_path / "a"
    assert data_root() == tmp_path / "b"
    monkeypatch.delenv("MIRRORHEAD_DATA")
    monkeypatch.delenv("MIRRORHEAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert data_root() == tmp_path / "c" / "mirrorhead" / "data"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_text_run(folder / "text")
    make_vit_run(folder / "vit")
    return folder


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("train imdb", "imdb cad bert"),
        ("train cifar10", "cifar10"),
        ("sweep imdb", "imdb cad bert"),
        ("study language-model", "imdb"),
        ("tune trec --base base", "sentences"),
        ("evaluate text", "imdb cad bert eraser"),
        ("evaluate text --on eraser --on cad", "eraser bert cad"),
        ("evaluate vit", "cifar10"),
        ("study imdb", "imdb cad bert eraser"),
        ("study heads", "imdb cad bert eraser"),
        ("attention text dull", "bert"),
        ("margins text", "imdb cad bert"),
        ("margins text --texts own.txt", "bert"),
    ],
)
def test_missing_data_are_named_at_once_with_what_to_type(
    line: str, sets: str, runs: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(runs)
    assert main([*line.split(), "--data", "my data"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mirrorhead: ") and told.count("\n") == 1
    [typed] = re.findall(r": (mirrorhead download .*?) \(", told)
    name, *words = shlex.split(typed)
    *words, data = words
    assert words == ["download", *sets.split(), "--data"]
    assert Path(data).resolve() == runs / "my data"
    assert "--download" in told and "MIRRORHEAD_DATA" in told
    assert isinstance(parse(COMMANDS, name, None, [*words, data]), Download)


def test_the_command_fetches_each_set_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FileServer(CONTENT, "vocab.txt")) as server:
        monkeypatch.setitem(SOURCES, "bert", Source("bert", "bert-uncased", (server.remote,)))
        words = ["download", "bert", "bert", "--data", str(tmp_path)]
        assert main(words) == main(words) == 0
        assert server.asked == [None]
    path = tmp_path / "bert-uncased"
    assert (path / server.remote.name).read_bytes() == CONTENT
    assert capsys.readouterr().out == f"bert: {path}\n" * 2
    assert main(["download"]) == 2
    assert "give at least one of bert, cad, cifar10" in capsys.readouterr().err
