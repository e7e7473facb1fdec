"""Subj (Pang and Lee 2004): sentences about films, subjective or objective."""

from mirrorhead_lab.datasets.kim import sentences

DATA_SET = sentences(
    "subj",
    ("subjective", "objective"),
    "subj.all",
    10_000,
)
