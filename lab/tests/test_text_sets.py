"""Data sets by name, from a file, and from a stranger's module; commands take any of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from data_slices import make_bert, make_imdb
from mirrorhead_lab.cli.main import main
from mirrorhead_lab.datasets import NAMES, SOURCES, DataError, Texts, find, fingerprint_of
from mirrorhead_lab.training import load_run
from tiny_bert import toy_texts

STRANGER = '''
"""Which films are long."""

import numpy as np

from mirrorhead_lab.datasets import DataSet, Splits, Texts, split_texts


def load(root, partial):
    lines = (root / "films.txt").read_text().splitlines()
    labels = np.array([len(line) % 3 for line in lines])
    return split_texts("films", ("short", "long", "endless"), Texts(tuple(lines), labels))


DATA_SET = DataSet(name="films", kind="text", load=load)
'''


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "data"
    make_bert(root)
    make_imdb(root, per_folder=40)
    (root / "sentences").mkdir()
    lines = "\n".join(f"{i % 6} the film number {i}" for i in range(120))
    (root / "sentences" / "TREC.train.all").write_text(lines)
    (root / "sentences" / "TREC.test.all").write_text(lines)
    (root / "films.txt").write_text("\n".join("a film " * (1 + i % 9) + str(i) for i in range(90)))
    monkeypatch.setenv("MIRRORHEAD_DATA", str(root))
    monkeypatch.setenv("MIRRORHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "long_films.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    toy_texts(tmp_path / "own.csv")
    return root


def test_every_data_set_is_found_by_its_name() -> None:
    for name in NAMES:
        found = find(name)
        assert found.name == name and {*found.sources} <= {*SOURCES}


@pytest.mark.parametrize("name", ["mnist", "", ".imdb", "json.nothing"])
def test_an_unknown_data_set_is_told_with_the_known_ones(name: str) -> None:
    with pytest.raises(DataError, match=r"imdb, .*sst2, .*a \.csv or \.jsonl file, or a module"):
        find(name)
    with pytest.raises(TypeError, match="json has no DATA_SET = DataSet"):
        find("json")


@pytest.mark.parametrize(
    ("name", "folder", "classes"),
    [
        ("trec", "trec", 6),
        ("own.csv", "own", 2),
        ("long_films", "films", 3),
    ],
)
def test_any_text_set_is_trained_on(
    data: Path, capsys: Any, name: str, folder: str, classes: int
) -> None:
    line = f"train {name} --optimizer sgd --lr 0.1 --epochs 1 --partial"
    assert main(line.split()) == 0
    path = Path(f"runs/laptop-{folder}-sgd-lr0.1-seed0")
    assert f"run: {path}" in capsys.readouterr().out
    run = load_run(path)
    assert len(run.preset.classes) == classes and run.preset.data == name
    assert run.model.get_parameter("head.weight").shape == (classes, 64)
    # Commands that read the run know its classes and its data.
    assert main(["attention", str(path), "a film", "--partial"]) == 0
    told = capsys.readouterr().out
    assert any(word in told for word in run.preset.classes)
    assert main(["evaluate", str(path), "--on", "test", "--partial"]) == 0
    score = json.loads((path / "test.json").read_text())
    measured = json.loads((path / "measures.json").read_text())["measures"]["test"]
    assert measured["accuracy"] == pytest.approx(score["accuracy"])


def test_the_test_set_alone_is_that_of_the_three(data: Path) -> None:
    whole, alone = find("trec").read(partial=True).test, find("trec").read_test(partial=True)
    assert isinstance(alone, Texts) and alone.texts == whole.texts


# --- files ------------------------------------------------------------------------------------


def test_kims_files(tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    folder.mkdir()
    lines = [f"{i % 6} question number {i} caf\xe9" for i in range(200)]
    (folder / "TREC.train.all").write_bytes("\n".join(lines).encode("latin-1"))
    (folder / "TREC.test.all").write_bytes(b"3 Who was Galileo ?\n")
    found = find("trec").read(tmp_path, partial=True)
    assert found.test.texts == ("Who was Galileo ?",)
    assert found.classes[found.test.labels[0]] == "person"
    assert len(found.train) + len(found.validation) == 200
    assert found.train.texts[0].endswith("caf\xe9")
    with pytest.raises(DataError, match="expected 5,452"):
        find("trec").read(tmp_path)
    (folder / "TREC.test.all").write_bytes(b"6 no such class\n")
    with pytest.raises(DataError, match="line 1: not a label below 6"):
        find("trec").read(tmp_path, partial=True)


def test_copies_of_a_text_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"text": f"text {i % 40}", "label": i % 2} for i in range(120)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = find(str(tmp_path / "own.jsonl")).read()
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
def test_own_files_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        find(str(tmp_path / "own.csv")).read()


def test_long_texts_odd_lines_and_any_language(tmp_path: Path) -> None:
    texts = [
        f"\u0445\u043e\u0440\u043e\u0448\u043e {chr(0x430 + i % 30) * (i + 1)}" for i in range(99)
    ]
    texts += ["long " * 30_000, "one\u2028two"]
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(texts)]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "own.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    with (tmp_path / "own.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["label", "text"])
        writer.writeheader()
        writer.writerows(rows)
    one, two = (find(str(tmp_path / f"own.{kind}")).read() for kind in ("jsonl", "csv"))
    assert fingerprint_of(one) == fingerprint_of(two)
    parts = (one.train, one.validation, one.test)
    assert sorted(text for part in parts for text in part.texts) == sorted(texts)
    assert min(map(len, parts)) >= 3


def test_half_a_character(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(r'{"text": "a \ud800", "label": 1}')
    with pytest.raises(DataError, match="line 1: the text holds half a character"):
        find(str(tmp_path / "own.jsonl")).read()


def test_lines_that_are_not_json(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"text": "fine", "label": 1}\nno\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        find(str(tmp_path / "own.jsonl")).read()
