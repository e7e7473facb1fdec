"""Fine-tune with the Hugging Face Trainer, and write what changed as a patch.

`WritePatch` is the part to copy: a callback that works with any model and optimizer. The rest
trains a tiny random BERT, so that the script runs offline in seconds:

    python examples/patch_trainer.py --out patch.safetensors
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import mirrorhead as mh


class WritePatch(TrainerCallback):
    """Write the patch when training ends.

    Args:
        base: the checkpoint that training starts from: a folder, a file, or a state dict. A
            state dict must be a copy, since training changes the model's own tensors.
        file: the patch to write.
        options: of `mirrorhead.Patch.between`, such as keep=0.001 or whole="classifier.*".
    """

    def __init__(self, base: Any, file: Path, **options: Any) -> None:
        self.base, self.file, self.options = base, file, options

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            mh.Patch.between(self.base, kwargs["model"], **self.options).save(self.file)


def toy_texts(count: int) -> list[dict[str, Any]]:
    """Random token numbers; the class says whether token 5 is among them."""
    ids = torch.randint(6, 40, (count, 8))
    labels = torch.arange(count) % 2
    ids[labels == 1, 3] = 5
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("patch.safetensors"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    # Matrices of the encoder: few shall change. The classifier is new, and trained as usual.
    matrices = [w for n, w in model.bert.encoder.named_parameters() if w.ndim == 2]
    groups = [
        {"params": matrices, "geometry": 1.1, "reach": 0.5, "total_steps": options.steps / 2},
        # A group without a center is one of MirrorAdam; at p = 2 that is AdamW.
        {
            "params": list(model.classifier.parameters()),
            "center": None,
            "geometry": 2.0,
            "lr": 1e-2,
        },
    ]
    optimizer = mh.CenteredAdam(groups)
    decay = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / options.steps))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(
            model,
            arguments,
            train_dataset=toy_texts(256),  # type: ignore[arg-type]
            optimizers=(optimizer, decay),
            callbacks=[WritePatch(base, options.out, keep=0.02, whole="classifier.*")],
        ).train()
    print(mh.Patch.load(options.out))
    print(f"patch: {options.out}")


if __name__ == "__main__":
    main()
