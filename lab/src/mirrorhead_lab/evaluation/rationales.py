"""Attention compared with human rationales (ERASER) and with edits that flip the label (CAD).

What is scored was fixed before any test set was read: the attention of [CLS] in the last layer,
mean over heads. The same code scores the baselines: random scores, and gradient times input.
Other layers and heads, and attention rollout, are available for inspection.

The metrics compare a score per token with the tokens that people marked or edited. Every document
has the same weight; test and validation of ERASER are marked in different ways and are never
pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mirrorhead_lab.datasets import Pairs, Rationales, edited
from mirrorhead_lab.evaluation.attention_reading import rollout
from mirrorhead_lab.evaluation.results import EditScores, RationaleScores
from mirrorhead_lab.models.attention_maps import all_rows, attention_maps, evaluating

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

#: From token numbers of texts, (b, T), 0 for padding, to a score of at least 0 for each, (b, T).
Scorer = Callable[[Tensor], np.ndarray]


def cls_attention(model: nn.Module, layer: int = -1, heads: Sequence[int] | None = None) -> Scorer:
    """Score tokens by the attention of [CLS]; default: last layer, mean over heads."""

    def score(ids: Tensor) -> np.ndarray:
        maps = attention_maps(model, ids)
        last = len(maps) - 1
        if not -len(maps) <= layer <= last:
            raise ValueError(f"layer must be from 0 to {last}, or -1 for the last, got {layer}")
        weights = maps[layer][:, :, 0]  # (b, heads, T)
        count = weights.shape[1]
        if heads is not None and (not heads or not all(0 <= head < count for head in heads)):
            raise ValueError(f"heads must be some numbers from 0 to {count - 1}, got {list(heads)}")
        chosen = weights if heads is None else weights[:, list(heads)]
        return chosen.mean(dim=1).double().numpy()

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


at_random = AtRandom


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
        before, without, alone = (
            _probabilities(model, [_kept(*window, keep) for window in windows])
            for keep in (np.ones_like(chosen), ~chosen, chosen)
        )
        best = int(before.argmax())
        falls = (float(before[best] - after[best]) for after in (without, alone))
        f1 = token_f1(chosen, marked), iou_f1(chosen, marked)
        rows.append((average_precision(scores, marked), *f1, *falls, float(marked.mean())))
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
        found = average_precision(scores, changed), mass(scores, changed)
        rows.append((*found, float(changed.mean())))
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
    windows = []
    for a, b in pairwise(cuts):
        tokens, places = ([piece[k] for piece in pieces[a:b]] for k in (0, 1))
        windows.append(([first, *tokens, last], [None, *places, None]))
    return windows


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


def average_precision(scores: np.ndarray, marked: np.ndarray) -> float:
    """Area under the precision-recall curve of one document, in steps (AP).

    Sum over thresholds of (R_k - R_(k-1)) P_k. Equal scores are one threshold, so that the
    order of tied tokens does not matter. A random order scores a little above the share marked.

    >>> average_precision(np.array([0.9, 0.1, 0.5]), np.array([True, False, True]))
    1.0
    """
    scores, marked = _checked(scores, marked)
    if not marked.any():
        raise ValueError("marked must have at least one token")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(marked[order])
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    precision, recall = hits[ends] / (ends + 1), hits[ends] / marked.sum()
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def mass(scores: np.ndarray, marked: np.ndarray) -> float:
    """The share of all score that sits on marked tokens; scores must not be negative."""
    scores, marked = _checked(scores, marked)
    if (scores < 0).any() or scores.sum() <= 0:
        raise ValueError("scores must not be negative, nor all zero")
    return float(scores[marked].sum() / scores.sum())


def top(scores: np.ndarray, share: float) -> np.ndarray:
    """The mask of the `share` of tokens with the highest scores, at least one of them.

    >>> top(np.array([0.1, 0.4, 0.2, 0.3]), 0.5)
    array([False,  True, False,  True])
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    chosen = np.zeros(len(scores), dtype=bool)
    count = max(1, round(share * len(scores)))
    chosen[np.argsort(-np.asarray(scores), kind="stable")[:count]] = True
    return chosen


def token_f1(chosen: np.ndarray, marked: np.ndarray) -> float:
    """2 P R / (P + R) of the chosen tokens; 0 if none is right."""
    both = int(np.sum(chosen & marked))
    return 2 * both / (int(chosen.sum()) + int(marked.sum())) if both else 0.0


def iou_f1(chosen: np.ndarray, marked: np.ndarray, overlap: float = 0.5) -> float:
    """F1 of spans: one is right if it overlaps one of the others by `overlap` of their union.

    As in ERASER (DeYoung et al. 2020): spans are runs of tokens; intersection over union of
    at least .5 counts.

    >>> marked = np.array([0, 1, 1, 1, 0, 0, 1, 1], dtype=bool)
    >>> iou_f1(np.array([0, 1, 1, 0, 0, 0, 0, 0], dtype=bool), marked)  # 1 of 1, 1 of 2
    0.6666666666666666
    """
    ours, theirs = _spans(chosen), _spans(marked)
    right = sum(any(_iou(a, b) >= overlap for b in theirs) for a in ours)
    found = sum(any(_iou(a, b) >= overlap for a in ours) for b in theirs)
    if not right or not found:
        return 0.0
    precision, recall = right / len(ours), found / len(theirs)
    return 2 * precision * recall / (precision + recall)


def word_scores(scores: np.ndarray, words: Sequence[int | None], count: int) -> np.ndarray:
    """Scores of words from those of their pieces, added up; 0 for words that were cut off.

    Args:
        scores: one for each token.
        words: the word that each token is a piece of, or None ([CLS], [SEP]).
        count: number of words.

    >>> word_scores(np.array([0.5, 0.25, 0.125, 0.125]), [None, 0, 0, 1], 3)
    array([0.375, 0.125, 0.   ])
    """
    if len(scores) != len(words):
        raise ValueError(f"{len(scores)} scores for {len(words)} tokens")
    total = np.zeros(count)
    for score, word in zip(scores, words, strict=True):
        if word is not None:
            total[word] += score
    return total


def _checked(scores: np.ndarray, marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores, marked = np.asarray(scores, dtype=np.float64), np.asarray(marked, dtype=bool)
    if scores.ndim != 1 or scores.shape != marked.shape:
        raise ValueError(f"scores and marked must be alike, got {scores.shape}, {marked.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    return scores, marked


def _spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs of True: (start, end), end exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _iou(a: tuple[int, int], b: tuple[int, int]) -> float:
    common = max(0, min(a[1], b[1]) - max(a[0], b[0]))
    return common / (a[1] - a[0] + b[1] - b[0] - common)
