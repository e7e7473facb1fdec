"""A random BERT that is small enough to be trained in a test, and texts for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

WORDS = ["good", "fine", "grand", "bad", "dull", "poor", "film", "plot", "cast", "the", "a"]


def tiny_bert(folder: Path) -> Path:
    """Write a BERT of two small blocks and its vocabulary in Hugging Face's format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import BertProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    words = Tokenizer(WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def toy_texts(file: Path) -> Path:
    """Write 300 sentences as CSV; one word of each says which class it has."""
    rng = np.random.default_rng(0)
    lines = ["text,label"]
    for i in range(300):
        kind = i % 2
        word = WORDS[3 * kind + rng.integers(3)]
        others = rng.choice(WORDS[6:], 4)
        lines.append(f"{' '.join([*others, word])} ,{('yes', 'no')[kind]}")
    file.write_text("\n".join(lines))
    return file
