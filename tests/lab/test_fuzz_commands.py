"""Every command that reads files of its own is run on broken copies of them.

Whatever the damage, a command ends in one of two ways. It exits with 2, prints one line that names
the file or its folder, and has changed nothing. Or it exits with 0 and its result is that of the
whole files: a checkpoint that is not needed, a log that was cut at a line. It never ends with a
traceback, and never changes a file that is not its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirrorhead.lab.cli.main import main
from mirrorhead.lab.training.checkpoints import checkpoints
from results_cases import made_up, write
from run_cases import make_slices, make_text_run

TRAIN = "train cifar10 --optimizer sgd --lr 0.01 --epochs 2 --batch-size 10 --partial --data data"


@dataclass(frozen=True)
class Command:
    """A command line, the files it reads, and what it may write."""

    line: str
    reads: tuple[str, ...]
    writes: str  # a pattern
    result: Callable[[str], object]  # of what it prints and writes


def printed(out: str) -> object:
    return out


def trained(out: str) -> object:
    (run,) = re.findall(r"^run: (.*)$", out, re.M)
    names = ("result.json", "best.safetensors", "test.json")
    return [(Path(run) / name).read_bytes().rstrip(b"\n") for name in names]


LAST = "checkpoints/LAST"  # replaced by the last checkpoint of the run
PARTS = tuple(
    f"{LAST}/{name}" for name in ("state.json", "model.safetensors", "optimizer.safetensors")
)
COMMANDS = {
    "resume": Command(
        f"{TRAIN} --out stopped",
        (*(f"stopped/{part}" for part in PARTS), "stopped/settings.json", "stopped/log.jsonl",
         "stopped/best.safetensors", "stopped/preset.json"),
        r"stopped/(log\.jsonl|best\.safetensors|(result|test|settings)\.json|checkpoints.*)",
        trained,
    ),
    "train": Command(
        f"{TRAIN} --out run",
        ("run/result.json", "run/test.json", "run/settings.json", f"run/{LAST}/state.json"),
        r"run/(result|test|settings)\.json|run/checkpoints",
        trained,
    ),
    "evaluate": Command(
        "evaluate run --on weights --on entropy --partial --data data",
        ("run/preset.json", "run/best.safetensors", "run/measures.json", "run/result.json"),
        r"run/measures\.json",
        printed,
    ),
    "collect": Command(
        "collect sweep --out collected.json --partial --data data",
        ("sweep/sweep-RECORD.json", "sweep/RUN/preset.json", "sweep/RUN/best.safetensors",
         "sweep/RUN/measures.json", "sweep/RUN/result.json"),
        r"collected\.json|sweep/\w+/measures\.json",
        lambda _: Path("collected.json").read_bytes(),
    ),
    "attention": Command(
        "attention text dull --partial --data data",
        ("text/preset.json", "text/best.safetensors"),
        "nothing",
        printed,
    ),
    "evaluate a text run": Command(
        "evaluate text --on weights --partial --data data",
        ("text/preset.json", "text/best.safetensors", "text/measures.json"),
        r"text/measures\.json",
        printed,
    ),
    "report": Command(
        "report --out out --results results --runs evaluated",
        ("results/imdb.json",),
        "out.*",
        lambda _: Path("out/report.html").stat().st_size > 10_000,
    ),
}  # fmt: skip
#: Files whose content has a checksum: one changed byte is noticed.
CHECKED = ("state.json", "model.safetensors", "optimizer.safetensors", "run/best.safetensors")

WRONG = [b"", b"[]", b"3", b"null", b'"x"', b"{}", b"[[]]", b'{"a": 1}', b"\xff\xfe{", b"\x00" * 99]
broken = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("replaced"), st.sampled_from(WRONG)),
    st.tuples(st.just("other encoding"), st.sampled_from(["utf-16", "utf-32"])),
    st.tuples(st.just("a folder"), st.none()),
    st.tuples(st.just("gone"), st.none()),
    st.tuples(st.just("one byte"), st.floats(0, 1, exclude_max=True)),
)


def damage(path: Path, how: str, value: Any) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: int(value * len(data))])
    elif how == "replaced":
        path.write_bytes(value)
    elif how == "other encoding":
        path.write_bytes(data.decode("latin-1").encode(value))
    elif how == "one byte" and path.as_posix().endswith(CHECKED):
        place = int(value * len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
    elif how in ("a folder", "gone"):
        path.unlink()
        if how == "a folder":
            path.mkdir()


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "mirrorhead.lock"
    }


@pytest.fixture(scope="module")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not trained, results and data, and some files of a user among them."""
    root = tmp_path_factory.mktemp("world")
    make_slices(root / "data")
    make_text_run(root / "text")
    write(root / "results", made_up("imdb"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(COMMANDS["evaluate a text run"].line.split()) == 0
    for folder in ("text", "results", "."):
        for name in (".env", "lock", ".mirrorhead-tmp-note"):
            (root / folder / name).write_text("mine")
    return root


@pytest.fixture(scope="module")
def world(small_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with trained runs and a sweep."""
    root = tmp_path_factory.mktemp("trained") / "world"
    shutil.copytree(small_world, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MIRRORHEAD_CACHE", str(root / "cache"))
        assert main([*TRAIN.split(), "--out", "run"]) == 0
        assert main(COMMANDS["evaluate"].line.split()) == 0
        line = "sweep cifar10 --seeds 0 --epochs 1 --partial --data data --out sweep --jobs 1"
        assert main([*line.split(), "--candidate", "sgd lr=0.01"]) == 0
        assert main(COMMANDS["collect"].line.split()) == 0
        (root / "collected.json").unlink()
        shutil.copytree("run", "stopped")
        (root / "stopped" / "result.json").unlink()
        (root / "stopped" / "test.json").unlink()
        shutil.rmtree(checkpoints(root / "stopped" / "checkpoints")[-1])
    for folder in ("run", "stopped", "sweep"):
        for name in (".env", "lock", ".mirrorhead-tmp-note"):
            (root / folder / name).write_text("mine")
    return root


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What each command comes to with whole files."""
    return {
        name: run_on_copy(world, tmp_path_factory.mktemp("whole"), name, None)[1]
        for name in COMMANDS
    }


def run_on_copy(
    world: Path, root: Path, name: str, broken: tuple[str, str, Any] | None
) -> tuple[int, object]:
    """Copy the world, break a file, run a command there, and check what must always hold."""
    command = COMMANDS[name]
    root = root / "copy"
    shutil.copytree(world, root)
    with pytest.MonkeyPatch.context() as patch, Captured() as captured:
        patch.chdir(root)
        patch.setenv("MIRRORHEAD_CACHE", str(root / "cache"))
        path = Path()
        if broken is not None:
            path = resolved(broken[0])
            damage(path, *broken[1:])
        before = content(root)
        code = main(command.line.split())
        after = content(root)
        told = captured.err()
        assert code in (0, 2), told
        assert "Traceback" not in told
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        if code == 2:
            lines = [line for line in told.splitlines() if line.startswith("mirrorhead: ")]
            assert len(lines) == 1 and lines[0] == told.splitlines()[-1], told
            own = [path.name, path.parent.as_posix(), path.parts[0]]
            assert any(part in lines[0] for part in own), (broken, lines[0])
            # Training may have gone on until it met the file that is broken.
            allowed = command.writes if name == "resume" else "nothing"
        else:
            allowed = command.writes
        foreign = {key for key in changed if not re.fullmatch(allowed, key)}
        assert not foreign, (broken, told)
        return code, command.result(captured.out()) if code == 0 else None


def resolved(name: str) -> Path:
    """The path of a file, with the names filled in that depend on a hash or a step."""
    run = name.split("/")[0]
    if "LAST" in name:
        name = name.replace("LAST", checkpoints(Path(run) / "checkpoints")[-1].name)
    if "RECORD" in name:
        return next(Path("sweep").glob("sweep-*.json"))
    if "RUN" in name:
        name = name.replace("RUN", next(Path("sweep").glob("*/preset.json")).parent.name)
    return Path(name)


class Captured:
    """What is printed meanwhile, in memory: pytest's fixtures are for a whole test."""

    def __enter__(self) -> Captured:
        import contextlib
        import io

        self._out, self._err = io.StringIO(), io.StringIO()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(contextlib.redirect_stdout(self._out))
        self._stack.enter_context(contextlib.redirect_stderr(self._err))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def out(self) -> str:
        return self._out.getvalue()

    def err(self) -> str:
        return self._err.getvalue()


def check(
    world: Path, whole: dict[str, object], factory: Any, name: str, file: str, how: Any
) -> None:
    root = factory.mktemp("fuzz")
    try:
        code, result = run_on_copy(world, root, name, (file, *how))
        assert code == 2 or result == whole[name], (file, how)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("name", ["attention", "evaluate a text run"])
def test_a_broken_run_is_named(small_world: Path, tmp_path_factory: Any, name: str) -> None:
    expected = run_on_copy(small_world, tmp_path_factory.mktemp("whole"), name, None)[1]
    for file in COMMANDS[name].reads:
        for how in (("cut", 0.5), ("replaced", b"[]"), ("other encoding", "utf-16")):
            check(small_world, {name: expected}, tmp_path_factory, name, file, how)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_broken_files_are_named_or_do_not_matter(
    world: Path, whole: dict[str, object], tmp_path_factory: Any, name: str
) -> None:
    @hypothesis.settings(max_examples=30)
    @given(st.sampled_from(COMMANDS[name].reads), broken)
    def fuzz(file: str, how: Any) -> None:
        check(world, whole, tmp_path_factory, name, file, how)

    fuzz()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "replaced", "other encoding", "a folder", "gone"])
@pytest.mark.parametrize("name", COMMANDS)
def test_each_file_in_each_way(
    world: Path, whole: dict[str, object], tmp_path_factory: Any, name: str, how: str
) -> None:
    value = {"cut": 0.5, "replaced": b"[]", "other encoding": "utf-16"}.get(how)
    for file in COMMANDS[name].reads:
        check(world, whole, tmp_path_factory, name, file, (how, value))
