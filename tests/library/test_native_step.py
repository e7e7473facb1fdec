"""The step in C against the formula: every rule, dtype, layout and length."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mirrorhead as mh
from building import build
from mirrorhead import CenteredAdam, MirrorAdam, MirrorDescent, native
from mirrorhead.geometry._powers import inverse_exponent
from mirrorhead.optim import _native
from mirrorhead.optim._batches import Parts
from mirrorhead.optim._batches import advance as step_of_torch
from mirrorhead.optim._moves import mirror
from mirrorhead.optim._native import NativeTable
from mirrorhead.optim._rule import Checksums, Hyper, Method, Mover, Record, Rule, Storage
from mirrorhead.optim._tensors import wide_dtype

pytestmark = pytest.mark.skipif(not native.available(), reason="the C library was not built")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
P_VALUES = (1.05, 1.1, 1.25, 1.3, 1.5, 1.75, 2.0, 2.5, 2.7, 3.0, 4.0, 5.0, 6.0)


def power(x: np.ndarray, exponent: float) -> np.ndarray:
    """x^exponent by the C library, in float32."""
    function = native.function(
        "power_float", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    )
    assert function is not None
    out = np.empty_like(x)
    packed = struct.pack(_native._EXPONENT, *_native._exponent(exponent))
    function(x.ctypes.data, out.ctypes.data, len(x), packed)
    return out


@pytest.mark.parametrize(
    "exponent", [0.1, 0.37, 1 / 1.7, 0.75, 4 / 3, 1.7, 2.25, 1 / 0.3, 10, 100 / 3]
)
def test_powers_against_mpmath(exponent: float) -> None:
    generator = np.random.default_rng(0)
    limit = min(126, 126 / exponent)
    x = np.exp2(generator.uniform(-limit, limit, 2000)).astype(np.float32)
    x = np.concatenate(
        [x, np.array([1, 2**-0.5, 2**0.5, np.nextafter(np.float32(1), 0)], np.float32)]
    )
    with mpmath.workdps(30):
        exact = [mpmath.mpf(float(a)) ** mpmath.mpf(exponent) for a in x]
        errors = [
            abs(mpmath.mpf(float(b)) / a - 1)
            for a, b in zip(exact, power(x, exponent), strict=True)
        ]
    assert max(errors) <= (2 + exponent) * 2**-23
    edges = np.array([0, 1, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(power(edges, exponent), edges)


def rule_of(p: float, dtype: torch.dtype, method: Method, knee: bool, primal: bool) -> Rule:
    storage = Storage.PRIMAL
    if not primal:
        wide = wide_dtype(dtype)
        storage = Storage.DUAL if p < 2 else Storage.WIDE if dtype != wide else Storage.PRIMAL
    psi = mh.Knee(mh.PNorm(p), 1.0) if knee else mh.PNorm(p)
    return Rule(psi, method, storage, dtype, knee)


def parts_of(rule: Rule, hyper: Hyper, weight: Tensor, grad: Tensor, seed: int) -> Parts:
    """Tensors in the middle of a run: moments that are not zero, u that is not mirror(w)."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(weight.shape, generator=generator).to(rule.wide)  # noqa: E731
    stored = None
    if rule.storage is Storage.DUAL:
        stored = mirror(rule, weight.to(rule.wide), None, hyper)
    elif rule.storage is Storage.WIDE:
        stored = weight.to(rule.wide) * (1 + 1e-4 * draw())
        weight = stored.to(rule.dtype)
    m = draw() if rule.method else None
    v = draw().square() + 0.1 if rule.method is Method.ADAM else None
    return [weight, grad, stored, m, v, None]


def by_c(rule: Rule, parts: Parts, hyper: Hyper) -> Parts:
    """The tensors after a step of the C library."""
    w, g, stored, m, v, _ = (x if x is None else x.clone() for x in parts)
    assert w is not None and g is not None
    numbers = {k: x for k, x in hyper._asdict().items() if k != "lr"}
    record = Record(
        w, rule, Mover.NATIVE, w, stored, m, v, None, None, None, numbers, 1.0, Checksums()
    )
    assert NativeTable([record]).step([g], {"lr": hyper.lr}, 0) == [True]
    return [w, g, stored, m, v, None]


def in_float64(rule: Rule, parts: Parts, hyper: Hyper) -> Parts:
    """The tensors after the same step of the formula in float64."""
    rule, parts = (
        replace(rule, dtype=torch.float64),
        [x if x is None else x.double() for x in parts],
    )
    if rule.storage is Storage.WIDE:
        rule = replace(rule, storage=Storage.PRIMAL)
        parts[0], parts[2] = parts[2], None
    return step_of_torch(rule, parts, hyper)


@given(
    p=st.sampled_from(P_VALUES) | st.floats(1.05, 8),
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([0, 1, 3, 8, 17, 511, 513, 1024, 1025, 2049, 5000]),
    method=st.sampled_from(["plain", "momentum", "nesterov", "adam", "knee"]),
    primal=st.booleans(),
    decay=st.sampled_from([0.0, 0.01]),
    scale=st.sampled_from([1.0, -0.5]),
    seed=st.integers(0, 10**6),
)
def test_it_takes_the_step_of_the_formula(
    p: float, dtype: torch.dtype, count: int, method: str, primal: bool, decay: float,
    scale: float, seed: int,
) -> None:  # fmt: skip
    knee = method == "knee" and p < 2
    kinds = {"plain": Method.DESCENT, "momentum": Method.MOMENTUM, "nesterov": Method.NESTEROV}
    rule = rule_of(p, dtype, kinds.get(method, Method.ADAM), knee, primal)
    K = 0.3
    hyper = Hyper(
        lr=0.01,
        decay=decay,
        dither=0.3,
        grad_scale=scale,
        momentum=0.9,
        gain1=0.1,
        beta2=0.99,
        gain2=0.01,
        eps=1e-8,
        root_bias=2.0,
        knee=K if knee else 0.0,
        dual_knee=K ** (p - 1) if knee else 0.0,
        slope=K ** (2 - p) / (p - 1) if knee else 0.0,
    )
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, generator=generator, dtype=torch.float64)
    weight[torch.rand(count, generator=generator) < 0.1] = 0
    grad = torch.randn(count, generator=generator, dtype=torch.float64)
    grad[torch.rand(count, generator=generator) < 0.1] = 0
    parts = parts_of(rule, hyper, weight.to(dtype), grad.to(dtype), seed)
    got, expected = by_c(rule, parts, hyper), in_float64(rule, parts, hyper)
    eps, tiny = torch.finfo(rule.wide).eps, torch.finfo(dtype).tiny
    for ours, theirs in zip(got[3:5], expected[3:5], strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours.double(), theirs, rtol=8 * eps, atol=8 * eps)
    # Weights are compared in the dual, where the step is taken.
    weights: list[Any] = [got[0], expected[0]]
    here, there = (
        mirror(replace(rule, dtype=torch.float64), x.double(), None, hyper) for x in weights
    )
    slack = 64 * max(1, p) * eps + torch.finfo(dtype).eps * (p - 1)
    bound = slack * there.abs().clamp_min(1) + 2 * tiny ** (p - 1)
    if knee:  # above the knee u is linear in w
        bound = bound + torch.finfo(dtype).eps * weights[1].abs() / hyper.slope
    if p < 2:  # a weight may be too small for its dtype
        bound = bound + torch.finfo(dtype).smallest_normal ** (p - 1)
    assert ((here - there).abs() <= bound).all()
    if rule.storage is Storage.DUAL:
        ours, theirs = got[2], expected[2]
        assert ours is not None and theirs is not None
        assert ((ours.double() - theirs).abs() <= 8 * eps * (1 + theirs.abs())).all()


def twice(dtype: torch.dtype = torch.float32, count: int = 5000, **options):
    """Two optimizers over equal weights."""
    weights = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    made = []
    for _ in range(2):
        param = nn.Parameter(weights.clone())
        made.append((param, MirrorDescent([param], lr=0.01, **options)))
    return made


def advance(
    param: nn.Parameter, optimizer: torch.optim.Optimizer, seed: int, scale: float = 1.0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    param.grad = scale * torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.1, 1.3, 1.5])
def test_a_zero_gradient_changes_no_bit(p: float, dtype: torch.dtype) -> None:
    (param, optimizer), _ = twice(dtype, geometry=p)
    advance(param, optimizer, 0)
    before, dual = param.detach().clone(), optimizer.state[param]["dual"].clone()
    for seed in range(3):
        advance(param, optimizer, seed, 0.0)
    assert torch.equal(param, before) and torch.equal(optimizer.state[param]["dual"], dual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0])
def test_rows_without_a_gradient_are_left_and_edits_of_them_noticed(
    p: float, dtype: torch.dtype
) -> None:
    """Most rows of an embedding have no gradient in a step; blocks of such rows are skipped."""
    generator = torch.Generator().manual_seed(0)
    start = (0.1 * torch.randn(64, 600, generator=generator)).to(dtype)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    one, other = MirrorDescent([ours], 0.01, p), MirrorDescent([theirs], 0.01, p, foreach=True)
    for step in range(6):
        used = torch.randperm(64, generator=generator)[:5]
        grad = torch.zeros_like(start)
        grad[used] = torch.randn(5, 600, generator=generator).to(dtype)
        if step == 3:  # an edit of rows that this step does not use
            unused = torch.ones(64, dtype=torch.bool).index_fill(0, used, False)
            for weight in (ours, theirs):
                weight.data[unused] *= 1.5
        before = ours.detach().clone()
        for weight, optimizer in ((ours, one), (theirs, other)):
            weight.grad = grad.clone()
            optimizer.step()
        untouched = torch.ones(64, dtype=torch.bool).index_fill(0, used, False)
        assert ours[untouched].equal(before[untouched])
        assert not ours[used].equal(before[used])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"momentum": 0.9}])
@pytest.mark.parametrize("p", [1.1, 2.0, 3.0])
def test_decay_and_momentum_move_weights_without_a_gradient(
    p: float, options: dict[str, Any]
) -> None:
    start = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    pairs = []
    for foreach in (None, True):
        weight = nn.Parameter(start.clone())
        pairs.append((weight, MirrorDescent([weight], 0.01, p, foreach=foreach, **options)))
    for scale in (1.0, 0.0, 0.0):
        before = pairs[0][0].detach().clone()
        for weight, optimizer in pairs:
            weight.grad = scale * torch.ones_like(weight)
            optimizer.step()
        assert not pairs[0][0].equal(before)
    torch.testing.assert_close(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("p", [1.1, 1.3, 1.5, 1.75])
def test_the_comparison_one_by_one_agrees_with_the_checksum_to_the_bit(p: float) -> None:
    """As after loading a checkpoint, when there are no checksums."""
    (a, with_sums), (b, without) = twice(geometry=p)
    for seed in range(5):
        advance(a, with_sums, seed)
        without._forget()
        advance(b, without, seed)
    assert torch.equal(a, b)
    assert torch.equal(with_sums.state[a]["dual"], without.state[b]["dual"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.1, 1.3, 3.0])
def test_every_edit_from_outside_is_noticed(p: float, dtype: torch.dtype) -> None:
    """One bit of one weight, two swapped weights, all signs."""
    bits = (
        torch.int64
        if dtype is torch.float64
        else torch.int32
        if dtype is torch.float32
        else torch.int16
    )

    def one_bit(w: Tensor) -> None:
        w.view(bits)[3333] += 1

    def swap(w: Tensor) -> None:
        w[[7, 8]] = w[[8, 7]]

    for edit in (one_bit, swap, Tensor.neg_, lambda w: w.mul_(1 - 1e-2)):
        (param, optimizer), _ = twice(dtype, geometry=p)
        advance(param, optimizer, 0)
        before = param.detach().clone()
        edit(param.data)
        edited = param.detach().clone()
        advance(param, optimizer, 1, 0.0)
        assert torch.equal(param, edited)
        fresh = nn.Parameter(edited.clone())
        other = MirrorDescent([fresh], lr=0.01, geometry=p)
        for who, opt in ((param, optimizer), (fresh, other)):
            advance(who, opt, 2)
        changed = edited != before
        assert changed.any()
        torch.testing.assert_close(param[changed], fresh[changed])


def test_a_changed_p_starts_from_the_weights() -> None:
    (param, optimizer), _ = twice(geometry=1.5)
    advance(param, optimizer, 0)
    before = param.detach().clone()
    optimizer.param_groups[0]["geometry"] = 1.2
    advance(param, optimizer, 1, 0.0)
    assert torch.equal(param, before)
    torch.testing.assert_close(
        optimizer.state[param]["dual"], before.abs().pow(0.2).copysign(before)
    )


@pytest.mark.parametrize("name", ["state", "dual"])
def test_state_that_was_deleted_is_made_again_from_the_weights(name: str) -> None:
    (param, optimizer), _ = twice(geometry=1.5)
    advance(param, optimizer, 0)
    before = param.detach().clone()
    del (optimizer.state if name == "state" else optimizer.state[param])[
        param if name == "state" else "dual"
    ]
    advance(param, optimizer, 1, 0.0)
    assert torch.equal(param, before)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.1, 1.5, 3.0])
@pytest.mark.parametrize("center", [None, "init"])
@pytest.mark.parametrize("in_place", [True, False])
def test_state_set_to_zero_is_made_again_from_the_weights(
    in_place: bool, center: str | None, p: float, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    """As to forget the momentum: weights count, not what is kept beside them."""
    (param, optimizer), _ = twice(dtype, geometry=p, momentum=0.9, center=center, **how)
    for seed in range(3):
        advance(param, optimizer, seed)
    before = param.detach().clone()
    for name, value in optimizer.state[param].items():
        if name in ("dual", "wide", "momentum_buffer"):
            optimizer.state[param][name] = value.zero_() if in_place else torch.zeros_like(value)
    advance(param, optimizer, 3, 1e-9)
    torch.testing.assert_close(param.detach(), before, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cls", [MirrorDescent, MirrorAdam])
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_steps_in_inference_mode(cls: type, p: float) -> None:
    start = torch.randn(5)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    for inference, param in zip((False, True), params, strict=True):
        optimizer = cls([param], lr=0.1, geometry=p)
        for _ in range(3):
            param.grad = torch.ones(5)
            with torch.inference_mode(inference):
                optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    (a, one), (b, two) = twice(dtype, 200_001, geometry=1.1, momentum=0.9, stochastic_rounding=True)
    threads = torch.get_num_threads()
    try:
        for seed in range(2):
            torch.set_num_threads(1)
            advance(a, one, seed)
            torch.set_num_threads(3)
            advance(b, two, seed)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer_class", [MirrorDescent, MirrorAdam])
@pytest.mark.parametrize("p", [1.1, 2.0, 3.0])
def test_non_finite_entries_are_left_out(optimizer_class, p: float) -> None:
    weights = torch.randn(3000)
    bad = torch.tensor([5, 1500, 2999])
    params = [nn.Parameter(weights.clone()) for _ in range(2)]
    for param, value in zip(params, (0.0, torch.nan), strict=True):
        optimizer = optimizer_class([param], lr=0.01, geometry=p, error_if_nonfinite=False)
        param.grad = torch.ones(3000)
        param.grad[bad] = value
        optimizer.step()
        assert param.isfinite().all()
    assert torch.equal(*params)
    optimizer = optimizer_class([params[1]], lr=0.01, geometry=p)
    assert params[1].grad is not None
    params[1].grad[bad] = torch.inf
    with pytest.raises(RuntimeError, match="is not finite"):
        optimizer.step()


def test_stochastic_rounding_is_unbiased_and_the_same_in_every_process() -> None:
    means = []
    for _ in range(2):
        param = nn.Parameter(torch.full((100_000,), 1.0, dtype=torch.bfloat16))
        optimizer = MirrorDescent([param], lr=1e-3, geometry=1.5, stochastic_rounding=True)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert set(param.unique().tolist()) == {0.99609375, 1.0}
        means.append(float(param.detach().double().mean()))
    assert means[0] == means[1]
    assert means[0] == pytest.approx((1 - 1e-3) ** 2, abs=3e-5)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "gaps", "gradient", "expanded"])
@pytest.mark.parametrize("p", [1.1, 2.0, 3.0])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"cls": MirrorAdam}], ids=str)
def test_layouts(layout: str, p: float, options: dict[str, Any]) -> None:
    options = {"cls": MirrorDescent, **options}
    cls: Any = options.pop("cls")
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(6, 4, 5, 7, generator=generator)
    grad = torch.randn(6, 4, 5, 7, generator=generator)
    weight = plain.clone()
    if layout == "transposed":
        weight = plain.transpose(1, 3).contiguous().transpose(1, 3)
    elif layout == "channels_last":
        weight = plain.contiguous(memory_format=torch.channels_last)
    both = torch.stack([plain, plain], -1)
    if layout == "gaps":
        weight = both[..., 0]
    elif layout == "expanded":
        grad = grad[:1].expand(grad.shape)
    params = [nn.Parameter(plain.clone()), nn.Parameter(weight)]
    for k, param in enumerate(params):
        optimizer = cls([param], lr=0.01, geometry=p, **options)
        for _ in range(2):
            param.grad = grad.clone(memory_format=torch.contiguous_format)
            if k and layout == "gradient":
                param.grad = grad.transpose(0, 2).contiguous().transpose(0, 2)
            elif k and layout == "expanded":
                param.grad = grad
            optimizer.step()
    torch.testing.assert_close(params[1], params[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(both[..., 1], plain)  # what lies in the gaps


@pytest.mark.parametrize("optimizer_class", [MirrorDescent, MirrorAdam])
@pytest.mark.parametrize("p", [1.05, 1.1, 1.2, 1.25, 1.3, 1.5, 1.6, 1.75, 1.9, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_without_checksums_the_step_is_the_same(
    optimizer_class: type, p: float, dtype: torch.dtype
) -> None:
    """After a checkpoint is loaded there are none; then no weight may look edited."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5000, generator=generator).to(dtype)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [optimizer_class([param], lr=0.02, geometry=p) for param in params]
    for _ in range(8):
        gradient = torch.randn(5000, generator=generator).to(dtype)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
        optimizers[1]._forget()
        assert torch.equal(*params)


@given(
    p=st.sampled_from(P_VALUES) | st.floats(1.05, 8),
    dtype=st.sampled_from(DTYPES),
    counts=st.lists(st.sampled_from([0, 1, 7, 8, 131, 1025, 5000]), min_size=1, max_size=3),
    method=st.sampled_from(["plain", "nesterov", "adam"]),
    decay=st.sampled_from([0.0, 0.2]),
    maximize=st.booleans(),
    steps=st.sampled_from([2, 40]),  # with 2 the weights leave their reach, and S grows
    elsewhere=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_centred_steps_are_those_of_torch(
    p: float, dtype: torch.dtype, counts: list[int], method: str, decay: float, maximize: bool,
    steps: int, elsewhere: bool, seed: int,
) -> None:  # fmt: skip
    """u and S follow those of the torch path; w is w0 + S (u/S)^(1/(p-1)), computed in float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=generator)  # noqa: E731
    start = [draw(n).to(dtype) for n in counts]
    for w in start:
        w[: len(w) // 9] = -0.0
    centers = [(w + 0.1 * draw(len(w))).to(dtype) for w in start] if elsewhere else "init"
    gradients = [[draw(n).to(dtype) for n in counts] for _ in range(3)]
    for gs in gradients[0], gradients[2]:
        for g in gs:
            g[::5] = 0
            g[-2:-1] = torch.nan
    options: dict[str, Any] = {"geometry": p, "center": centers, "weight_decay": decay}
    options |= {"maximize": maximize, "error_if_nonfinite": False}
    cls: Any = MirrorAdam if method == "adam" else MirrorDescent
    options |= {"lr": 0.5, "steps": steps} if method == "adam" else {"lr": 2 / steps}
    options |= {"momentum": 0.9, "nesterov": True} if method == "nesterov" else {}
    pairs = []
    for how in ({}, {"foreach": False}):
        params = [nn.Parameter(w.clone()) for w in start]
        pairs.append((params, build(cls, params, **options, **how)))
    wide = torch.promote_types(dtype, torch.float32)
    eps = torch.finfo(wide).eps
    exponent = inverse_exponent(p)
    for gs in gradients:
        for params, optimizer in pairs:
            for param, g in zip(params, gs, strict=True):
                param.grad = g.clone()
            optimizer.step()
        (ours, native_one), (theirs, torch_one) = pairs
        for a, b in zip(ours, theirs, strict=True):
            mine, other = native_one.state[a], torch_one.state[b]
            u, scale = mine["dual"].double(), float(mine["scale"])
            assert scale == pytest.approx(float(other["scale"]), rel=32 * eps)
            apart = (u - other["dual"].double()).abs()
            assert (apart <= 32 * eps * (scale + u.abs()) * max(1, p)).all()
            x = u / scale
            change = scale * x.abs().pow(exponent).copysign(x)
            want = mine["center"].double() + change
            slack = (4 + 2 * exponent) * eps * change.abs() + 2 * torch.finfo(wide).tiny
            slack += 1.01 * torch.finfo(dtype).eps * want.abs() + tiny_of(dtype)
            assert ((a.detach().double() - want).abs() <= slack).all()


def tiny_of(dtype: torch.dtype) -> float:
    """The gap between subnormal numbers of a dtype."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def centred(dtype: torch.dtype = torch.float32, count: int = 5000, **options) -> tuple:
    weights = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    param = nn.Parameter(weights.clone())
    options = {"lr": 0.5, "steps": 4, "geometry": 1.1, "center": "init", **options}
    return param, build(MirrorAdam, [param], **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [1.1, 1.3, 1.5, 2.0, 3.0])
def test_a_centred_weight_without_checksums_does_not_look_edited(
    p: float, dtype: torch.dtype
) -> None:
    """As after loading a checkpoint; past step 4 the scale grows at every step."""
    (a, with_sums), (b, without) = centred(dtype, geometry=p), centred(dtype, geometry=p)
    for seed in range(7):
        advance(a, with_sums, 0 if seed < 6 else 1)
        without._forget()
        advance(b, without, 0 if seed < 6 else 1)
        assert torch.equal(a, b)
    assert float(with_sums.state[a]["scale"]) > 0.5
    assert torch.equal(with_sums.state[a]["dual"], without.state[b]["dual"])


@pytest.mark.parametrize("what", ["weight", "center", "both", "dual", "scale"])
def test_edits_of_centred_weights_and_their_state_are_noticed(what: str) -> None:
    """The next step, without a gradient, leaves every weight where it is."""
    param, optimizer = centred(steps=40)
    advance(param, optimizer, 0)
    state = optimizer.state[param]
    before = state["dual"].clone()
    with torch.no_grad():
        if what == "weight":
            param[4000] += 0.5
        elif what == "center":
            state["center"][4000] -= 0.5
        elif what == "both":
            first = param[4000].clone()
            param[4000] = state["center"][4000] + 0.25
            state["center"][4000] = first
        elif what == "dual":
            del state["dual"]
        else:
            state["scale"].mul_(2)
    state["exp_avg"].zero_()
    edited = param.detach().clone()
    advance(param, optimizer, 1, 0.0)
    torch.testing.assert_close(param.detach(), edited, rtol=0, atol=1e-6)
    if what in ("weight", "center", "both"):
        assert state["dual"][4000] != before[4000]
        assert torch.equal(state["dual"][:4000], before[:4000])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_a_centred_step(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            param, optimizer = centred(dtype, 200_001)
            for seed in range(2):
                advance(param, optimizer, seed)
            results.append((param, optimizer.state[param]["scale"]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@pytest.mark.parametrize("layout", ["transposed", "gaps", "center", "gradient"])
def test_layouts_of_centred_weights(layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    plain, center, grad = (torch.randn(6, 4, 5, generator=generator) for _ in range(3))
    turned = lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)  # noqa: E731
    weight = plain.clone()
    if layout == "transposed":
        weight = turned(plain)
    elif layout == "gaps":
        weight = torch.stack([plain, plain], -1)[..., 0]
    params = [nn.Parameter(plain.clone()), nn.Parameter(weight)]
    for k, param in enumerate(params):
        around = turned(center) if k and layout == "center" else center.clone()
        optimizer = CenteredAdam([param], 1.5, reach=0.3, center=[around], total_steps=2)
        for _ in range(3):
            param.grad = turned(grad) if k and layout == "gradient" else grad.clone()
            optimizer.step()
    torch.testing.assert_close(params[1], params[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_at_p_2_is_sgd_to_the_last_element(
    dtype: torch.dtype, momentum: float
) -> None:
    """torch's fused SGD reads beyond the end where the length is no multiple of its vectors."""
    for count in (1, 3, 17, 1025):
        generator = torch.Generator().manual_seed(count)
        weights, *gradients = (torch.randn(count, generator=generator).to(dtype) for _ in range(4))
        params = [nn.Parameter(weights.clone()) for _ in range(2)]
        optimizers = [
            MirrorDescent([params[0]], lr=0.1, geometry=2, momentum=momentum),
            torch.optim.SGD([params[1]], lr=0.1, momentum=momentum, foreach=False),
        ]
        for g in gradients:
            for param, optimizer in zip(params, optimizers, strict=True):
                param.grad = g.clone()
                optimizer.step()
        # Three roundings of the weight, and as many of the momentum.
        slack = 3 * torch.finfo(dtype).eps * float(weights.abs().max() + 1)
        torch.testing.assert_close(*params, rtol=0, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_p_2_is_torchs_sgd_to_the_bit(dtype: torch.dtype, maximize: bool, decay: float) -> None:
    for count in (0, 1, 17, 1025, 5000):
        generator = torch.Generator().manual_seed(count)
        weights, *gradients = (torch.randn(count, generator=generator).to(dtype) for _ in range(4))
        params = [nn.Parameter(weights.clone()) for _ in range(2)]
        ours = MirrorDescent(
            [params[0]], lr=0.37, geometry=2, weight_decay=decay, maximize=maximize
        )
        theirs = torch.optim.SGD([params[1]], lr=0.37, maximize=maximize)
        for g in gradients:
            for param in params:
                param.grad = g.clone()
            params[1].data.mul_(1 - 0.37 * decay)  # decoupled, as ours is
            ours.step()
            theirs.step()
            assert torch.equal(*params)


def test_state_of_large_parameters_starts_at_zero_and_is_saved_alone(tmp_path) -> None:
    """It lies in memory of its own, in huge pages where there are any."""
    param = nn.Parameter(torch.randn(1100, 1000))
    optimizer = MirrorAdam([param], lr=0.0, geometry=1.5, knee=None)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    state = optimizer.state[param]
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].shape == param.shape and not state[name].any()
    torch.testing.assert_close(
        state["dual"].abs().square(), param.detach().abs(), check_stride=True
    )
    torch.save(state["dual"], tmp_path / "dual.pt")
    assert (tmp_path / "dual.pt").stat().st_size < 4.5e6
