"""SST-2 (Socher et al. 2013): sentences of film reviews, with the published split."""

from mirrorhead_lab.datasets.kim import sentences

DATA_SET = sentences(
    "sst2",
    ("negative", "positive"),
    "stsa.binary.train",
    6_920,
    validation="stsa.binary.dev",
    test="stsa.binary.test",
    encoding="utf-8",
)
