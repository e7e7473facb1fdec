"""Wrong calls of every command: each ends with code 2 and says what to type instead."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorhead_lab.cli.main import main
from mirrorhead_lab.training.tuning import default_reach
from run_cases import make_slices, make_text_run, make_vit_run
from tiny_bert import tiny_bert, toy_texts


@pytest.mark.parametrize(
    ("line", "help_of"),
    [
        ("", "mirrorhead"),
        ("--onyl", "mirrorhead"),
        ("--onyl train", "mirrorhead train"),
        ("reproduce --trials x", "mirrorhead reproduce"),
        ("reproduce --onyl", "mirrorhead reproduce"),
        ("train imdb --epoch 3", "mirrorhead train"),
        ("train imdb --p abc", "mirrorhead train"),
        ("patch", "mirrorhead patch"),
        ("patch info file --onyl", "mirrorhead patch info"),
        ("playground extra", "mirrorhead playground"),
    ],
)
def test_a_line_that_cannot_be_parsed_points_to_the_help_of_its_command(
    line: str, help_of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out and "Traceback" not in printed.err
    assert re.findall(r"mirrorhead[a-z ]*(?= --help)", printed.err)[-1] == help_of


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian imdb", "there is no command 'trian'; did you mean mirrorhead train? See"),
        ("patch mak a b", "there is no command 'mak'; did you mean mirrorhead patch make? See"),
        ("xyzzy", "there is no command 'xyzzy'; there are reproduce, "),
    ],
)
def test_a_mistyped_command_is_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mirrorhead: {message}") and error.count("\n") == 1


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a base, two runs, and things of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIRRORHEAD_DATA", "data")
    monkeypatch.setenv("MIRRORHEAD_CACHE", "cache")
    make_slices(tmp_path / "data")
    make_text_run(tmp_path / "text")
    make_vit_run(tmp_path / "vit")
    toy_texts(tmp_path / "own.csv")
    tiny_bert(tmp_path / "bert")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    return tmp_path


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a wrong call, which changes nothing; return its one line."""
    before = content(Path())
    assert main(shlex.split(line)) == 2, line
    assert content(Path()) == before, line
    printed = capsys.readouterr()
    assert printed.err.startswith("mirrorhead: ") and printed.err.count("\n") == 1, printed.err
    assert not re.search(r"Errno|Error\b|Traceback", printed.err), printed.err
    return printed.err.removeprefix("mirrorhead: ").rstrip("\n")


#: Commands that write a folder; {} is its place.
INTO_FOLDERS = [
    "reproduce --only toy_experiment --jobs 1 --results none --out {}",
    "report --results none --out {}",
    "train cifar10 --partial --optimizer sgd --lr 0.1 --epochs 1 --out {}",
    "sweep cifar10 --partial --seeds 0 --epochs 1 --jobs 1 --candidate 'sgd lr=0.1' --out {}",
    "tune own.csv --base bert --epochs 1 --texts 32 --out {}",
]
#: Commands that write one file; {} is its place.
INTO_FILES = [
    "attention text dull --partial --html {}",
    "playground --save {}",
    "patch make bert bert --keep 0.1 -o {}",
]


@pytest.mark.parametrize("line", INTO_FOLDERS)
def test_every_command_leaves_the_folder_of_somebody_else_alone(
    line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(line.format("thesis"), capsys)
    assert told.startswith("thesis is not empty and holds no ") and "'thesis.tex'" in told
    for place in ("file", "file/x/y"):
        told = refused(line.format(place), capsys)
        assert told.startswith(f"{place} cannot be written: file is not a folder")


@pytest.mark.parametrize("line", [*INTO_FOLDERS, *INTO_FILES])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(line.format("file/x"), capsys)  # with it, what is imported late is there
    (here / "sealed").mkdir()
    (here / "sealed").chmod(0o555)
    here.chmod(0o755)
    (here / "bert" / "model.safetensors").chmod(0o644)
    me = os.geteuid()
    try:
        if me == 0:  # who may write everywhere
            os.seteuid(65534)
        assert main(shlex.split(line.format("sealed/x"))) == 2
    finally:
        os.seteuid(me)
    told = capsys.readouterr().err
    assert told.endswith("cannot be written: no permission to write into sealed\n"), told
    assert told.count("\n") == 1 and not list((here / "sealed").iterdir())


@pytest.mark.parametrize("line", INTO_FILES)
def test_a_file_is_not_written_into_a_mistyped_folder(
    line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no folder nope" in refused(line.format("nope/page.html"), capsys)
    assert "file" in refused(line.format("file/page.html"), capsys)
    assert "thesis" in refused(line.format("thesis"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("line", INTO_FOLDERS)
def test_a_command_goes_into_its_own_folder_again(line: str, here: Path) -> None:
    """Notes of the user beside our files do not make the folder foreign, nor do new runs."""
    if line.startswith("report"):
        experiment = INTO_FOLDERS[0].replace("toy_experiment", "example-1")
        assert main(shlex.split(experiment.format("place"))) == 0
    assert main(shlex.split(line.format("place"))) == 0
    (here / "place" / "notes.txt").write_text("mine")
    assert main(shlex.split(line.format("place"))) == 0
    assert (here / "place" / "notes.txt").read_text() == "mine"


def test_report_says_where_stored_studies_are(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused("report", capsys)
    assert told.startswith("there is nothing to report: no experiments in out (--out), ")
    assert "no studies in results (--results)" in told and "sweep" not in told
    assert told.endswith("To run the experiments: mirrorhead reproduce --out out")
    for option in ("--results", "--runs"):
        assert refused(f"report {option} file", capsys) == f"{option} file is not a folder"
    line = "reproduce --only toy_experiment --results file"
    assert refused(line, capsys) == "--results file is not a folder"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("download imdb --data file", "the folder of data sets file is not a folder"),
        ("train imdb --data file", "the folder of data sets file is not a folder"),
        (
            "train imdb --optimizer mirror-adam --lr 1 --p 3 --knee 1",
            "--knee is for p below 2, got",
        ),
        (
            "tune own.csv --base bert --seed 9223372036854775808",
            "--seed must be at least 0 and less",
        ),
        ("tune own.csv --base silent", "silent has no tokenizer: files such as tokenizer.json are"),
        ("margins silent --texts texts.txt --n 2", "silent has no tokenizer: files such as"),
        ("margins text --p", "--p needs at least one number"),
        ("margins text --texts thesis --n 2 --partial", "thesis cannot be read: Is a directory"),
        (
            "margins bert --texts binary --n 2",
            "binary cannot be read: it is not UTF-8 text (byte 1)",
        ),
        ("tune latin.csv --base bert", "latin.csv cannot be read: it is not UTF-8 text (byte 14)"),
        ("tune none.csv --base bert", "none.csv cannot be read: No such file or directory"),
        ("playground --save nowhere", "--save nowhere is a link that leads nowhere"),
        ("attention text dull --html nowhere", "--html nowhere is a link that leads nowhere"),
        ("study language-model --results file", "file cannot be written: file is not a folder"),
        ("reproduce --only figure-99", "there is no experiment 'figure-99'; there are example-1"),
        ("reproduce --only ../x", "there is no experiment '../x'; there are example-1"),
        ("reproduce --only json", "json has no EXPERIMENT = Experiment"),
        ("reproduce --only toy_experiment --trials 0", "--trials must be at least 1, got 0"),
        ("reproduce --only example-1 --trials 0", "--trials must be at least 1, got 0"),
        ("reproduce --only example-1,", "--only has an empty name"),
        ("reproduce --jobs 0", "--jobs must be at least 1, got 0"),
        ("reproduce --backend dask", "--backend dask needs --address"),
        ("reproduce --backend dask --address a --jobs 2", "--jobs goes with --backend local"),
        ("reproduce --address tcp://x", "--address goes with --backend dask, not with local"),
        ("reproduce --backend slurm", "--backend slurm needs sbatch"),
        ("attention text '' --partial", "a text must have at least one word, got ''"),
        ("attention text dull ' ' --partial", "at least one word"),
        ("attention text", "give at least one sentence"),
        ("attention text \udcff --partial", "SENTENCE is not valid UTF-8"),
        ("attention text dull --layer 1 --partial", "--layer must be from 0 to 0, got 1"),
        ("attention text dull --head -1 --partial", "--head must be from 0 to 1, got -1"),
        ("attention text dull --rollout --head 0", "leave out --layer and --head"),
        ("attention data dull", "data has no preset.json"),
        ("attention vit dull", "vit is a run on cifar10, which has no texts"),
        ("attention text dull --data no", "there is no folder bert-uncased in no. To"),
        ("patch make bert BERT -o p", "name it in `whole`"),
        ("patch make bert bert --keep 2 -o p", "keep must be above 0 and at most 1, got 2.0"),
        ("patch make bert nothing -o p", "nothing does not exist"),
        ("patch make bert bert -o file", "exists; give the path of a new file"),
        ("patch apply bert bert/model.safetensors -o p", "is not a patch"),
        ("patch apply bert nothing -o p", "nothing"),
        ("patch info .", ". is a folder; give the path of a file"),
        ("patch apply bert . -o p", ". is a folder; give the path of a file"),
        ("patch info p --largest -1", "--largest must be at least 0"),
        ("patch merge one -o p", "give at least two patches, got 1"),
        ("train cifar10 --seed -1", "seed must be at least 0"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(
    line: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("bert", "silent")
    for path in Path("silent").glob("tokenizer*"):
        path.unlink()
    Path("texts.txt").write_text("good\nbad\n")
    Path("binary").write_bytes(b"a\xff\n")
    Path("latin.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    Path("nowhere").symlink_to("gone")
    state = load_file("bert/model.safetensors")
    shutil.copytree("bert", "BERT")
    save_file(state | {"head.weight": torch.zeros(2, 4)}, "BERT/model.safetensors")
    assert message in refused(line, capsys)


def test_p_close_to_1_has_a_reach() -> None:
    assert default_reach(1 + 1e-15) == default_reach(1.03) == 1.5
