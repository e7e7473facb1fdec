"""Attention compared with human rationales (ERASER) and with edits that flip the label (CAD).

What is scored was fixed before any test set was read: the attention of [CLS] in the last layer,
mean over heads. The same code scores the baselines: random scores, and gradient times input.
Other layers and heads, and attention rollout, are available for inspection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mirrorhead.lab.datasets.reviews import Pairs, Rationales, edited
from mirrorhead.lab.evaluation.attention_reading import pick, rollout
from mirrorhead.lab.evaluation.results import EditScores, RationaleScores
from mirrorhead.lab.evaluation.token_metrics import (
    average_precision,
    iou_f1,
    mass,
    token_f1,
    top,
    word_scores,
)
from mirrorhead.lab.models.attention_maps import all_rows, attention_maps, evaluating

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

#: From token numbers of texts, (b, T), 0 for padding, to a score of at least 0 for each, (b, T).
Scorer = Callable[[Tensor], np.ndarray]


def cls_attention(model: nn.Module, layer: int = -1, heads: Sequence[int] | None = None) -> Scorer:
    """Score tokens by the attention of [CLS]; default: last layer, mean over heads."""

    def score(ids: Tensor) -> np.ndarray:
        maps = attention_maps(model, ids)
        weights = pick(maps, layer, heads)[:, :, 0]  # (b, heads, T)
        return weights.mean(dim=1).double().numpy()

    return score


def attention_rollout(model: nn.Module) -> Scorer:
    """Score tokens by attention rollout to [CLS] through all layers; see `rollout`."""

    def score(ids: Tensor) -> np.ndarray:
        with all_rows(model):
            return rollout(attention_maps(model, ids))[:, 0].double().numpy()

    return score


def gradient_times_input(model: nn.Module, embedding: nn.Module) -> Scorer:
    """Score tokens by |gradient of the predicted class's logit . embedding|.

    Args:
        model: from token numbers to logits.
        embedding: the module of the model that embeds tokens, such as `model.tokens`.
    """

    def score(ids: Tensor) -> np.ndarray:
        kept: list[Any] = []
        handle = embedding.register_forward_hook(lambda _, __, out: kept.append(out))
        try:
            with evaluating(model):
                logits = model(ids)  # (b, classes)
        finally:
            handle.remove()
        # Texts do not interact, so the gradient of the sum holds the gradient of each.
        (gradient,) = torch.autograd.grad(logits.max(dim=1).values.sum(), kept[0])
        return (gradient * kept[0]).sum(dim=-1).detach().abs().double().numpy()

    return score


class AtRandom:
    """A scorer that knows nothing: uniform random numbers, one per token or one per word.

    Sums over the pieces of a word would prefer long words, which are marked more often.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, ids: Tensor) -> np.ndarray:
        return self._rng.random(tuple(ids.shape))

    def words(self, count: int) -> np.ndarray:
        """Return the scores of `count` words."""
        return self._rng.random(count)


def at_random(seed: int = 0) -> AtRandom:
    """Return a scorer that knows nothing."""
    return AtRandom(seed)


def score_rationales(
    model: nn.Module, scorer: Scorer, rationales: Rationales, tokenizer: Tokenizer, share: float
) -> RationaleScores:
    """Return how well the scorer finds the words that people marked.

    A document longer than the tokenizer's max_length is read in windows, as few and as even as
    can be, so that every word has a score: the scores of its pieces, added up. For the measures
    that need a choice, the `share` of words with the highest scores is chosen: take the share
    marked in training. Comprehensiveness is how much the probability of the predicted class
    falls without the chosen words, sufficiency how much it falls with them alone; the
    probability for a document is the mean over its windows. Documents with nothing marked are
    left out.
    """
    rows = []
    for words, marked in zip(rationales.words, rationales.marked, strict=True):
        if not marked.any():
            continue
        windows = _windows(words, tokenizer)
        scores = _scores_of_words(scorer, windows, len(words))
        chosen = top(scores, share)
        before = _probabilities(model, [ids for ids, _ in windows])
        best = int(before.argmax())
        without, alone = (
            _probabilities(model, [_kept(*window, keep) for window in windows])
            for keep in (~chosen, chosen)
        )
        rows.append(
            (
                average_precision(scores, marked),
                token_f1(chosen, marked),
                iou_f1(chosen, marked),
                float(before[best] - without[best]),
                float(before[best] - alone[best]),
                float(marked.mean()),
            )
        )
    if not rows:
        raise ValueError("rationales has no document with anything marked")
    return RationaleScores(len(rows), *np.mean(rows, axis=0).tolist())


def _scores_of_words(scorer: Scorer, windows: Sequence[Window], count: int) -> np.ndarray:
    if isinstance(scorer, AtRandom):
        return scorer.words(count)
    given = scorer(_padded([ids for ids, _ in windows]))
    scores = np.zeros(count)
    for (ids, places), row in zip(windows, given, strict=True):
        scores += word_scores(row[: len(ids)], places, count)
    return scores


def score_edits(scorer: Scorer, pairs: Pairs, tokenizer: Tokenizer) -> EditScores:
    """Return how well the scorer finds the tokens of originals that were edited to flip the label.

    [CLS] and [SEP] are not candidates. Whole texts are compared: cut ones would show what a longer
    revision pushed out as edited. Pairs in which nothing was changed before the original is cut
    off are left out. A scorer that gives 0 to a whole text is taken as flat there.
    """
    rows = []
    for one, two in zip(pairs.original.texts, pairs.revision.texts, strict=True):
        original, revision = tokenizer.encode(one), tokenizer.encode(two)
        read = len(original.ids) - 2
        changed = edited(_whole(original), _whole(revision))[0][:read]
        if not changed.any():
            continue
        scores = scorer(torch.tensor([original.ids]))[0, 1:-1]
        scores = scores if scores.any() else np.ones_like(scores)
        rows.append(
            (average_precision(scores, changed), mass(scores, changed), float(changed.mean()))
        )
    if not rows:
        raise ValueError("pairs has no pair with an edit")
    return EditScores(len(rows), *np.mean(rows, axis=0).tolist())


def _whole(found: Encoding) -> list[int]:
    """Token numbers of a text, those beyond max_length too, without [CLS] and [SEP]."""
    return [i for part in (found, *found.overflowing) for i in part.ids[1:-1]]


#: Token numbers of a part of a document, and the word that each is a piece of ([CLS]: None).
Window = tuple[list[int], list[int | None]]


def _windows(words: Sequence[str], tokenizer: Tokenizer) -> list[Window]:
    """A document in the least number of parts that the model can read, as long as each other."""
    found = tokenizer.encode(list(words), is_pretokenized=True)
    parts = [found, *found.overflowing]
    first, last = found.ids[0], found.ids[-1]  # [CLS], [SEP]
    pieces = [
        (token, word)
        for part in parts
        for token, word in zip(part.ids, part.word_ids, strict=True)
        if word is not None
    ]
    cuts = np.linspace(0, len(pieces), len(parts) + 1).round().astype(int)
    return [
        (
            [first, *(token for token, _ in pieces[a:b]), last],
            [None, *(word for _, word in pieces[a:b]), None],
        )
        for a, b in pairwise(cuts)
    ]


def _kept(ids: list[int], places: list[int | None], keep: np.ndarray) -> list[int]:
    """A window with the words to keep alone, [CLS] and [SEP] always."""
    return [i for i, word in zip(ids, places, strict=True) if word is None or keep[word]]


@torch.no_grad()
def _probabilities(model: nn.Module, windows: Sequence[list[int]]) -> Tensor:
    """Of each class, mean over windows: (classes,)."""
    with evaluating(model):
        return model(_padded(windows)).softmax(dim=1).mean(dim=0)


def _padded(windows: Sequence[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(ids) for ids in windows], batch_first=True)
