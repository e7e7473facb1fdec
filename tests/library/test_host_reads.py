"""On a device a step does not wait: at most one number is read, the flag of non-finite gradients.

No GPU is needed. `waits` is made to say that reading from any tensor means to wait, so that a CPU
takes the paths of a device, and the operations that would wait are counted. Counters and root mean
squares are kept on the CPU in any case; reading those is free.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from building import build
from mirrorhead import MirrorAdam, MirrorDescent
from mirrorhead.optim import _base, _batches, _sharded, _tensors

WAITING = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "item"}
MODULES = (_base, _batches, _sharded, _tensors)
SHAPES = [(4, 3), (7,), (), (0,), (50_000,)]


class CountReads(TorchDispatchMode):
    """Counts operations whose result depends on values, but for tensors that live on the CPU."""

    def __init__(self, free: list[Tensor]) -> None:
        super().__init__()
        self.free = {x.data_ptr() for x in free}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING and args[0].data_ptr() not in self.free:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "waits", lambda x: True)


CASES: list[tuple[Any, dict[str, Any]]] = [
    *[(MirrorDescent, {"geometry": p}) for p in (1.1, 1.3, 2.0, 3.0)],
    (MirrorDescent, {"geometry": 1.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    *[(MirrorDescent, {"geometry": p, "normalize": "tensor"}) for p in (1.1, 2.0, 3.0)],
    (MirrorDescent, {"geometry": 1.5, "normalize": "global"}),
    (MirrorDescent, {"geometry": 1.1, "center": "init"}),
    *[(MirrorAdam, {"geometry": p}) for p in (1.1, 1.5, 2.0, 3.0)],
    (MirrorAdam, {"geometry": 1.1, "knee": None, "weight_decay": 0.1}),
    (MirrorAdam, {"geometry": 1.1, "center": "init"}),
]


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_a_step_reads_one_number_at_most(
    cls: Any, options: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]
    gradients = [[torch.randn(s, generator=generator).to(dtype) for s in SHAPES] for _ in range(3)]
    ends = []
    for error in (True, False):
        params = [nn.Parameter(w.clone()) for w in start]
        optimizer = build(
            cls, params, lr=0.02, foreach=foreach, error_if_nonfinite=error, **options
        )
        for k, gs in enumerate(gradients):
            for param, g in zip(params, gs, strict=True):
                param.grad = g.clone()
            state = [x for one in optimizer.state.values() for x in one.items()]
            with CountReads([x for name, x in state if name in ("step", "rms")]) as reads:
                optimizer.step()
            if k:  # the first step measures the weights
                assert reads.count == int(error)
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_a_tensor_lr_is_read_when_it_was_edited(
    cls: Any, options: dict[str, Any], foreach: bool
) -> None:
    ends = []
    for tensor in (True, False):
        params = [nn.Parameter(torch.ones(s)) for s in SHAPES]
        lr = torch.tensor(0.02, dtype=torch.float64) if tensor else 0.02
        optimizer = build(cls, params, lr=lr, foreach=foreach, error_if_nonfinite=False, **options)
        for k in range(5):
            if edited := k == 3:
                lr = optimizer.param_groups[0]["lr"] = lr.mul_(0.5) if tensor else 0.01  # pyright: ignore
            for param in params:
                param.grad = torch.ones_like(param)
            state = [x for one in optimizer.state.values() for x in one.items()]
            with CountReads([x for name, x in state if name in ("step", "rms")]) as reads:
                optimizer.step()
            if k and tensor:
                assert (reads.count > 0) == edited
        ends.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "options"), [CASES[0], CASES[10]], ids=str)
def test_a_compiled_step_reads_no_number_but_the_flag(
    cls: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    for name in ("tolist", "item", "__float__", "__bool__"):
        own = getattr(Tensor, name)
        counted = lambda x, own=own, name=name: read.append(name) or own(x)  # noqa: E731
        monkeypatch.setattr(Tensor, name, counted)
    ends = []
    implementations: list[dict[str, Any]] = [{"fused": True}, {"foreach": False}]
    for how in implementations:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(9, generator=generator)) for _ in range(8)]
        optimizer = build(cls, params, lr=0.02, error_if_nonfinite=False, **options, **how)
        for k in range(4):
            for i, param in enumerate(params):
                param.grad = torch.randn(9, generator=generator)
                param.grad[i % 3] = torch.nan if k == 2 else 1.0
            if k == 3:  # an edit from outside is noticed on the device
                params[0].data[2] += 0.25
            read.clear()
            optimizer.step()
            if k:
                # Counters and root mean squares are kept on the CPU.
                free = 3 * len(params) if cls is MirrorAdam else 0
                assert len(read) <= free, read
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_the_steps_are_those_of_a_cpu(
    cls: Any, options: dict[str, Any], foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, with entries that are not finite, and an edit from outside."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]  # noqa: E731
    start, gradients = draw(), [draw() for _ in range(4)]
    gradients[1][0][1, 1] = torch.nan
    gradients[2][4][5] = torch.inf
    ends = []
    for device in (True, False):
        for module in MODULES:
            monkeypatch.setattr(module, "waits", lambda x, device=device: device)
        params = [nn.Parameter(w.clone()) for w in start]
        optimizer = build(
            cls, params, lr=0.02, foreach=foreach, error_if_nonfinite=False, **options
        )
        for gs in gradients:
            for param, g in zip(params, gs, strict=True):
                param.grad = g.clone()
            optimizer.step()
            params[1].data[2] += 0.25
        ends.append(params)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_error_names_the_parameters() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = MirrorDescent([(f"w{i}", x) for i, x in enumerate(params)], lr=0.1, foreach=True)
    for i, param in enumerate(params):
        param.grad = torch.full((3,), torch.nan if i == 1 else 1.0)
    with pytest.raises(RuntimeError, match=r"the gradient of 'w1' is not finite"):
        optimizer.step()
