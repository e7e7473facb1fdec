"""WordPiece: texts to token numbers, [CLS] first and [SEP] last."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mirrorhead.lab.datasets.reviews import check_content, read_text
from mirrorhead.lab.datasets.sources import locate, published_sha256
from mirrorhead.lab.runtime.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNK, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
MOST_TOKENS = 1 << 16  # they are stored in two bytes


def load_tokenizer(
    folder: str | Path | None = None,
    *,
    max_length: int = 512,
    download: bool = False,
    partial: bool = False,
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
