"""Everything that is measured of a run, part by part, on the real data.

`MEASURES` lists the parts. The attention that is scored is that of [CLS] in the last layer, mean
over heads. Measures are kept in the run's folder, each part with a stamp of the weights and the
data it was measured on, and are computed again only if one of them changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mirrorhead._files import sha256_of, write_json
from mirrorhead.lab.datasets.batches import Examples, even_batches
from mirrorhead.lab.datasets.cifar10 import Pictures, load_cifar10
from mirrorhead.lab.datasets.encoded import Encoded, encode, load_tokenizer
from mirrorhead.lab.datasets.reviews import Pairs, Rationales, load_cad, load_eraser, load_imdb
from mirrorhead.lab.evaluation.attention_reading import normalized_entropy
from mirrorhead.lab.evaluation.rationales import (
    Scorer,
    at_random,
    cls_attention,
    gradient_times_input,
    score_edits,
    score_rationales,
)
from mirrorhead.lab.evaluation.results import SHARES, SPLITS
from mirrorhead.lab.evaluation.sparsity import (
    attention_weights_by_kind,
    count_large,
    gini,
    hoyer,
    pruned,
)
from mirrorhead.lab.models import TextClassifier, TextSettings, attention_maps
from mirrorhead.lab.runtime.errors import UserError
from mirrorhead.lab.runtime.json_files import read_json
from mirrorhead.lab.training.loop import evaluate
from mirrorhead.lab.training.run_folder import Run, weights_along

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Increases with every change of what a part measures; older ones are then computed again.
FORMATS = {"eraser": 2, "cad": 2}
BINS = 60
BATCH = 32  # small ones stay in a core's cache: 1.2 to 2 times faster than 128 for a narrow model
_KEPT = "measures.json"


@dataclass(frozen=True)
class _Kept:
    """measures.json: parts with the stamps of what they were measured on."""

    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationData:
    """The data sets that runs are measured on; each is read when it is first used.

    Args:
        kind: what the runs were trained on, "imdb" or "cifar10".
        max_length: of the model's texts.
        folder, partial: as in `load_imdb`.
    """

    kind: str
    max_length: int | None = None
    folder: str | Path | None = None
    partial: bool = False

    @staticmethod
    def of(run: Run, folder: str | Path | None = None, *, partial: bool = False) -> EvaluationData:
        """Return the data for a run; runs whose models have the same max_length share them."""
        settings = run.preset.model
        length = settings.max_length if isinstance(settings, TextSettings) else None
        return EvaluationData(run.preset.data, length, folder, partial)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder, max_length=self.max_length or 512, partial=self.partial)

    @cached_property
    def test(self) -> Encoded | Pictures:
        """The test split, as published."""
        if self.kind == "imdb":
            texts = load_imdb("test", self.folder, partial=self.partial)
            return encode(texts, self.tokenizer)
        return load_cifar10("test", self.folder, partial=self.partial)

    @cached_property
    def eraser(self) -> dict[str, Rationales]:
        return {
            split: load_eraser(split, self.folder, partial=self.partial)
            for split in ("train", "val", "test")
        }

    @cached_property
    def share(self) -> float:
        """The share of words that people marked in ERASER's train split."""
        return float(np.concatenate(self.eraser["train"].marked).mean())

    @cached_property
    def cad(self) -> dict[str, Pairs]:
        return {
            split: load_cad(split, self.folder, partial=self.partial) for split in SPLITS["cad"]
        }

    def digest(self, part: str) -> str:
        """Return a hash of the data that a part is measured on; an error if they are missing."""
        if part not in self._digests:
            self._digests[part] = sha256_of(self._content(part))
        return self._digests[part]

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {}

    def _content(self, part: str) -> bytes:
        if part == "weights":
            return b""
        if part == "eraser":
            sets = self.eraser.values()
            found = [(s.words, [mask.tolist() for mask in s.marked]) for s in sets]
            return repr((self.max_length, found)).encode()
        if part == "cad":
            pairs = [(p.original.texts, p.revision.texts) for p in self.cad.values()]
            return repr((self.max_length, pairs)).encode()
        test = self.test
        inputs = test.ids if isinstance(test, Encoded) else test.pixels
        return test.labels.tobytes() + inputs.tobytes()


def measure(
    run: Run,
    data: EvaluationData,
    parts: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda part: None,
) -> dict[str, Any]:
    """Return parts of `MEASURES` for a run, from its measures.json where that is up to date.

    Args:
        run: what `load_run` gave.
        data: the data to measure it on.
        parts: which; all that fit the run if None.
        tell: called with the name of each part before it is computed.
    """
    parts = check_parts(run, parts)
    stamps = {part: stamp(run.folder, data, part) for part in parts}
    found = kept_measures(run.folder, stamps)
    for part in parts:
        if part not in found:
            tell(part)
            found[part] = MEASURES[part](run, data)
            _keep(run.folder, part, stamps[part], found[part])
    return {part: found[part] for part in parts}


def check_parts(run: Run, parts: Sequence[str] | None = None) -> list[str]:
    """Return the parts asked for, if they fit the run; all parts that fit if None."""
    left_out = {
        *(TEXTS_ONLY if run.preset.data != "imdb" else ()),
        *(() if run.preset.training.milestones else ("milestones",)),
    }
    fitting = [part for part in MEASURES if part not in left_out]
    if wrong := [part for part in parts or () if part not in fitting]:
        raise UserError(
            f"parts must be of {', '.join(fitting)} for a run on {run.preset.data}, got {wrong[0]}"
        )
    return list(dict.fromkeys(parts)) if parts is not None else fitting


def stamp(folder: Path, data: EvaluationData, part: str) -> str:
    """Return a name that changes with everything that changes a part's measures."""
    about = f"mirrorhead measures {FORMATS.get(part, 1)}, {part}\n"
    weights = (folder / "best.safetensors").read_bytes()
    return sha256_of(about.encode(), weights, data.digest(part).encode())[:32]


def kept_measures(folder: Path, stamps: dict[str, str]) -> dict[str, Any]:
    """Return the parts in a run's measures.json that have the given stamps."""
    there = _read(folder)
    return {
        part: there.measures[part]
        for part, wanted in stamps.items()
        if part in there.measures and there.stamps.get(part) == wanted
    }


def _keep(folder: Path, part: str, stamp: str, found: dict[str, Any]) -> None:
    there = _read(folder)
    there.measures[part], there.stamps[part] = found, stamp
    write_json(folder / _KEPT, dataclasses.asdict(there))


def _read(folder: Path) -> _Kept:
    path = folder / _KEPT
    if not path.exists():
        return _Kept()
    return read_json(path, _Kept, "Delete it, and the run is measured again")


# --- the parts ------------------------------------------------------------------------------


def _test(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Loss and accuracy of the best epoch's weights on the test split."""
    return evaluate(run.model, data.test, batch_size=BATCH)


def _weights(run: Run, data: EvaluationData) -> dict[str, Any]:
    """How sparse keys, queries and values are: Figure 8."""
    return {kind: _sparsity(w) for kind, w in attention_weights_by_kind(run.model).items()}


def _sparsity(weights: torch.Tensor) -> dict[str, Any]:
    """Counts and indices; those of weights that are all 0 are None, for 0/0."""
    limit = float(weights.abs().max())
    counts, edges = np.histogram(
        weights.double().numpy(), BINS, (-limit, limit) if limit else (-1.0, 1.0)
    )
    return {
        "large": count_large(weights),
        "gini": gini(weights) if limit else None,
        "hoyer": hoyer(weights) if limit else None,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _pruned(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Accuracy on test without the smallest weights of each matrix, not trained again."""
    return {
        f"{share:g}": evaluate(pruned(run.model, share), data.test, batch_size=BATCH)["accuracy"]
        for share in SHARES
    }


def _entropy(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Normalized entropy of [CLS]'s attention in the last layer, mean over the test split."""
    model: Any = run.model
    last = len(model.blocks) - 1
    sums = torch.zeros((), dtype=torch.float64)
    for x in _batches(data.test):
        (weights,) = attention_maps(model, x, layers=[last])  # (b, heads, 1, T)
        seen = (x != 0)[:, None, None, :] if isinstance(data.test, Encoded) else None
        sums = sums + normalized_entropy(weights.double(), seen)[:, :, 0].sum(dim=0)
    by_head = sums / len(data.test)
    return {"mean": float(by_head.mean()), "by_head": by_head.tolist()}


def _milestones(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Accuracy on test after the first epoch that reached each training accuracy."""
    found: dict[str, Any] = {}
    model = run.preset.build()
    accuracies: dict[int | None, float] = {}  # by epoch: one may pass several milestones
    along = [(w, w.train_accuracy) for w in weights_along(run) if w.train_accuracy is not None]
    for share in run.preset.training.milestones:
        first = next(((weights, train) for weights, train in along if train >= share), None)
        if first is None:
            continue
        weights, train = first
        if weights.epoch not in accuracies:
            weights.load_into(model)
            scored = evaluate(model, data.test, batch_size=BATCH)
            accuracies[weights.epoch] = scored["accuracy"]
        found[f"{share:g}"] = {
            "epoch": weights.epoch,
            "train_accuracy": train,
            "test_accuracy": accuracies[weights.epoch],
        }
    return found


def _eraser(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Attention and its baselines against the words that people marked. Never pool the splits."""
    return {
        split: {
            name: dataclasses.asdict(
                score_rationales(run.model, scorer, data.eraser[split], data.tokenizer, data.share)
            )
            for name, scorer in _scorers(run)
        }
        for split in SPLITS["eraser"]
    }


def _cad(run: Run, data: EvaluationData) -> dict[str, Any]:
    """Attention and its baselines against the edits that flip the label."""
    return {
        split: {
            name: dataclasses.asdict(score_edits(scorer, pairs, data.tokenizer))
            for name, scorer in _scorers(run)
        }
        for split, pairs in data.cad.items()
    }


def _scorers(run: Run) -> Iterable[tuple[str, Scorer]]:
    model = run.model
    assert isinstance(model, TextClassifier)
    yield "attention", cls_attention(model)
    yield "gradient", gradient_times_input(model, model.tokens)
    yield "random", at_random()


def _batches(examples: Examples) -> Iterable[torch.Tensor]:
    lengths = getattr(examples, "lengths", None)
    for batch in even_batches(np.arange(len(examples)), BATCH, lengths):
        yield examples.batch(batch)[0]


#: What is measured, by name.
MEASURES: dict[str, Callable[[Run, EvaluationData], dict[str, Any]]] = {
    "test": _test,
    "weights": _weights,
    "pruned": _pruned,
    "entropy": _entropy,
    "eraser": _eraser,
    "cad": _cad,
    "milestones": _milestones,
}
TEXTS_ONLY = ("eraser", "cad")
