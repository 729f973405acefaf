"""`heads.reached`: a token of a draft is weighted by the probability that verification reaches it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from heads.command import load_sweep
from heads.grid import HeadShape, Inputs
from heads.measures.survival import reach_of
from heads.training.command import train
from heads.training.loss import Targets, weighted_bce
from heads.training.stack import HeadStack
from store.shards import write_shard
from tests.toys.made_up import HIDDEN, make_config


def test_the_reach_of_a_token_is_the_product_of_the_acceptance_probs_before_it_in_its_draft(data_dir, tmp_path):
    prob = torch.tensor([0.5, 0.2, 0.9, 0.0, 0.3, 0.7])
    reach = reach_of(prob, torch.tensor([3, 1, 2]))
    torch.testing.assert_close(reach, torch.tensor([1.0, 0.5, 0.1, 1.0, 1.0, 0.3]))
    assert len(reach_of(prob[:0], torch.zeros(0, dtype=torch.long))) == 0  # of several processes one may have no draft
    with pytest.raises(ValueError, match=r"heads.reached is true, but .* a feature draft.*set heads.reached to false"):
        train(make_config(data_dir, tmp_path, reached=True))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_token_of_weight_three_counts_as_three_tokens(depth):
    torch.manual_seed(0)
    stack = HeadStack(HeadShape("drawn", Inputs(), depth), (1.0, 6.0), hidden_size=HIDDEN, seed=0)
    hidden, prob, counts = torch.randn(9, HIDDEN), torch.rand(9), torch.tensor([1, 3, 0, 2, 1, 1, 0, 4, 1])
    accept, reject = torch.ones(2), torch.tensor([1.0, 6.0])
    weighed = Targets.of(prob, accept, reject, counts.float())
    copies = hidden.repeat_interleave(counts, 0)
    repeated = Targets.of(prob.repeat_interleave(counts), accept, reject)
    torch.testing.assert_close(weighted_bce(stack(hidden), weighed), weighted_bce(stack(copies), repeated))
    grads = []
    for features, targets in ((hidden, weighed), (copies, repeated)):
        stack.zero_grad()
        stack.loss(features, targets=targets).sum().backward()
        grads.append([parameter.grad.clone() for parameter in stack.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def drafts_in(data_dir: Path, directory: Path, *, seed: int | None) -> Path:
    """Data of a feature draft whose second tokens are surely rejected; a seed changes the labels after them."""
    shutil.copytree(data_dir, directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"draft_length": 7}))
    for path in sorted((directory / "labels").glob("*.safetensors")):
        tensors = load_file(path)
        firsts = tensors["row_offsets"][:-1]
        tensors["acceptance_prob"][firsts + 1] = 0.0
        is_after = torch.ones(len(tensors["token"]), dtype=torch.bool)
        is_after[firsts] = is_after[firsts + 1] = False
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            tensors["acceptance_prob"][is_after] = torch.rand(int(is_after.sum()), generator=generator)
        write_shard(path, save(tensors), rows=len(firsts), tokens=len(is_after))
    return directory


def test_labels_after_a_rejected_token_change_nothing(data_dir, tmp_path):
    weights = {}
    for reached in (True, False):
        for seed in (None, 1):
            name = f"{reached}-{seed}"
            data = drafts_in(data_dir, tmp_path / name, seed=seed)
            settings = {"timings": ("drawn",), "depths": (1,), "trainer": {"max_epochs": 1, "limit_test_batches": 1}}
            config = make_config(data, tmp_path / "runs" / name, reached=reached, **settings)
            train(config)
            sweep = load_sweep(Path(config.heads.dir) / "last.ckpt")
            of_heads = [t.flatten() for head in sweep.heads().values() for t in head.state_dict().values()]
            weights[name] = torch.cat([*of_heads, sweep.temperature.float()])
    torch.testing.assert_close(weights["True-None"], weights["True-1"])
    assert not torch.allclose(weights["False-None"], weights["False-1"], atol=1e-2)
