"""Every command that reads files of its own is run on broken copies of them.

Whatever the damage, a command ends in one of two ways. It exits with 2, prints one line that names
the file or its folder, and has changed nothing. Or it exits with 0 and its result is that of the
whole files: a checkpoint that is not needed, a log that was cut at a line. It never ends with a
traceback, and never changes a file that is not its own.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.studies import language_model
from mirrorhead_lab.studies.study import Row, Rows
from mirrorhead_lab.training.checkpoints import checkpoints
from patch_cases import sharded_folder, small_state, tuned_from
from results_cases import losses, made_up, write_rows
from run_cases import make_slices, make_text_run
from tiny_bert import tiny_bert, toy_texts

SWEEP = (
    "sweep cifar10 --seeds 0 --epochs 1 --partial --data data --out sweep --jobs 1"
    " --candidate 'sgd lr=0.01'"
)
REPRODUCE = "reproduce --only toy_experiment --out toy-out --jobs 1"
TRAIN = "train cifar10 --optimizer sgd --lr 0.01 --epochs 2 --batch-size 10 --partial --data data"


@dataclass(frozen=True)
class Command:
    """A command line, the files it reads, and what it may write."""

    line: str
    reads: tuple[str, ...]
    writes: str  # a pattern
    result: Callable[[str], object]  # of what it prints and writes
    #: Files of the user whose content may be anything: what is left of them is what was meant.
    users_own: tuple[str, ...] = ()
    #: Files in which this command notices one changed byte, although others may not.
    notices: tuple[str, ...] = ()


def printed(out: str) -> object:
    return out


def trained(out: str) -> object:
    (run,) = re.findall(r"^run: (.*)$", out, re.M)
    names = ("result.json", "best.safetensors", "test.json")
    return [(Path(run) / name).read_bytes().rstrip(b"\n") for name in names]


def written(name: str) -> Callable[[str], object]:
    """The bytes of the files below a path."""
    return lambda _: {
        path.as_posix(): path.read_bytes()
        for path in (Path(name), *Path(name).rglob("*"))
        if path.is_file()
    }


def verdicts(out: str) -> object:
    """What was measured, without times."""
    return re.findall(r"largest mean [\d.]+ < 1", out)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
LAST = "checkpoints/LAST"  # replaced by the last checkpoint of the run
PARTS = tuple(
    f"{LAST}/{name}" for name in ("state.json", "model.safetensors", "optimizer.safetensors")
)
COMMANDS = {
    "resume": Command(
        f"{TRAIN} --out stopped",
        (*(f"stopped/{part}" for part in PARTS), "stopped/settings.json", "stopped/log.jsonl",
         "stopped/best.safetensors", "stopped/preset.json"),
        r"stopped/(log\.jsonl|best\.safetensors|(result|test|settings|preset)\.json|checkpoints.*)",
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
    "attention": Command(
        "attention text dull --partial --data data",
        ("text/preset.json", "text/best.safetensors"),
        "nothing",
        printed,
    ),
    "margins": Command(
        "margins text --n 4 --tokens 8 --p 2 --partial --data data",
        ("text/preset.json", "text/best.safetensors"),
        "nothing",
        printed,
    ),
    "margins of a pretrained model": Command(
        "margins bert --n 4 --tokens 8 --p 2 --partial --data data",
        ("bert/config.json", "bert/model.safetensors", "bert/tokenizer.json"),
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
        ("results/imdb.jsonl", "results/language-model.jsonl"),
        "out.*",
        lambda _: Path("out/report.html").stat().st_size > 10_000,
    ),
    "reproduce": Command(
        f"{REPRODUCE} --results no-results",
        ("toy-out/toy/run.json", "toy-out/toy/CHUNK", "toy-out/report.html"),
        r"toy-out/report\.html|toy-out/toy|toy-out/toy/([0-9a-f-]+\.npz|run\.json)",
        verdicts,
    ),
    "reproduce with real data": Command(
        f"{REPRODUCE} --results results", ("results/imdb.jsonl",), r"toy-out/report\.html", verdicts
    ),
    "sweep": Command(
        SWEEP,
        ("sweep/RECORD",),
        r"sweep/.*",
        lambda out: re.findall(r"^. sgd .*\d", out, re.M),
    ),
    "patch make": Command(
        "patch make base tuned --keep 0.1 -o made.safetensors",
        (*(f"{folder}/{name}" for folder in ("base", "tuned") for name in (*SHARDS, INDEX)),),
        r"made\.safetensors",
        written("made.safetensors"),
    ),
    "patch apply": Command(
        "patch apply base p.safetensors -o made --verify",
        (*(f"base/{name}" for name in (*SHARDS, INDEX)), "p.safetensors"),
        "made.*",
        written("made"),
        notices=("p.safetensors",),
    ),
    "patch revert": Command(
        "patch revert patched p.safetensors -o made --verify",
        (*(f"patched/{name}" for name in (*SHARDS, INDEX)), "p.safetensors"),
        "made.*",
        written("made"),
        notices=("p.safetensors",),
    ),
    "patch info": Command("patch info p.safetensors", ("p.safetensors",), "nothing", printed),
    "patch merge": Command(
        "patch merge p.safetensors q.safetensors --base base -o made.safetensors",
        ("p.safetensors", "q.safetensors", *(f"base/{name}" for name in (*SHARDS, INDEX))),
        r"made\.safetensors",
        written("made.safetensors"),
    ),
    "tune": Command(
        "tune own.csv --base bert --out tuned-bert --epochs 1 --texts 32 --keep 0.1",
        ("own.csv", *(f"bert/{name}" for name in (
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"))),
        "tuned-bert.*",
        written("tuned-bert/patch.safetensors"),
        users_own=("own.csv", "bert/tokenizer_config.json"),
    ),
    "classify": Command(
        "classify TUNED good bad",
        tuple(f"TUNED/{name}" for name in (
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")),
        "nothing",
        printed,
        users_own=("TUNED/tokenizer_config.json",),
    ),
    "patch apply with labels": Command(
        "patch apply bert labels.safetensors -o made",
        ("bert/config.json", "bert/model.safetensors", "labels.safetensors"),
        "made.*",
        written("made"),
        notices=("labels.safetensors",),
    ),
    "patch revert with labels": Command(
        "patch revert TUNED labels.safetensors -o made",
        ("TUNED/config.json", "TUNED/config.history.json", "TUNED/model.safetensors"),
        "made.*",
        written("made"),
    ),
    "playground": Command(
        "playground --save page.html", ("page.html",), r"page\.html", written("page.html")
    ),
}  # fmt: skip
#: Files whose content has a checksum: one changed byte is noticed.
CHECKED = (
    "LAST/state.json", "LAST/model.safetensors", "LAST/optimizer.safetensors",
    "run/best.safetensors",
)  # fmt: skip

WRONG = [b"", b"[]", b"3", b"null", b'"x"', b"{}", b"[[]]", b'{"a": 1}', b"\xff\xfe{", b"\x00" * 99]
#: How a file is broken, and by what: a share of its length, or what it is replaced by.
WAYS: dict[str, Callable[[random.Random], Any]] = {
    "cut": random.Random.random,
    "replaced": lambda chance: chance.choice(WRONG),
    "other encoding": lambda chance: chance.choice(["utf-16", "utf-32"]),
    "a folder": lambda chance: None,
    "gone": lambda chance: None,
    "one byte": random.Random.random,
}


def damage(path: Path, how: str, value: Any) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: int(value * len(data))])
    elif how == "replaced":
        path.write_bytes(value)
    elif how == "other encoding":
        path.write_bytes(data.decode("latin-1").encode(value))
    elif how == "one byte":
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
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and what every command reads, with some files of a user among them."""
    root = tmp_path_factory.mktemp("world")
    make_slices(root / "data")
    make_text_run(root / "text")
    write_rows(root / "results", made_up("imdb"))
    begun = language_model.STUDY.tuning_trials("AdamW")
    rows = {trial: Row(trial, losses(trial), 1.0) for trial in begun}
    write_rows(root / "results", Rows(language_model.STUDY, rows))
    tiny_bert(root / "bert")
    toy_texts(root / "own.csv")
    state = small_state()
    sharded_folder(root / "base", state)
    sharded_folder(root / "tuned", tuned_from(state))
    lines = (
        COMMANDS["evaluate a text run"].line,
        COMMANDS["reproduce"].line,
        COMMANDS["playground"].line,
        "patch make base tuned --keep 0.1 -o p.safetensors",
        "patch make base tuned --keep 0.2 -o q.safetensors",
        "patch apply base p.safetensors -o patched",
        f"{TRAIN} --out run",
        COMMANDS["evaluate"].line,
        SWEEP,
        "tune own.csv --base bert --out labels --epochs 1 --texts 32 --keep 0.1",
        "patch apply bert labels/patch.safetensors -o TUNED",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("MIRRORHEAD_CACHE", str(root / "cache"))
        for line in lines:
            assert main(shlex.split(line)) == 0
    shutil.move(root / "labels" / "patch.safetensors", root / "labels.safetensors")
    shutil.rmtree(root / "labels")
    shutil.copytree(root / "run", root / "stopped")
    (root / "stopped" / "result.json").unlink()
    (root / "stopped" / "test.json").unlink()
    shutil.rmtree(checkpoints(root / "stopped" / "checkpoints")[-1])
    for folder in ("text", "results", "base", "toy-out", "run", "stopped", "sweep", "."):
        for name in (".env", "lock", ".mirrorhead-tmp-note"):
            (root / folder / name).write_text("mine")
    return root


Whole = Callable[[str], object]


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What a command comes to with whole files."""

    @functools.cache
    def result(name: str) -> object:
        return run_on_copy(world, tmp_path_factory.mktemp("whole"), name, None)[1]

    return result


def run_on_copy(
    world: Path, root: Path, name: str, broken: tuple[str, str, Any] | None
) -> tuple[int, object]:
    """Copy the world, break a file, run a command there, and check what must always hold."""
    command = COMMANDS[name]
    root = root / "copy"
    shutil.copytree(world, root)
    printed, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        patch.chdir(root)
        patch.setenv("MIRRORHEAD_CACHE", str(root / "cache"))
        path = Path()
        if broken is not None:
            path = resolved(broken[0])
            noticed = broken[0].endswith(CHECKED) or broken[0] in command.notices
            if broken[1] != "one byte" or noticed:
                damage(path, *broken[1:])
        before = content(root)
        code = main(shlex.split(command.line))
        after = content(root)
        told = errors.getvalue()
        assert code in (0, 2), told
        assert "Traceback" not in told
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        if code == 2:
            lines = [line for line in told.splitlines() if line.startswith("mirrorhead: ")]
            assert len(lines) == 1 and lines[0] == told.splitlines()[-1], told
            own = {path.name, path.parent.as_posix(), path.parts[0]} - {"."}
            # A patch in which a tensor's name has changed is a patch for another base.
            other = broken is not None and broken[1] == "one byte" and "patch does not" in lines[0]
            assert other or any(part in lines[0] for part in own), (broken, lines[0])
            # Training may have gone on until it met the file that is broken.
            allowed = command.writes if name == "resume" else "nothing"
        else:
            allowed = command.writes
        foreign = {key for key in changed if not re.fullmatch(allowed, key)}
        assert not foreign, (broken, told)
        return code, command.result(printed.getvalue()) if code == 0 else None


def resolved(name: str) -> Path:
    """The path of a file, with the names filled in that depend on a hash or a step."""
    run = name.split("/")[0]
    if "LAST" in name:
        name = name.replace("LAST", checkpoints(Path(run) / "checkpoints")[-1].name)
    if "CHUNK" in name:
        return min(Path(name).parent.glob("*.npz"))
    if "RECORD" in name:
        return next(Path("sweep").glob("*.jsonl"))
    return Path(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_broken_files_are_named_or_do_not_matter(
    world: Path, whole: Whole, tmp_path_factory: Any, name: str
) -> None:
    """Each file that the command reads, in each way; where and by what is drawn."""
    chance = random.Random(name)
    for file in COMMANDS[name].reads:
        for how, value in WAYS.items():
            root = tmp_path_factory.mktemp("fuzz")
            broken = file, how, value(chance)
            code, result = run_on_copy(world, root, name, broken)
            users_own = file in COMMANDS[name].users_own
            assert code == 2 or users_own or result == whole(name), broken
            shutil.rmtree(root)
