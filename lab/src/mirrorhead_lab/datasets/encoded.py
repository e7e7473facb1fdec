"""Texts as numbers of WordPiece tokens, encoded once, kept on disk and mapped into memory."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from mirrorhead._files import new_folder, sha256_of, write_json
from mirrorhead_lab.datasets.sources import (
    Folder,
    cache_root,
    locate,
    publish,
    published_sha256,
)
from mirrorhead_lab.datasets.texts import Texts, check_content, read_text
from mirrorhead_lab.runtime.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNK, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
MOST_TOKENS = 1 << 16  # they are stored in two bytes
FORMAT = 2
CHUNK = 1_000

# Apache-2.0; cite Devlin et al. 2019.
publish(
    "bert",
    "bert-uncased",
    "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/",
    "vocab.txt 231508 07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
)


def load_tokenizer(
    folder: Folder = None, *, max_length: int = 512, download: bool = False, partial: bool = False
) -> Tokenizer:
    """Return the uncased tokenizer of BERT, from bert-uncased/vocab.txt; [PAD] is 0.

    Args:
        folder, download: as in `load_imdb`.
        max_length: longer texts are cut, [CLS] and [SEP] counted.
        partial: accept another vocabulary than the published one.
    """
    path = locate("bert", folder, download=download) / "vocab.txt"
    text = read_text(path)
    check_content(path, text.encode(), published_sha256("bert", path.name), partial)
    return wordpiece(text.splitlines(), max_length, str(path))


def wordpiece(vocabulary: list[str], max_length: int = 512, where: str = "vocabulary") -> Tokenizer:
    """Return a WordPiece tokenizer in lower case that reads HTML line breaks as spaces.

    >>> tokenizer = wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "film", "##s"])
    >>> tokenizer.encode("A<br />films").tokens
    ['[CLS]', 'a', 'film', '##s', '[SEP]']
    """
    from tokenizers import Tokenizer, normalizers
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer, Replace
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    numbers = {word: i for i, word in enumerate(vocabulary)}
    missing = [word for word in (PAD, UNK, CLS, SEP) if word not in numbers]
    if missing or len(numbers) != len(vocabulary) or len(numbers) > MOST_TOKENS:
        raise DataError(
            f"{where} is not a WordPiece vocabulary: {len(vocabulary):,} entries,"
            f" {len(vocabulary) - len(numbers)} of them twice, missing:"
            f" {', '.join(missing) or 'none'}"
        )
    if numbers[PAD] != 0:
        raise DataError(f"{where}: {PAD} must come first, it is number {numbers[PAD]}")
    if max_length < 3:
        raise ValueError(f"max_length must be at least 3, got {max_length}")
    tokenizer = Tokenizer(WordPiece(numbers, unk_token=UNK))
    tokenizer.normalizer = normalizers.Sequence([Replace("<br />", " "), BertNormalizer()])
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{CLS} $A {SEP}", special_tokens=[(CLS, numbers[CLS]), (SEP, numbers[SEP])]
    )
    tokenizer.enable_truncation(max_length)
    return tokenizer


@dataclass(frozen=True)
class _About:
    """about.json; the checksum is of ids, starts and labels, one after the other."""

    key: str
    texts: int
    tokens: int
    vocabulary: int
    sha256: str


@dataclass(frozen=True, repr=False, eq=False)
class Encoded:
    """Token numbers of many texts, one after the other; text i is ids[starts[i]:starts[i+1]]."""

    ids: np.ndarray  # (all tokens,), uint16, mapped
    starts: np.ndarray  # (n + 1,), int64
    labels: np.ndarray  # (n,), int64
    vocabulary: int

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Encoded({len(self):,} texts, {len(self.ids):,} tokens)"

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.starts[i] : self.starts[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens, padded with 0 to the longest of the batch, and labels: (b, T), (b,)."""
        rows = [self[int(i)] for i in indices]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        labels = self.labels[np.asarray(indices, dtype=np.int64)]
        return torch.from_numpy(ids), torch.from_numpy(labels)


def encode(texts: Texts, tokenizer: Tokenizer, cache: str | Path | None = None) -> Encoded:
    """Encode texts, or open what was made of the same texts by the same tokenizer before.

    Args:
        tokenizer: of `load_tokenizer` or `wordpiece`.
        cache: the folder of everything encoded; $MIRRORHEAD_CACHE or the user's cache if None.
    """
    if tokenizer.token_to_id(PAD) != 0:
        raise ValueError(f"tokenizer must have {PAD} as number 0")
    if not len(texts):
        raise ValueError("texts must not be empty")
    # The name of the folder changes with everything that changes the result.
    about = f"mirrorhead {FORMAT}\n{tokenizer.to_str()}\n".encode()
    contents = (text.encode() for text in texts.texts)
    parts = (part for text in contents for part in (len(text).to_bytes(8, "little"), text))
    key = sha256_of(about, texts.labels.astype("<i8").tobytes(), *parts)[:32]
    folder = (cache_root() / "encoded" if cache is None else Path(cache)) / key
    if not folder.is_dir():
        with new_folder(folder, shared=True) as fresh:
            _write(texts, tokenizer, key, fresh)
    return _open(folder, key)


def _write(texts: Texts, tokenizer: Tokenizer, key: str, folder: Path) -> None:
    starts = np.zeros(len(texts) + 1, dtype=np.int64)
    digest = hashlib.sha256()
    with (folder / "ids.u16").open("wb") as file:
        for begin in range(0, len(texts), CHUNK):
            found = tokenizer.encode_batch_fast(list(texts.texts[begin : begin + CHUNK]))
            for i, one in enumerate(found, start=begin):
                starts[i + 1] = starts[i] + len(one.ids)
            content = np.array([i for one in found for i in one.ids], dtype="<u2").tobytes()
            digest.update(content)
            file.write(content)
    np.save(folder / "starts.npy", starts)
    np.save(folder / "labels.npy", texts.labels)
    digest.update(starts.tobytes() + texts.labels.tobytes())
    size, sha256 = tokenizer.get_vocab_size(), digest.hexdigest()
    about = _About(key, len(texts), int(starts[-1]), size, sha256)
    write_json(folder / "about.json", dataclasses.asdict(about))


def _open(folder: Path, key: str) -> Encoded:
    """Map the files into memory, after a check of their sizes and their checksum."""
    remedy = f"delete {folder}, and it will be made again"
    try:
        about = msgspec.json.decode((folder / "about.json").read_bytes(), type=_About)
        starts = np.load(folder / "starts.npy", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        ids = np.memmap(folder / "ids.u16", dtype="<u2", mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{folder} is damaged ({error}): {remedy}") from error
    shapes = (len(ids), starts.shape, labels.shape, starts.dtype, labels.dtype)
    if (
        about.key != key
        or shapes != (about.tokens, (about.texts + 1,), (about.texts,), np.int64, np.int64)
        or sha256_of(ids.data, starts.tobytes(), labels.tobytes()) != about.sha256
    ):
        raise DataError(f"{folder} is damaged (it does not have its checksum): {remedy}")
    return Encoded(ids, starts, labels, about.vocabulary)
