"""CR (Hu and Liu 2004): sentences of customer reviews, positive or negative."""

from mirrorhead_lab.datasets.kim import sentences

DATA_SET = sentences(
    "cr",
    ("negative", "positive"),
    "custrev.all",
    3_771,
)
