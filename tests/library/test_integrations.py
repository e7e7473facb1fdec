"""Training as people do it: Hugging Face Trainer, Lightning, a loop with torch.amp.

Each is stopped half-way, rebuilt from its checkpoint, and must end on the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mirrorhead import MirrorAdam, MirrorDescent, attention_param_groups

STEPS = 40
Choice = tuple[type[Optimizer], dict[str, Any]]

each_optimizer = pytest.mark.parametrize(
    "choice",
    [
        pytest.param(
            (MirrorDescent, {"lr": 5e-2, "geometry": 1.1, "momentum": 0.5, "normalize": "global"}),
            id="MirrorDescent",
        ),
        pytest.param((MirrorAdam, {"lr": 1e-2, "geometry": 1.5}), id="MirrorAdam"),
    ],
)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]), name


# --- Hugging Face Trainer -------------------------------------------------------------------


class Sentences(Dataset):
    """64 sentences of 8 tokens; the label says whether token 3 is among them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(4, 20, (64, 8), generator=generator)
        self.ids[::2, 5] = 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": (self.ids[i] == 3).any().long()}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=8,
            initializer_range=0.1,
        )
    )


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def hugging_face(directory: Path, choice: Choice, stop: int = STEPS) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=16,
        weight_decay=0.01,
        warmup_steps=2,
        save_strategy="steps",
        save_steps=STEPS // 2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        dataloader_pin_memory=False,
    )
    return Trainer(
        bert(),
        arguments,
        train_dataset=Sentences(),
        callbacks=[StopAt(stop)],
        optimizer_cls_and_kwargs=choice,
    )


@torch.no_grad()
def mean_loss(trainer: Trainer) -> float:
    """Over the training set, without dropout, and without a draw from the random state."""
    model, data = trainer.model, Sentences()
    assert isinstance(model, BertForSequenceClassification)
    model.eval()
    labels = torch.stack([data[i]["labels"] for i in range(len(data))])
    return float(model(input_ids=data.ids, labels=labels).loss)


@each_optimizer
def test_hugging_face_trainer_learns_and_resumes(choice: Choice, tmp_path: Path) -> None:
    straight = hugging_face(tmp_path / "straight", choice)
    before = mean_loss(straight)
    straight.train()
    assert mean_loss(straight) < 0.9 * before

    optimizer = straight.optimizer
    assert isinstance(optimizer, Optimizer)
    assert isinstance(getattr(optimizer, "optimizer", optimizer), choice[0])
    # The Trainer's two groups: weights decay, biases and norms do not.
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0]
    assert all(group["geometry"] == choice[1]["geometry"] for group in optimizer.param_groups)

    first = hugging_face(tmp_path / "halves", choice, stop=STEPS // 2)
    first.train()
    assert first.state.global_step == STEPS // 2
    second = hugging_face(tmp_path / "halves", choice)
    second.train(resume_from_checkpoint=str(tmp_path / "halves" / f"checkpoint-{STEPS // 2}"))
    assert second.state.global_step == STEPS
    assert_same_weights(second.model, straight.model)  # pyright: ignore[reportArgumentType]


# --- Lightning ------------------------------------------------------------------------------


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, 8, generator=generator)
    return TensorDataset(x, (x[:, :, 0].amax(1) > 1).long())


class Attention(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(x, x, x, need_weights=False)[0].amax(1))


class Module(lightning.LightningModule):
    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.model = Attention()
        self.choice = choice
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        cls, options = self.choice
        groups = attention_param_groups(self.model, rest=2.0, geometry=options["geometry"])
        optimizer = cls(groups, **{k: v for k, v in options.items() if k != "p"})
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def fit(directory: Path, module: Module, epochs: int, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=16), **options)
    return trainer


# Lightning 2.6 uses what torch 2.13 deprecates.
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")
# On machines with more cores, or a GPU, than this test wants.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
@each_optimizer
def test_lightning_learns_and_resumes(choice: Choice, tmp_path: Path) -> None:
    straight = Module(choice)
    fit(tmp_path, straight, 12)
    assert sum(straight.losses[-4:]) < 0.9 * sum(straight.losses[:4])

    path = tmp_path / "half.ckpt"
    fit(tmp_path, Module(choice), 6).save_checkpoint(path)
    resumed = Module(choice)
    trainer = fit(tmp_path, resumed, 12, ckpt_path=path)
    assert trainer.global_step == 48
    assert len(resumed.losses) == 24
    assert resumed.losses == straight.losses[24:]
    assert_same_weights(resumed, straight)


# --- a plain loop with torch.amp ------------------------------------------------------------


class Loop:
    """Model, optimizer, schedule and scaler, and how people save them."""

    def __init__(self, choice: Choice, dtype: torch.dtype, scale: float, seed: int = 0) -> None:
        cls, options = choice
        self.model = Attention(seed).to(dtype)
        self.optimizer = cls(self.model.parameters(), **options)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.1 * step))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
        self.dtype = dtype
        self.step = 0
        self.loss_factor = 1.0

    def run(self, steps: int) -> list[float]:
        losses = []
        x, y = samples().tensors
        for _ in range(steps):
            part = slice(16 * (self.step % 4), 16 * (self.step % 4) + 16)
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(self.model(x[part].to(self.dtype)).float(), y[part])
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss_factor * loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() >= before:  # else the optimizer has not stepped
                self.scheduler.step()
            losses.append(loss.item())
            self.step += 1
        return losses

    PARTS = ("model", "optimizer", "scheduler", "scaler")

    def save(self, path: Path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in self.PARTS}
        torch.save({**parts, "step": self.step}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.step = saved.pop("step")
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_optimizer
def test_amp_loop_learns_and_resumes(choice: Choice, dtype: torch.dtype, tmp_path: Path) -> None:
    straight = Loop(choice, dtype, 2.0**10)
    losses = straight.run(48)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert straight.scaler.get_scale() > 2.0**10

    first = Loop(choice, dtype, 2.0**10)
    first.run(24)
    first.save(tmp_path / "half.pt")
    second = Loop(choice, dtype, 1.0, seed=1)
    second.load(tmp_path / "half.pt")
    assert second.run(24) == losses[24:]
    assert_same_weights(second.model, straight.model)


@each_optimizer
def test_overflow_is_skipped_and_the_scale_lowered(choice: Choice) -> None:
    loop = Loop(choice, torch.float32, 2.0**127)
    loop.loss_factor = 16.0
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.run(1)
    assert loop.scaler.get_scale() == 2.0**126
    assert not loop.optimizer.state
    for name, value in loop.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    loop.run(30)
    assert loop.scaler.get_scale() < 2.0**126
    for name, value in loop.model.state_dict().items():
        assert value.isfinite().all()
        assert not torch.equal(value, before[name]), name
