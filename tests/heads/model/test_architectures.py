"""A new architecture is an entry of one table: that of docs/extending.md trains, is exported, and is scored alike in
every form.
"""

import pytest
import torch
from torch import nn

from configs.schema import HeadsConfig
from heads import AcceptanceHead
from heads.grid import grid, specs
from heads.model.formula import ARCHITECTURES, Scaling
from heads.model.head import HeadShape
from heads.model.inputs import Inputs
from heads.model.step import HostHead
from heads.training.loss import Targets, weighted_bce
from heads.training.stack import HeadStack
from tests.toys.extending import added_to


@pytest.fixture(autouse=True)
def _gated():
    with added_to(ARCHITECTURES, "ARCHITECTURES"):
        yield


def test_every_form_computes_the_same_logit(tmp_path):
    torch.manual_seed(0)
    head = AcceptanceHead(8, 2, "drawn", True, architecture="gated").double().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    hidden, scalars = torch.randn(5, 8).double(), torch.randn(5, 3).double()
    stream = hidden + head.mix(scalars)
    for block in head.blocks:
        stream = stream + nn.functional.silu(block.value(stream)) * block.gate(stream).sigmoid()
    expected = (head.out(stream) + head.skip(scalars)).squeeze(-1)
    torch.testing.assert_close(head(hidden, scalars), expected)
    on_host = HostHead(head)
    scores = [on_host.score(row.numpy(), pair.tolist()) for row, pair in zip(hidden, scalars, strict=True)]
    assert scores == pytest.approx(expected.tolist())
    head.float().save_pretrained(tmp_path)
    loaded = AcceptanceHead.from_pretrained(tmp_path)
    assert loaded.fingerprint() == head.fingerprint() != AcceptanceHead(8, 2, "drawn", True).fingerprint()
    assert "(gated)" in (tmp_path / "README.md").read_text()
    torch.testing.assert_close(loaded(hidden.float(), scalars.float()), expected.float())


def test_a_stack_of_it_has_the_loss_and_gradients_of_autograd_and_exports_itself():
    made = HeadStack(HeadShape("drawn", Inputs.of(True, False), 1, "gated"), (1.0, 6.0), hidden_size=8, seed=0)
    scaling = Scaling(torch.tensor([-2.0, 1.5, 0.5]), torch.tensor([0.3, 4.0, 1.0]))
    made.standardise(Scaling(torch.ones(8), torch.full((8,), 9.0)), scaling)
    assert not made.hidden_scaling.mean.any(), "its blocks say nothing of how to fold a scaling into them"
    hidden, scalars, prob = torch.randn(50, 8), torch.randn(50, 3), torch.rand(50)
    targets = Targets.of(prob, torch.tensor([1.0, 6.0]))
    losses = made.loss(hidden, scalars, targets=targets), weighted_bce(made(hidden, scalars), targets)
    grads = [torch.autograd.grad(loss.sum(), [*made.parameters()]) for loss in losses]
    torch.testing.assert_close([losses[0], *grads[0]], [losses[1], *grads[1]])
    for index in range(2):
        torch.testing.assert_close(made.head(index)(hidden, scalars), made(hidden, scalars)[index])


def test_the_grid_names_it_and_refuses_others():
    plain = {"embeddings": (False,), "dropout": (0.0,)}
    config = HeadsConfig(scalars=(True,), depths=(0, 2), reject_weights=(6.0,), specdec=True, **plain)
    with_both = HeadsConfig(**{**vars(config), "architectures": ("resnet", "gated")})
    names = ["fed-d0-w6", "fed-d2-w6", "drawn+s-d0-w6", "drawn+s-d2-w6"]
    assert [str(spec) for spec in specs(config)] == names
    assert [str(spec) for spec in specs(with_both)] == [*names, "drawn+s+gated-d2-w6"]
    with pytest.raises(ValueError, match="architecture is 'convolution'; use one of resnet, gated"):
        grid(HeadsConfig(architectures=("convolution",)))
