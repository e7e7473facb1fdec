"""CIFAR-10 (Krizhevsky 2009), binary version: 50,000 + 10,000 pictures of 32 x 32.

The folder is cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin; a record is one byte of
label and 3 x 32 x 32 bytes of red, green and blue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mirrorhead_lab.datasets.dataset import DataSet
from mirrorhead_lab.datasets.sources import locate, publish
from mirrorhead_lab.datasets.texts import Splits, check_content, check_count, check_split
from mirrorhead_lab.runtime.errors import DataError

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
PER_FILE = 10_000
#: Of all records of a split, in the order of its files.
SHA256 = {
    "train": "a0181da372c0d63a5920fdbea2ec3f83ecbc552d378218e1cb473cf634941a3b",
    "test": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
RECORD = 1 + 3 * 32 * 32
#: The last training images are the validation set.
VALIDATION = 5_000
#: Of the training pictures, by channel, on a scale from 0 to 1.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

publish(
    "cifar10",
    "cifar-10-batches-bin",
    "https://www.cs.toronto.edu/~kriz/",
    "cifar-10-binary.tar.gz 170052171"
    " c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


@dataclass(frozen=True, repr=False, eq=False)
class Pictures:
    """Pictures, as bytes, and their classes."""

    pixels: np.ndarray  # (n, 3, 32, 32), uint8
    labels: np.ndarray  # (n,), int64

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Pictures({len(self):,} of 32 x 32)"

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Pictures with mean 0 and deviation 1 by channel, and labels: (b, 3, 32, 32), (b,)."""
        places = np.asarray(indices, dtype=np.int64)
        pixels, labels = (torch.from_numpy(part[places]) for part in (self.pixels, self.labels))
        mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
        return (pixels.float() / 255 - mean) / std, labels


def load_cifar10(
    split: str, folder: str | Path | None = None, *, download: bool = False, partial: bool = False
) -> Pictures:
    """Pictures of one split ("train" or "test"); arguments as in `load_imdb`."""
    check_split(split, FILES)
    root = locate("cifar10", folder, download=download)
    records = np.concatenate([_read(root / name, partial) for name in FILES[split]])
    check_content(root, records.tobytes(), SHA256[split], partial)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32)
    return Pictures(np.ascontiguousarray(pixels), records[:, 0].astype(np.int64))


def _read(path: Path, partial: bool) -> np.ndarray:
    """The records of one file, (n, RECORD)."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) % RECORD:
        raise DataError(
            f"{path} has {len(content):,} bytes, no multiple of {RECORD:,}: it is cut short"
        )
    records = content.reshape(-1, RECORD)
    check_count(f"pictures in {path}", len(records), PER_FILE, partial)
    bad = np.flatnonzero(records[:, 0] >= len(CLASSES))
    if len(bad):
        raise DataError(f"{path}: picture {bad[0]} has label {records[bad[0], 0]}, not 0 to 9")
    return records


def load(root: Path, partial: bool) -> Splits[Pictures]:
    """Return the three sets."""
    whole, test = (load_cifar10(split, root, partial=partial) for split in ("train", "test"))
    split = len(whole) - min(VALIDATION, len(whole) // 2)
    train = Pictures(whole.pixels[:split], whole.labels[:split])
    validation = Pictures(whole.pixels[split:], whole.labels[split:])
    return Splits("cifar10", CLASSES, train, validation, test)


DATA_SET = DataSet(
    name="cifar10",
    kind="images",
    sources=("cifar10",),
    load=load,
    load_test=lambda root, partial: load_cifar10("test", root, partial=partial),
)
