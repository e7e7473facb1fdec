"""Centred groups: close to the center in the p-norm, safe steps, unchanged weights to the bit."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import reference
from mirrorhead import CenteredAdam, MirrorDescent, Schatten, attention_param_groups

# The C library, the default on a CPU, and torch, the reference.
each_implementation = pytest.mark.parametrize("how", [{}, {"foreach": False}], ids=["c", "torch"])
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (MirrorDescent, {"lr": 0.05}),
    (CenteredAdam, {"reach": 0.5, "total_steps": 20}),
]
each_optimizer = pytest.mark.parametrize(("cls", "options"), CLASSES, ids=["descent", "adam"])


def train(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for gs in gradients:
        for param, g in zip(params, gs, strict=True):
            param.grad = g.to(param.dtype)
        optimizer.step()


def random_gradients(
    shapes: list[tuple[int, ...]], steps: int, seed: int = 0
) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator) for s in shapes] for _ in range(steps)]


@each_implementation
@settings(max_examples=12)
@given(
    st.sampled_from([1.05, 1.1, 1.5, 2.0, 3.0]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([2, 30]),
    st.booleans(),
    st.integers(0, 100),
)
def test_agrees_with_the_formula(
    how: dict[str, Any], p: float, decay: float, steps: int, elsewhere: bool, seed: int
) -> None:
    """In float64, within its reach and beyond it, from the center and from elsewhere."""
    torch.manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(4, 3), (), (0,), (5,)]
    start = [torch.randn(s, dtype=torch.float64) for s in shapes]
    centers = [w + 0.1 * torch.randn_like(w) for w in start] if elsewhere else start
    gradients = random_gradients(shapes, 6, seed)
    common: dict[str, Any] = {"geometry": p, "weight_decay": decay, "center": centers, **how}

    params = [nn.Parameter(w.clone()) for w in start]
    train(CenteredAdam(params, reach=0.3, total_steps=steps, **common), gradients)
    expected = reference.centered(
        start, gradients, p, 0.3, 0.3 / steps, centers, (0.9, 0.999), decay
    )
    for got, want in zip(params, expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-13)

    params = [nn.Parameter(w.clone()) for w in start]
    train(MirrorDescent(params, lr=0.4, **common), gradients)
    expected = reference.centered(start, gradients, p, 1.0, 0.4, centers, None, decay)
    for got, want in zip(params, expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-13)


@each_optimizer
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_that_rounds_away_leaves_the_bits_of_the_center(
    cls: Any, options: dict[str, Any], how: dict[str, Any], dtype: torch.dtype
) -> None:
    base = torch.cat([torch.randn(500), torch.tensor([0.0, -0.0, 1e-7, 3.0])]).to(dtype)
    param = nn.Parameter(base.clone())
    optimizer = cls([param], geometry=1.1, center="init", **options, **how)
    train(optimizer, random_gradients([(504,)], 8))
    bits = {2: torch.int16, 4: torch.int32}[base.element_size()]
    same = param.detach().view(bits) == base.view(bits)
    assert 0.2 < same.float().mean() < 1  # most changes round away; not all
    assert torch.equal(same, param.detach() == base)  # equal is equal to the bit
    u = optimizer.state[param]["dual"]
    scale = float(optimizer.state[param]["scale"])
    change = scale * reference.inverse(u.double() / scale, 1.1)
    assert same[(base.double() + change).to(dtype) == base].all()


@pytest.mark.parametrize(
    ("steps", "lr", "p"),
    [
        *product([10, 100], [0.05, 0.5, 1.5], [1.05, 1.1, 1.5]),
        pytest.param(1000, 0.5, 1.05, marks=pytest.mark.slow),
        pytest.param(1000, 0.5, 1.5, marks=pytest.mark.slow),
    ],
)
def test_a_weight_moves_as_far_as_its_reach(p: float, lr: float, steps: int) -> None:
    """A gradient of one sign: neither explodes nor stands still, whatever p and the length."""
    param = nn.Parameter(torch.randn(3))
    start = param.detach().clone()
    optimizer = CenteredAdam([param], p, reach=lr, total_steps=steps)
    sizes = []
    for _ in range(2 * steps):
        param.grad = torch.full_like(param, -1.0)
        optimizer.step()
        sizes.append(float((param.detach() - start).abs().max()))
    full = min(steps, 8 * steps**0.5)  # long runs count as shorter ones
    assert sizes[round(full) - 1] == pytest.approx(lr, rel=0.02)
    assert sizes == sorted(sizes)
    assert sizes[-1] <= 2 * steps / full * lr * 1.01  # twice as long: twice as far, no more


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_to_the_bit(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(4, 3), (7,)]
    base = [torch.randn(s).to(dtype) for s in shapes]

    def fresh(at: list[Tensor]) -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(x.clone()) for x in at]
        rest = {"params": params[1:], "geometry": 1.5, "center": None, "lr": 0.05}
        groups = [{"params": params[:1]}, rest]
        return params, cls(groups, geometry=1.1, center="init", **options)

    gradients = random_gradients(shapes, 8)
    params, optimizer = fresh(base)
    train(optimizer, gradients[:4])
    saved = [param.detach().clone() for param in params], pickle.dumps(optimizer.state_dict())
    copied = copy.deepcopy((params, optimizer))
    train(optimizer, gradients[4:])

    others, resumed = fresh(saved[0])
    resumed.load_state_dict(pickle.loads(saved[1]))
    assert torch.equal(resumed.state[others[0]]["center"], base[0])
    assert resumed.state[others[0]]["center"].dtype == dtype
    assert "center" not in resumed.state[others[1]]
    for its_params, its_optimizer in ((others, resumed), copied):
        train(its_optimizer, gradients[4:])
        assert all(torch.equal(a, b) for a, b in zip(params, its_params, strict=True))


@each_optimizer
@pytest.mark.parametrize("how", [{}, {"foreach": True}], ids=["native", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_a_center_does_not_move_with_the_tensors_it_was_given_as(
    cls: Any, options: dict[str, Any], how: dict[str, Any], dtype: torch.dtype, as_list: bool
) -> None:
    """An average of weights or a teacher moves during training, before the first step too."""
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=dtype)
        teacher = {name: value + 0.25 for name, value in model.state_dict().items()}
        start = {name: value.clone() for name, value in teacher.items()}
        center = list(teacher.values()) if as_list else teacher
        optimizer = cls(model.named_parameters(), center=center, **options, **how)
        for _ in range(3):
            for value in teacher.values():
                value.mul_(0.5 if moves else 1)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        for name, param in model.named_parameters():
            assert torch.equal(optimizer.state[param]["center"], start[name])
        # ... nor is it in the options of a checkpoint, where it would be saved twice.
        assert optimizer.state_dict()["param_groups"][0]["center"] == "given"
        ends.append([param.detach() for param in model.parameters()])
    assert all(map(torch.equal, *ends))


@each_optimizer
def test_the_models_own_state_dict_does_not_move_with_the_weights(
    cls: Any, options: dict[str, Any]
) -> None:
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    base = models[0].weight.detach().clone()
    for model, center in zip(models, ("init", models[1].state_dict()), strict=True):
        optimizer = cls(model.named_parameters(), center=center, **options)
        for _ in range(3):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        assert torch.equal(optimizer.state[model.weight]["center"], base)
    assert torch.equal(models[0].weight, models[1].weight)


@each_optimizer
@pytest.mark.parametrize("start", [None, "init"])
def test_a_center_that_is_set_in_a_group(
    cls: Any, options: dict[str, Any], start: str | None
) -> None:
    param = nn.Parameter(torch.randn(20))
    optimizer = cls([param], center=start, **options)
    train(optimizer, random_gradients([(20,)], 2))
    center = param.detach() + 0.1
    optimizer.param_groups[0]["center"] = [center]
    before = param.detach().clone()
    if cls is CenteredAdam:
        optimizer.state[param]["exp_avg"].zero_()
    train(optimizer, [[torch.zeros(20)]])
    assert torch.equal(optimizer.state[param]["center"], center)
    torch.testing.assert_close(param.detach(), before, rtol=0, atol=1e-6)
    assert optimizer.state_dict()["param_groups"][0]["center"] == "given"
    optimizer.param_groups[0]["center"] = [torch.ones(3)]
    with pytest.raises(ValueError, match=r"tensor of shape \(20,\), got \(3,\)"):
        train(optimizer, [[torch.zeros(20)]])


@pytest.mark.parametrize("tensor", [False, True])
def test_lr_is_a_share_of_the_full_rate_and_the_reach_stays(tensor: bool) -> None:
    """A schedule changes how fast weights move, and nothing else."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    lr = torch.tensor(1.0) if tensor else 1.0
    optimizer = CenteredAdam([param], 2, reach=0.5, total_steps=10, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.25 if k else 1.0)
    at = []
    for _ in range(3):
        train(optimizer, [[torch.full((4,), -1.0)]])
        scheduler.step()
        at.append(float(param.detach()[0]))
    assert at == pytest.approx([0.05, 0.0625, 0.075], rel=1e-6)
    assert float(optimizer.state[param]["scale"]) == 0.5


@each_optimizer
@pytest.mark.parametrize("p", [1.1, 1.5])
def test_edits_and_a_new_p(cls: Any, options: dict[str, Any], p: float) -> None:
    param = nn.Parameter(torch.randn(40))
    base = param.detach().clone()
    optimizer = cls([param], geometry=p, center="init", **options)
    train(optimizer, random_gradients([(40,)], 5))
    param.data[:10] = base[:10]  # pruned back to the base
    param.data[10:20] += 0.01
    edited = param.detach().clone()
    if cls is CenteredAdam:
        optimizer.state[param]["exp_avg"].zero_()
    train(optimizer, [[torch.zeros(40)]] * 2)
    torch.testing.assert_close(param.detach(), edited, rtol=0, atol=1e-6)
    assert torch.equal(param[:20], edited[:20])
    optimizer.param_groups[0]["geometry"] = 1.3
    train(optimizer, [[torch.zeros(40)]] * 2)
    torch.testing.assert_close(param.detach(), edited, rtol=0, atol=1e-6)
    optimizer.param_groups[0]["center"] = None
    train(optimizer, [[torch.zeros(40)]] * 2)
    torch.testing.assert_close(param.detach(), edited, rtol=0, atol=1e-6)
    assert "center" not in optimizer.state[param]


def test_groups_of_attention() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0)
    groups = attention_param_groups(model, geometry=1.1, rest={"geometry": 2.0, "lr": 1e-3})
    groups[0].update(reach=0.5, total_steps=10)
    groups[1]["center"] = None
    optimizer = CenteredAdam(groups)
    model(torch.randn(2, 3, 8)).square().sum().backward()
    optimizer.step()
    assert "center" in optimizer.state[model.self_attn.in_proj_weight]
    assert "center" not in optimizer.state[model.linear1.weight]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"total_steps": None}, TypeError, "CenteredAdam needs total_steps"),
        ({"total_steps": 0}, ValueError, "total_steps must be greater than 0"),
        ({"reach": None}, TypeError, "CenteredAdam needs reach"),
        ({"reach": 0.0}, ValueError, "reach must be greater than 0"),
        ({"geometry": Schatten(1.5)}, ValueError, r"center needs a p-norm, got .*Centered"),
        ({"center": "start"}, ValueError, 'center must be None, "init", a state dict or a list'),
        ({"center": 3}, TypeError, "center must be None.* got int"),
        ({"center": []}, ValueError, "0 tensors for a group of 1 parameters"),
        ({"center": [torch.ones(3)]}, ValueError, r"tensor of shape \(2,\), got \(3,\)"),
        ({"center": [torch.tensor([1.0, torch.nan])]}, ValueError, "has inf or NaN"),
        ({"center": {"weight": torch.ones(2)}}, ValueError, "the parameters need names"),
    ],
)  # fmt: skip
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=message):
        CenteredAdam([param], **{"reach": 0.5, "total_steps": 5, **options})
    with pytest.raises(ValueError, match="cannot be used with center: unchanged"):
        MirrorDescent([param], center="init", stochastic_rounding=True)
    with pytest.raises(ValueError, match="keep_dual=False cannot be used with center"):
        MirrorDescent([param], center="init", keep_dual=False)
    with pytest.raises(ValueError, match="center has no tensor for 'w'"):
        MirrorDescent([("w", param)], lr=0.1, center={"v": torch.ones(2)})


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.2, 1.5, 3.0])
def test_of_all_solutions_the_closest_to_the_center(p: float) -> None:
    """Underdetermined linear regression: the limit minimises ||w - w0||_p, by cvxpy."""
    rng = np.random.default_rng(0)
    a, b, w0 = rng.normal(size=(4, 12)), rng.normal(size=4), rng.normal(size=12)
    variable = cvxpy.Variable(12)
    distance = cvxpy.pnorm(variable - w0, p)  # pyright: ignore[reportArgumentType]
    cvxpy.Problem(cvxpy.Minimize(distance), [a @ variable == b]).solve(solver="CLARABEL")

    features, labels = torch.tensor(a), torch.tensor(b)
    param = nn.Parameter(torch.tensor(w0))
    optimizer = MirrorDescent([param], lr=0.01, geometry=p, center="init")
    for _ in range(6000):
        param.grad = features.T @ (features @ param.detach() - labels)
        optimizer.step()
    assert (features @ param.detach() - labels).abs().max() < 1e-8
    closest = torch.tensor(np.asarray(variable.value))
    torch.testing.assert_close(param.detach(), closest, rtol=0, atol=2e-4)
