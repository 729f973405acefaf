"""What an evaluation must say of competitors whose worth is known beforehand. Each of these has failed somewhere in
published comparisons of adaptive draft lengths: a rule that cannot gain gained, or a bound was beaten.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from data_gen import make_data
from data_gen.prompts.stories import stories
from decode.experiment import Experiment
from decode.policies import FixedLength, HeadPolicy, Policy
from evaluation.competitor import Competitor, competitors_of
from evaluation.contest import Contest, Replays, fastest_on_dev, replay_arms
from evaluation.gain import Splits
from evaluation.report.tune import tuned_heads
from evaluation.traces.recording import trace_folder
from heads import AcceptanceHead
from heads.command import export
from heads.training.command import train
from store.shards import read_sidecar, write_shard
from tests.toys.times import flat_times, times_by_length

COSTS = [flat_times(0.1, 1.0), times_by_length(0.2, (1.0, 1.3, 1.5, 1.7, 1.9, 2.1), "measured")]
LONGEST = 5
TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"


@dataclass(frozen=True)
class Position(Policy):
    """Stop after so many tokens, as a policy that sees them all but reads none."""

    num: int = 3
    signals = frozenset({"token_prob"})

    def start(self):
        return (0.0,)

    def begin(self, state):
        return (0.0 * state[0],)

    def after(self, state, drawn):
        (num_drafted,) = state
        return (num_drafted + 1,), num_drafted + 1 >= self.num


def grid(family: str, policy: Policy, name: str, settings: list) -> Competitor:
    every = tuple({name: value} for value in settings)
    return Competitor(family, family, replace(policy, **{name: np.asarray(settings)}), every)


@pytest.mark.parametrize("cost", COSTS)
def test_a_policy_of_position_alone_and_another_arm_of_the_lengths_are_the_best_fixed_length(splits, cost):
    head = AcceptanceHead(16, 0, "drawn").eval()
    torch.nn.init.zeros_(head.out.weight)
    torch.nn.init.constant_(head.out.bias, 2.0)
    survival = [torch.sigmoid(torch.tensor(2.0)).item() ** num for num in range(LONGEST + 2)]
    thresholds = [1 - (survival[num] + survival[num + 1]) / 2 for num in range(LONGEST + 1)]
    lengths = list(range(1, LONGEST + 1))
    grids = [
        grid("fixed_length", FixedLength(), "k", lengths),
        grid("again", FixedLength(), "k", lengths),
        grid("position", Position(), "num", lengths),
        grid("constant_head", HeadPolicy(head), "max_rejection_prob", thresholds),
    ]
    results = fastest_on_dev(replay_arms(grids, splits), cost)
    for family in ("again", "position", "constant_head"):
        gain = results[family].over(results["fixed_length"])
        assert (gain.value, gain.low, gain.high) == pytest.approx((0, 0, 0), abs=1e-9), family
    assert results["again"].setting == results["fixed_length"].setting
    assert set(results["again"].over(results["fixed_length"])) == {0}


def tuned_on(traces, heads, cost):
    grids = competitors_of({}, heads, max_draft_length=traces.dev.max_draft_length, policies=("head",))
    replays = Replays(traces, list(replay_arms(grids, traces)))
    return tuned_heads(replays, Contest("made", cost, fastest_on_dev(replays.arms, cost)), names=heads)


@pytest.mark.slow
def test_a_head_of_shuffled_labels_gains_nothing_and_one_of_true_labels_does(tmp_path):
    prompts = [story.prompt for story in stories("train", 200)]
    made = make_data(prompts, target=f"{TINY}/target", draft=f"{TINY}/draft", dir=str(tmp_path), max_new_tokens=64)
    made = replace(made, decode=replace(made.decode, t_draft_s=0.001, t_target_s=0.005))
    gains, generator = {}, torch.Generator().manual_seed(0)
    for name in ("true", "shuffled"):
        for path in sorted((Path(made.data.dir) / "labels").glob("*.safetensors")) if name == "shuffled" else ():
            tensors = load_file(path)
            order = torch.randperm(len(tensors["token"]), generator=generator)
            tensors["acceptance_prob"] = tensors["acceptance_prob"][order]
            facts = {key: value for key, value in read_sidecar(path).items() if key not in ("shard", "bytes", "sha256")}
            write_shard(path, bytes(save(tensors)), **facts)
        settings = {"depths": (1,), "reject_weights": (1.0,), "scalars": (False,), "learning_rate": 5e-3}
        heads = replace(made.heads, dir=str(tmp_path / name), **settings)
        config = replace(made, heads=heads, trainer={"max_epochs": 4, "devices": 1})
        train(config)
        export(config, head="best", force=True)
        experiment = Experiment(config)
        folder = trace_folder(experiment)
        folder.complete()
        (dataset,) = experiment.datasets
        traces, cost = Splits(*folder.load(dataset)), flat_times(0.001, 0.005)
        gains[name] = tuned_on(traces, experiment.heads, cost)[0]["gain"]
    assert gains["true"].value > 0.05
    assert gains["shuffled"].value < 0.02
    assert not gains["shuffled"].is_above_noise
