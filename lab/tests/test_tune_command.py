"""`mirrorhead tune` on a tiny random BERT: table, patch, and the scored model to the bit."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorhead._files import write_json
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.datasets import DataError, load_own_sentences, load_sentences
from mirrorhead_lab.models.pretrained import PretrainedClassifier, Tokens, accuracy
from mirrorhead_lab.training.run_folder import locked_folder
from tiny_bert import tiny_bert, toy_texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return toy_texts(tmp_path / "own.csv")


def tune(texts: Path, base: Path, out: Path, *options: str) -> int:
    return main(["tune", str(texts), "--base", str(base), "--out", str(out), *options])


@pytest.mark.slow
def test_the_patch_gives_the_scored_model_and_the_base_back(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(texts, base, tmp_path / "run", "--keep", "0.1", "--epochs", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    shares = [row["share"] for row in result["table"]]
    assert shares == sorted(shares, reverse=True) and 0.1 in shares
    patch = tmp_path / "run" / "patch.safetensors"
    assert result["patch"]["bytes"] == patch.stat().st_size
    command = ["patch", "apply", str(base), str(patch), "-o", str(tmp_path / "tuned"), "--verify"]
    assert main(command) == 0
    # Another size needs no more training: all tuned weights are kept.
    tuned, row = tmp_path / "run" / "tuned.safetensors", result["table"][1]
    command = ["patch", "make", str(base), str(tuned), "--count", str(row["changed"])]
    assert main([*command, "--whole", "head.*", "-o", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other").stat().st_size == row["bytes"]
    # The model in the written folder scores what the table says.
    state = load_file(tmp_path / "tuned" / "model.safetensors")
    model = PretrainedClassifier(base, 2)
    model.load_tuned(state)
    task = load_own_sentences(texts)
    tokens = Tokens(base, task.test.texts, task.test.labels, 32)
    assert accuracy(model, tokens) == result["patch"]["test"]
    command = ["patch", "revert", str(tmp_path / "tuned"), str(patch)]
    assert main([*command, "-o", str(tmp_path / "again"), "--verify"]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        base / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_it_learns_and_prints_a_table(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--p", "1.3", "--reach", "1", "--epochs", "15", "--batch-size", "16"]
    assert tune(texts, base, tmp_path / "run", *options, "--keep", "0.05") == 0
    printed = capsys.readouterr().out
    assert "0.05 *" in printed and "patch:" in printed and "another size:" in printed
    table = json.loads((tmp_path / "run" / "table.json").read_text())["table"]
    assert table[0]["validation"] > 0.9


@pytest.mark.slow
def test_the_same_command_gives_the_same_patch(texts: Path, base: Path, tmp_path: Path) -> None:
    for name in "ab":
        assert tune(texts, base, tmp_path / name, "--epochs", "1", "--texts", "64") == 0
    files = [tmp_path / name / "patch.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


class Stop(Exception):
    pass


def stop(*args: object, **kwargs: object) -> None:
    raise Stop


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the second epoch", "the patch", "the table"])
def test_an_interrupted_run_resumes_to_the_bit(
    where: str, texts: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = ["--epochs", "2", "--texts", "96"]
    assert tune(texts, base, tmp_path / "whole", *options) == 0
    steps: list[str] = []

    def advance(bars: object, name: str) -> None:
        steps.append(name)
        if len(steps) > 96 // 32:
            raise Stop

    def write_but_the_table(path: Path, content: object) -> None:
        if path.name == "table.json":
            raise Stop
        write_json(path, content)

    stops = {
        "the second epoch": ("mirrorhead_lab.runtime.progress.ProgressBars.advance", advance),
        "the patch": ("mirrorhead.patches.Patch.save", stop),
        "the table": ("mirrorhead_lab.cli.tune.write_json", write_but_the_table),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*stops[where])
        with pytest.raises(Stop):
            tune(texts, base, tmp_path / "run", *options)
    assert not (tmp_path / "run" / "table.json").exists()
    capsys.readouterr()
    assert tune(texts, base, tmp_path / "run", *options) == 0
    first = capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    for name in ("patch.safetensors", "table.json", "metrics.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # A finished run is shown again; nothing is computed.
    monkeypatch.setattr("mirrorhead_lab.training.tuning.fine_tune", stop)
    assert tune(texts, base, tmp_path / "run", *options) == 0
    shown = capsys.readouterr().out
    assert "patch:" in shown and first.endswith(shown)


@pytest.mark.slow
def test_a_folder_that_is_not_this_run_is_left_alone(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    assert tune(texts, base, own) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    (own / "settings.json").write_text('{"p": 1.5}')
    assert tune(texts, base, own) == 2
    assert "holds a run with another task" in capsys.readouterr().err
    assert (own / "settings.json").read_text() == '{"p": 1.5}'
    assert sorted(path.name for path in own.iterdir()) == ["notes.txt", "settings.json"]


def test_a_folder_in_use_is_refused(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked_folder(tmp_path / "run"):
        assert tune(texts, base, tmp_path / "run") == 2
    assert "is in use by another process" in capsys.readouterr().err


@pytest.mark.slow
def test_other_texts_or_weights_under_the_same_names_are_another_run(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "base"
    shutil.copytree(base, own)
    options = ["--epochs", "1", "--texts", "64"]
    assert tune(texts, own, tmp_path / "run", *options) == 0
    table = (tmp_path / "run" / "table.json").read_bytes()
    weights = load_file(own / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, own / "model.safetensors")
    capsys.readouterr()
    assert tune(texts, own, tmp_path / "run", *options) == 2
    assert "holds a run with another content of the base" in capsys.readouterr().err
    texts.write_text(texts.read_text().replace("good", "bad"))
    assert tune(texts, base, tmp_path / "run", *options) == 2
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    assert tune(texts, own, tmp_path / "run", *options) == 2
    assert "holds a run with another content of the data" in capsys.readouterr().err
    assert (tmp_path / "run" / "table.json").read_bytes() == table


@pytest.mark.slow
def test_a_base_in_bf16(
    texts: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel

    half = tmp_path / "half"
    shutil.copytree(base, half)
    AutoModel.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    assert tune(texts, half, tmp_path / "run", "--epochs", "1", "--texts", "64") == 0
    patch = str(tmp_path / "run" / "patch.safetensors")
    for action, source, out in (("apply", half, "tuned"), ("revert", tmp_path / "tuned", "again")):
        command = ["patch", action, str(source), patch, "-o", str(tmp_path / out), "--verify"]
        assert main(command) == 0
    files = [folder / "model.safetensors" for folder in (half, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    # Before it trains, the command refuses a folder whose two files contradict each other.
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    capsys.readouterr()
    assert tune(texts, half, tmp_path / "other") == 2
    assert "by the dtype in config.json" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--p", "1"], "p must be above 1"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--max-length", "2"], "--max-length must be above 2"),
        (["--reach", "0"], "reach must be above 0"),
        (["--keep", "0"], "--keep must be above 0"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--base", "nothing"], "nothing does not exist"),
    ],
)
def test_wrong_use_is_one_line(
    options: list[str], message: str, texts: Path, base: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert tune(texts, base, tmp_path / "run", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("mirrorhead: ") and error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_texts_with_more_tokens_than_the_base_has_positions(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'good ' * 40}{i},{i % 2}" for i in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label", *lines]))
    assert tune(tmp_path / "own.csv", base, tmp_path / "run", "--max-length", "64") == 2
    assert "--max-length must be at most 32" in capsys.readouterr().err


class TestSentences:
    def test_kims_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "sentences"
        folder.mkdir()
        lines = [f"{i % 6} question number {i} caf\xe9" for i in range(200)]
        (folder / "TREC.train.all").write_bytes("\n".join(lines).encode("latin-1"))
        (folder / "TREC.test.all").write_bytes(b"3 Who was Galileo ?\n")
        found = load_sentences("trec", tmp_path, partial=True)
        assert found.test.texts == ("Who was Galileo ?",)
        assert found.classes[found.test.labels[0]] == "person"
        assert len(found.train) + len(found.validation) == 200
        assert found.train.texts[0].endswith("caf\xe9")
        with pytest.raises(DataError, match="expected 5,452"):
            load_sentences("trec", tmp_path)
        (folder / "TREC.test.all").write_bytes(b"6 no such class\n")
        with pytest.raises(DataError, match="line 1: not a label below 6"):
            load_sentences("trec", tmp_path, partial=True)
        with pytest.raises(ValueError, match="sst2, trec, subj, cr"):
            load_sentences("mpqa", tmp_path)

    def test_copies_of_a_text_are_on_one_side(self, tmp_path: Path) -> None:
        rows = [{"text": f"text {i % 40}", "label": i % 2} for i in range(120)]
        (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found = load_own_sentences(tmp_path / "own.jsonl")
        sides = [set(part.texts) for part in (found.train, found.validation, found.test)]
        assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])
        assert sum(map(len, (found.train, found.validation, found.test))) == 120

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("text,label\nfine,\n", "line 2: each line needs a text and a label"),
            ("sentence,kind\nfine,yes\n", "it names 'sentence', 'kind'"),
            ("text,label\nfine,yes\ngood,yes\n", "has 1 classes"),
            ("", "the first line must name the columns text and label; the file is empty"),
            ("Text,Label\nfine,yes\n", r"own\.csv: the first line must name the columns"),
            ("fine,yes\nbad,no\n", "columns text and label; it names 'fine', 'yes'"),
            ("text;label\nfine;yes\n", "it names 'text;label'"),
            ("text,label\n", "has 0 classes"),
            ("text,label\nfine,yes\nbad,no\n", "too few for three sets"),
            ("text,label\nfine, if long,yes\n", "line 2: more fields than the first line names"),
            ('text,label\nfine,yes\n"bad,no\n', "after line 2: not CSV"),
            ("text,label\na,1\nb,2\nc,3\nd,4\n", "has 4 classes for 4 texts"),
            ("text,label\nfine, yes\nbad,yes\n", "has 1 classes"),
        ],
    )
    def test_own_files_that_cannot_be_used(
        self, content: str, message: str, tmp_path: Path
    ) -> None:
        (tmp_path / "own.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            load_own_sentences(tmp_path / "own.csv")

    def test_long_texts_odd_lines_and_any_language(self, tmp_path: Path) -> None:
        texts = [
            f"\u0445\u043e\u0440\u043e\u0448\u043e {chr(0x430 + i % 30) * (i + 1)}"
            for i in range(99)
        ]
        texts += ["long " * 30_000, "one\u2028two"]
        rows = [{"text": text, "label": i % 2} for i, text in enumerate(texts)]
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        (tmp_path / "own.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
        with (tmp_path / "own.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["label", "text"])
            writer.writeheader()
            writer.writerows(rows)
        one, two = (load_own_sentences(tmp_path / f"own.{kind}") for kind in ("jsonl", "csv"))
        assert one.fingerprint() == two.fingerprint()
        parts = (one.train, one.validation, one.test)
        assert sorted(text for part in parts for text in part.texts) == sorted(texts)
        assert min(map(len, parts)) >= 3

    def test_half_a_character(self, tmp_path: Path) -> None:
        (tmp_path / "own.jsonl").write_text(r'{"text": "a \ud800", "label": 1}')
        with pytest.raises(DataError, match="line 1: the text holds half a character"):
            load_own_sentences(tmp_path / "own.jsonl")

    def test_lines_that_are_not_json(self, tmp_path: Path) -> None:
        (tmp_path / "own.jsonl").write_text('{"text": "fine", "label": 1}\nno\n')
        with pytest.raises(DataError, match="line 2: not JSON"):
            load_own_sentences(tmp_path / "own.jsonl")
