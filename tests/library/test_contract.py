"""The contract: loop, foreach and fused all agree with the formula of tests/reference.py.

Weights are compared in the dual, where the step is taken: |mirror(w) - u| is at most a few
roundings of the largest number met on the way, whatever 1/(p-1) does to it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
from mirrorhead import MirrorAdam, MirrorDescent

LOOP: dict[str, Any] = {"foreach": False, "fused": False}
FOREACH: dict[str, Any] = {"foreach": True}
NATIVE: dict[str, Any] = {}  # the default on a CPU

shapes = st.lists(
    st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4
)
p_values = st.sampled_from([1.05, 1.1, 1.5, 1.75, 2.0, 2.7, 3.0, 6.0]) | st.floats(1.05, 8)


def train(optimizer: torch.optim.Optimizer, gradients: Sequence[Sequence[Tensor]]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for gs in gradients:
        for param, g in zip(params, gs, strict=True):
            param.grad = g.to(param.dtype, copy=True)  # SGD may write to it
        optimizer.step()


def make(
    tensor_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int, steps: int = 4
) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    """Parameters, some of them with zeros, and gradients, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(s, generator=generator, dtype=torch.float64) for s in tensor_shapes]
    for w in weights:
        w[torch.rand(w.shape, generator=generator) < 0.2] = 0
    gradients = [
        [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in tensor_shapes]
        for _ in range(steps)
    ]
    for g in gradients[0]:
        g[torch.rand(g.shape, generator=generator) < 0.2] = 0
    return [nn.Parameter(w.to(dtype)) for w in weights], gradients


def assert_agrees(params: Sequence[Tensor], expected: Sequence[Tensor], p: float) -> None:
    for got, want in zip(params, expected, strict=True):
        assert got.isfinite().all()
        if not got.numel():
            continue
        wide = torch.promote_types(got.dtype, torch.float32)
        u, target = reference.mirror(got.double(), p), reference.mirror(want, p)
        # Rounding w to its dtype moves u by (p-1) eps |u|; steps are of size 1 at most.
        eps = torch.finfo(wide).eps * 64 * max(1, p) + torch.finfo(got.dtype).eps * (p - 1)
        scale = torch.maximum(target.abs(), torch.tensor(1.0, dtype=torch.float64))
        slack = eps * scale + torch.finfo(got.dtype).tiny ** (p - 1) * 2
        assert ((u - target).abs() <= slack).all()


def check_descent(
    implementation: dict[str, Any],
    tensor_shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    **options: Any,
) -> None:
    params, gradients = make(tensor_shapes, dtype, seed)
    expected = reference.descend([q.detach() for q in params], gradients, **options)
    train(MirrorDescent(params, **options, **implementation), gradients)
    assert_agrees(params, expected, options["geometry"])


descent_options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 0.1),
        "geometry": p_values,
        "momentum": st.sampled_from([0, 0.9]),
        "weight_decay": st.sampled_from([0, 0.1]),
        "normalize": st.sampled_from([None, "tensor", "global"]),
        "maximize": st.booleans(),
    }
)
dtypes = st.sampled_from([torch.float32, torch.float64])


@pytest.mark.parametrize(
    "implementation", [LOOP, FOREACH, NATIVE], ids=["loop", "foreach", "native"]
)
@given(shapes, dtypes, st.integers(0, 1000), descent_options, st.booleans())
def test_descent(
    implementation: dict[str, Any],
    tensor_shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    options: dict[str, Any],
    nesterov: bool,
) -> None:
    nesterov = nesterov and options["momentum"] > 0
    check_descent(implementation, tensor_shapes, dtype, seed, nesterov=nesterov, **options)


adam_options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 1e-2),
        "geometry": p_values,
        "weight_decay": st.sampled_from([0, 0.1]),
        "maximize": st.booleans(),
    }
)


def check_adam(
    implementation: dict[str, Any],
    tensor_shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    **options: Any,
) -> None:
    params, gradients = make(tensor_shapes, dtype, seed)
    expected = reference.adam([q.detach() for q in params], gradients, **options)
    train(MirrorAdam(params, **options, **implementation), gradients)
    assert_agrees(params, expected, options["geometry"])


@pytest.mark.parametrize(
    "implementation", [LOOP, FOREACH, NATIVE], ids=["loop", "foreach", "native"]
)
@given(shapes, dtypes, st.integers(0, 1000), adam_options)
def test_adam(
    implementation: dict[str, Any],
    tensor_shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    options: dict[str, Any],
) -> None:
    check_adam(implementation, tensor_shapes, dtype, seed, **options)


@pytest.mark.parametrize("implementation", [LOOP, FOREACH], ids=["loop", "foreach"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_p_2_is_sgd_to_the_bit(
    implementation: dict[str, Any], options: dict[str, Any], dtype: torch.dtype
) -> None:
    shapes_ = [(5, 7), (), (33,)]
    params, gradients = make(shapes_, dtype, 0, steps=10)
    twins = [nn.Parameter(q.detach().clone()) for q in params]
    train(MirrorDescent(params, lr=0.03, geometry=2, **options, **implementation), gradients)
    train(torch.optim.SGD(twins, lr=0.03, **options, **implementation), gradients)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@pytest.mark.parametrize("implementation", [LOOP, FOREACH], ids=["loop", "foreach"])
def test_p_2_is_adamw(implementation: dict[str, Any]) -> None:
    params, gradients = make([(5, 7), (), (33,)], torch.float32, 0, steps=10)
    twins = [nn.Parameter(q.detach().clone()) for q in params]
    train(MirrorAdam(params, lr=0.01, geometry=2, weight_decay=0.1, **implementation), gradients)
    train(torch.optim.AdamW(twins, lr=0.01, weight_decay=0.1, **implementation), gradients)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@pytest.mark.parametrize("implementation", [LOOP, FOREACH], ids=["loop", "foreach"])
def test_any_memory_layout(implementation: dict[str, Any]) -> None:
    """Transposed, channels-last and sliced weights, and gradients laid out otherwise."""
    base = torch.randn(4, 6, 5, 3)

    def layouts() -> list[Tensor]:
        return [
            base[..., 0, 0].contiguous().t(),
            base.to(memory_format=torch.channels_last),
            base.flatten().clone()[::2],
            base.clone()[:, 1:3, 0, 0],
        ]

    gradient = [torch.randn(x.shape) for x in layouts()]
    plain = [nn.Parameter(x.contiguous().clone()) for x in layouts()]
    params = [nn.Parameter(x) for x in layouts()]
    assert [q.is_contiguous() for q in params] == [False] * 4
    for weights, gradients in (
        (params, gradient),
        *(([w], [g]) for w, g in zip(plain, gradient, strict=True)),
    ):
        optimizer = MirrorDescent(weights, lr=0.1, geometry=1.1, momentum=0.9, **implementation)
        train(optimizer, [gradients] * 3)
    for a, b in zip(plain, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-10)
