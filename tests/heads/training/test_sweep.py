"""A stack is its heads: same logits, gradients and weights after training. Law 4.7: the loss and its optimum."""

import math
from contextlib import suppress

import pytest
import torch

from configs.schema import HeadsConfig
from heads.grid import grid, specs
from heads.model.formula import Scaling
from heads.model.head import HeadShape
from heads.model.inputs import Inputs
from heads.training import loss as loss_module
from heads.training.loss import Targets, weighted_bce
from heads.training.stack import HeadStack

WEIGHTS = (1.0, 3.0, 6.0)


def random_stack(
    depth: int, scalars: bool = False, embedding: bool = False, dropout: float = 0.0, **inputs: bool
) -> HeadStack:
    """Three heads of width 8 with random weights, on columns with random means and deviations."""
    shape = HeadShape("drawn", Inputs.of(scalars, embedding, **inputs), depth)
    stack = HeadStack(shape, WEIGHTS, dropout, hidden_size=8, seed=0)
    means = [torch.randn(width) for width in (8, stack.shape.inputs.width(8))]
    stack.standardise(*(Scaling(mean, torch.rand_like(mean) * 3 + 0.5) for mean in means))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return stack


def tokens(stack: HeadStack, count: int = 75) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    inputs = stack.shape.inputs
    scalars = torch.randn(count, 3) - 2 if inputs.scalars else None
    return (torch.randn(count, 8), scalars, torch.randn(count, 8) if inputs.embedding else None), torch.rand(count)


def grads_of(loss: torch.Tensor, stack: HeadStack) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss.sum(), list(stack.parameters()))


def test_loss_is_the_formula_of_law_4_7():
    logit, prob = torch.randn(3, 7), torch.rand(7)
    reject = torch.tensor([1.0, 3.0, 12.0])
    targets = Targets.of(prob, reject)
    for head in range(3):
        r, yes = reject[head], logit[head].sigmoid()
        numerator = (prob * -yes.log() + r * (1 - prob) * -(1 - yes).log()).sum()
        expected = numerator / (prob + r * (1 - prob)).sum()
        assert float(weighted_bce(logit, targets)[head]) == pytest.approx(float(expected), rel=1e-5)
    doubled = targets._replace(mass=2 * targets.mass)
    torch.testing.assert_close(weighted_bce(logit, doubled), weighted_bce(logit, targets) / 2)


def test_population_optimum_is_logit_minus_log_of_the_weights():
    """With a reject weight of 6, a head whose true probability is 0.8 says 0.4."""
    reject = torch.tensor([1.0, 6.0, 12.0])
    for prob in (0.05, 0.5, 0.8, 0.99):
        logit = torch.zeros(3, 1, requires_grad=True)
        optimizer = torch.optim.LBFGS([logit], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)
        targets = Targets.of(torch.tensor([prob]), reject)

        def closure(logit=logit, optimizer=optimizer, targets=targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = weighted_bce(logit, targets).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        expected = math.log(prob / (1 - prob)) - reject.log()
        torch.testing.assert_close(logit.detach()[:, 0], expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(("scalars", "embedding"), [(False, False), (True, False), (False, True), (True, True)])
def test_stacked_logits_are_those_of_the_heads_alone_and_the_loss_by_chunks_is_that_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, depth: int, scalars: bool, embedding: bool
):
    """Also with dropout, within one chunk: the masks are drawn in the same order."""
    stack = random_stack(depth, scalars, embedding, dropout=0.4, is_normalised=embedding)
    of_head, prob = tokens(stack)
    inputs = stack.shape.inputs.read(*of_head)
    for index, logit in enumerate(stack(*inputs)):
        torch.testing.assert_close(stack.head(index)(*of_head), logit, rtol=1e-5, atol=1e-5)
    targets, scale = Targets.of(prob, torch.tensor(WEIGHTS)), torch.tensor([1.0, 0.5, 2.0])
    for step, least_chunk in ((None, 32), ((1, 2), 256)):
        monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)
        monkeypatch.setattr(loss_module, "LEAST_CHUNK", least_chunk)
        masks = [None if step is None else stack.dropout(*step) for _ in range(2)]
        whole = weighted_bce(stack(*inputs, masks[0]), targets)
        chunked = stack.loss(*inputs, targets=targets, dropout=masks[1])
        torch.testing.assert_close(chunked, whole)
        expected = grads_of(whole * scale, stack)
        torch.testing.assert_close(grads_of(chunked * scale, stack), expected, atol=1e-6, rtol=1e-4)


def test_the_same_step_drops_the_same_another_step_does_not_and_heads_without_blocks_drop_nothing():
    for depth in (0, 2):
        stack = random_stack(depth, dropout=0.4)
        (hidden, *_), _ = tokens(stack)
        first, again, other = (stack(hidden, dropout=stack.dropout(1, step)) for step in (2, 2, 3))
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        assert torch.allclose(first, other) == torch.allclose(first, stack(hidden)) == (depth == 0)
    masks = torch.stack([stack.dropout(7, step).mask(hidden[None].expand(1, 75, 8)) for step in range(60)])
    assert masks.mean() == pytest.approx(1.0, abs=0.02)
    assert masks.unique().tolist() == pytest.approx([0.0, 1 / 0.6])


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("scalars", [False, True])
def test_training_jointly_gives_the_weights_of_training_each_alone(depth: int, scalars: bool):
    """Same initial values, same data order; the separate arm is the plain `AcceptanceHead` under torch's own Adam."""
    stack = random_stack(depth, scalars)
    stack.standardise(stack.hidden_scaling.identity(), stack.input_scaling.identity())
    inputs, prob = tokens(stack, 400)
    alone = [stack.head(index) for index in range(len(WEIGHTS))]
    joint = torch.optim.Adam(stack.parameters(), lr=1e-3, fused=True)
    single = [torch.optim.Adam(head.parameters(), lr=1e-3) for head in alone]
    for start in range(0, 400, 8):
        part = slice(start, start + 8)
        batch = [None if values is None else values[part] for values in inputs]
        targets = Targets.of(prob[part], torch.tensor(WEIGHTS))
        joint.zero_grad()
        stack.loss(*stack.shape.inputs.read(*batch), targets=targets).sum().backward()
        joint.step()
        for head, optimizer, weight in zip(alone, single, WEIGHTS, strict=True):
            of_head = Targets.of(prob[part], torch.tensor([weight]))
            optimizer.zero_grad()
            weighted_bce(head(*batch)[None], of_head).sum().backward()
            optimizer.step()
    for index, head in enumerate(alone):
        torch.testing.assert_close(stack.head(index).state_dict(), head.state_dict(), atol=1e-6, rtol=0)


def test_initial_values_do_not_depend_on_the_rest_of_the_grid():
    few, many = (HeadStack(HeadShape("fed", Inputs(), 2), w, hidden_size=8, seed=0) for w in ((3.0,), (1.0, 3.0, 12.0)))
    torch.testing.assert_close(few.head(0).state_dict(), many.head(1).state_dict())


def test_an_impossible_grid_is_refused():
    token_before_it_is_drawn = {"timings": ("drawn", "prefix"), "scalars": (("log_token_prob",),)}
    for bad, message in (
        ({"depths": ()}, "heads.depths is empty"),
        ({"depths": (1, 1)}, "name each value once"),
        ({"depths": (-1,)}, "depth is -1"),
        ({"scalars": ()}, "heads.scalars is empty"),
        ({"dropout": ()}, "heads.dropout is empty"),
        (
            {"scalars": (True, ("log_token_prob", "entropy"))},
            r"\['log_token_prob', 'entropy'\], whose heads .* same name",
        ),
        (token_before_it_is_drawn, r"heads.timings has prefix, but every combination .* reads the token"),
    ):
        with pytest.raises(ValueError, match=message):
            grid(HeadsConfig(**bad))


def names_of(**settings) -> list[str]:
    return [str(spec) for spec in specs(HeadsConfig(**settings))]


def test_grid_is_every_combination_once_and_prefix_heads_take_what_is_known_before_the_draw():
    weights = {"depths": (0, 1, 2, 3, 4), "reject_weights": (1.0, 3.0, 6.0, 12.0), "embeddings": (False,)}
    names = names_of(timings=("fed", "drawn"), scalars=(False, True), dropout=(0.0,), **weights)
    assert len(names) == len(set(names)) == 2 * 2 * 5 * 4
    assert "drawn+s-d3-w12" in names
    dropped = names_of(timings=("fed", "drawn"), scalars=(False, True), dropout=(0.0, 0.2), **weights)
    assert len(dropped) == len(set(dropped)) == len(names) + 3 * 4 * 4, "neither linear heads nor the paper's"
    assert "drawn+s-d3-w12-drop0.2" in dropped
    default = ["drawn+s-d0-w1", *(f"drawn+s-d{depth}-w1{end}" for depth in (1, 2) for end in ("", "-drop0.2"))]
    assert names_of() == [*default, *(name.replace("+s", "+s+e") for name in default)]
    options = {"scalars": (False, True), "embeddings": (False, True), "depths": (1,), "dropout": (0.0,)}
    names = names_of(timings=("drawn", "prefix"), **options)
    assert [name for name in names if name.startswith("prefix")] == ["prefix-d1-w1", "prefix+s-d1-w1"]
    for timings, scalars in ((("fed", "drawn"), (True,)), (("drawn",), (False, True)), (("fed",), (False, True))):
        options = {"timings": timings, "scalars": scalars, "depths": (1,), "reject_weights": (1.0, 6.0)}
        options |= {"embeddings": (False,), "dropout": (0.0,)}
        others, every = (names_of(**options, specdec=is_on) for is_on in (False, True))
        assert len(every) == len(set(every))
        assert set(every) == {*others, "fed-d1-w1", "fed-d1-w6"}, "the paper's heads join once"


@pytest.mark.parametrize(
    ("device", "chosen", "inside"),
    [
        ("cuda", "highest", "high"),
        ("cuda", "medium", "medium"),
        ("cuda", "high", "high"),
        ("cpu", "highest", "highest"),
    ],
)
def test_products_run_in_tf32_on_gpus_alone_unless_the_program_chose_and_only_within_the_block(device, chosen, inside):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(chosen)
        with suppress(ZeroDivisionError), loss_module.tf32_products(torch.device(device)):
            assert torch.get_float32_matmul_precision() == inside
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before)
