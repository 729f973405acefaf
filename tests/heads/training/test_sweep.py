"""A stack is its heads: same logits, same gradients, same weights after training; nothing couples heads."""

import pytest
import torch

from configs.schema import HeadsConfig
from heads.grid import HeadShape, grid, specs
from heads.model.inputs import Inputs
from heads.training import loss as chunked_loss
from heads.training.loss import Targets, weighted_bce
from heads.training.stack import HeadStack
from heads.training.sweep import Sweep

WEIGHTS = (1.0, 3.0, 6.0)


def stack(depth: int, scalars: bool = False, weights: tuple[float, ...] = WEIGHTS) -> HeadStack:
    made = HeadStack(HeadShape("fed", Inputs.of(scalars, False), depth), weights, hidden_size=8, seed=0)
    made.scalar_mean.copy_(torch.tensor([-2.0, 1.5]))
    made.scalar_scale.copy_(torch.tensor([1.3, 0.7]))
    return made


def tokens(count: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(count, 8, generator=generator),
        torch.randn(count, 2, generator=generator) - 2,
        torch.rand(count, generator=generator),
    )


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(("scalars", "embedding"), [(False, False), (True, False), (False, True), (True, True)])
def test_loss_and_gradients_by_chunks_are_those_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, depth: int, scalars: bool, embedding: bool
):
    """Over several chunks, the last one shorter."""
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunked_loss, "LEAST_CHUNK", 32)
    made = HeadStack(HeadShape("fed", Inputs.of(scalars, embedding), depth), WEIGHTS, hidden_size=8, seed=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    (hidden, given, prob), other = tokens(75), torch.randn(75, 8)
    inputs = given if scalars else None, other if embedding else None
    targets = Targets.of(prob, torch.tensor([1.0, 2.0, 1.0]), torch.tensor(WEIGHTS))
    scale = torch.tensor([1.0, 0.5, 2.0])
    expected = weighted_bce(made(hidden, *inputs), targets)
    slow = torch.autograd.grad((expected * scale).sum(), list(made.parameters()))
    found = made.loss(hidden, *inputs, targets=targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad((found * scale).sum(), list(made.parameters())), slow, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("has_inputs", [False, True])
def test_the_loss_by_chunks_drops_what_that_of_the_batch_drops(depth: int, has_inputs: bool):
    """Within one chunk the masks are drawn in the same order; the same step drops the same, another step something
    else.
    """
    made = HeadStack(
        HeadShape("drawn", Inputs.of(has_inputs, has_inputs, is_normalised=True), depth), WEIGHTS, hidden_size=8, seed=0
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    (hidden, given, prob), other = tokens(75), torch.randn(75, 8)
    inputs = (given, other) if has_inputs else (None, None)
    targets = Targets.of(prob, torch.tensor([1.0, 2.0, 1.0]), torch.tensor(WEIGHTS))
    expected = weighted_bce(made(hidden, *inputs, made.dropout(0.4, 1, 2)), targets)
    slow = torch.autograd.grad(expected.sum(), list(made.parameters()))
    found = made.loss(hidden, *inputs, targets=targets, dropout=made.dropout(0.4, 1, 2))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), list(made.parameters())), slow, atol=1e-6, rtol=1e-4)
    without, another = made(hidden, *inputs), weighted_bce(made(hidden, *inputs, made.dropout(0.4, 1, 3)), targets)
    assert made.dropout(0.0, 1, 2) is None
    if depth:
        assert not torch.allclose(another, expected)
        masks = [made.dropout(0.4, 7, step).mask(hidden[None].expand(1, 75, 8)) for step in range(60)]
        assert torch.stack(masks).mean() == pytest.approx(1.0, abs=0.02)
        assert torch.stack(masks).unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    else:
        torch.testing.assert_close(weighted_bce(without, targets), expected)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("scalars", [False, True])
def test_stacked_logits_are_those_of_the_heads_alone(depth: int, scalars: bool):
    made, (hidden, given, _) = stack(depth, scalars), tokens()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    together = made(hidden, given if scalars else None)
    for index in range(len(WEIGHTS)):
        torch.testing.assert_close(
            made.head(index)(hidden, given if scalars else None), together[index], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("scalars", [False, True])
def test_training_jointly_gives_the_weights_of_training_each_alone(depth: int, scalars: bool):
    """Same initial values, same data order; the separate arm is the plain `AcceptanceHead` under torch's own Adam."""
    made, (hidden, given, prob) = stack(depth, scalars), tokens(400)
    standardised = (given - made.scalar_mean) / made.scalar_scale
    made.scalar_mean.zero_(), made.scalar_scale.fill_(1.0)
    alone = [made.head(index) for index in range(len(WEIGHTS))]
    joint = torch.optim.Adam(made.parameters(), lr=1e-3, fused=True)
    single = [torch.optim.Adam(head.parameters(), lr=1e-3) for head in alone]
    for step in range(50):
        part = slice(8 * step, 8 * step + 8)
        targets = Targets.of(prob[part], torch.ones(3), torch.tensor(WEIGHTS))
        loss = made.loss(hidden[part], standardised[part] if scalars else None, targets=targets)
        joint.zero_grad()
        loss.sum().backward()
        joint.step()
        for head, optimizer, weight in zip(alone, single, WEIGHTS, strict=True):
            logit = head(hidden[part], standardised[part] if scalars else None)[None]
            one = weighted_bce(logit, Targets.of(prob[part], torch.ones(1), torch.tensor([weight]))).sum()
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
    for index, head in enumerate(alone):
        for name, value in made.head(index).state_dict().items():
            torch.testing.assert_close(value, head.state_dict()[name], atol=1e-6, rtol=0)


def test_initial_values_do_not_depend_on_the_rest_of_the_grid():
    few, many = stack(2, weights=(3.0,)), stack(2, weights=(1.0, 3.0, 12.0))
    torch.testing.assert_close(few.head(0).state_dict(), many.head(1).state_dict())


def test_clipping_is_per_head():
    config = {"depths": [1], "reject_weights": [1.0, 6.0], "timings": ["fed"], "scalars": [False]}
    sweep = Sweep(config, {"hidden_size": 8, "scalar_stats": {}, "provenance": {}})
    (_, made), factors = sweep.items()[0], torch.tensor([10.0, 0.01])
    for parameter in made.parameters():
        parameter.grad = factors.view(-1, *[1] * (parameter.dim() - 1)).expand_as(parameter).clone()
    sweep.configure_gradient_clipping(None, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
    norms = torch.stack([parameter.grad.flatten(1).norm(dim=1) for parameter in made.parameters()]).norm(dim=0)
    assert float(norms[0]) == pytest.approx(1.0)
    assert float(norms[1]) == pytest.approx(0.01 * sum(p[1].numel() for p in made.parameters()) ** 0.5)


@pytest.mark.parametrize(
    "bad",
    [
        {"depths": ()},
        {"depths": (1, 1)},
        {"depths": (-1,)},
        {"reject_weights": (0.0,)},
        {"reject_weights": (float("nan"),)},
        {"scalars": ()},
    ],
)
def test_an_impossible_grid_is_refused(bad: dict):
    with pytest.raises(ValueError, match=r"depth|weight|scalars"):
        grid(HeadsConfig(**bad))


def test_grid_is_every_combination_once():
    shapes = grid(HeadsConfig(timings=("fed", "drawn"), scalars=(False, True)))
    names = [str(spec) for spec in specs(shapes)]
    assert len(names) == len(set(names)) == 2 * 2 * 5 * 4
    assert "drawn+s-d3-w12" in names


def test_prefix_heads_take_of_a_grid_what_is_known_before_the_draw():
    options = {"scalars": (False, True), "embeddings": (False, True), "depths": (1,), "reject_weights": (1.0,)}
    shapes = grid(HeadsConfig(timings=("drawn", "prefix"), **options))
    assert {str(spec) for spec in specs(shapes) if spec.shape.timing == "prefix"} == {
        "prefix-d1-w1",
        "prefix+entropy-d1-w1",
    }
    with pytest.raises(ValueError, match=r"heads.timings has prefix, but every combination .* reads the token"):
        grid(HeadsConfig(timings=("drawn", "prefix"), scalars=(("log_token_prob",),)))


@pytest.mark.parametrize("timings", [("fed", "drawn"), ("drawn",), ("fed",)])
@pytest.mark.parametrize("scalars", [(True,), (False, True)])
def test_the_papers_heads_join_a_grid_of_others_once(timings, scalars):
    options = {"timings": timings, "scalars": scalars, "depths": (1,), "reject_weights": (1.0, 6.0)}
    others, all_of_them = (
        {str(spec) for spec in specs(grid(HeadsConfig(**options, specdec=on)))} for on in (False, True)
    )
    assert all_of_them == others | {"fed-d1-w1", "fed-d1-w6"}
