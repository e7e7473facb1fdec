"""TREC (Li and Roth 2002): questions by what they ask for, with the published test set."""

from mirrorhead_lab.datasets.kim import sentences

DATA_SET = sentences(
    "trec",
    ("description", "entity", "abbreviation", "person", "place", "number"),
    "TREC.train.all",
    5_452,
    test="TREC.test.all",
)
