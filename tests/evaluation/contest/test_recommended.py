"""One verdict: a head is recommended only where test shows that it wins, whatever dev says of it."""

import json
import os
import re

import numpy as np
import pytest

from configs.schema import Config, DecodeConfig, HeadsConfig, ModelSource, PairConfig
from decode.experiment import Experiment
from decode.loop.rounds import Counts
from decode.policies import CumulativeTokenProb, FixedLength, HeadPolicy
from evaluation.competitor import Competitor
from evaluation.contest import Arm, Replays
from evaluation.gain import Splits
from evaluation.played import Played, joined
from evaluation.report.verdict import pooled, recommend, write_verdict
from evaluation.times import Times
from heads import AcceptanceHead

COST, NUM = Times.constant(0.2, 1.0), 40
HEAD = HeadPolicy(AcceptanceHead(96, 0, "drawn"))
KINDS = {
    "fixed_length": Competitor("fixed_length", "fixed_length", FixedLength(), ({"k": 2}, {"k": 3})),
    "cumulative_token_prob": Competitor(
        "cumulative_token_prob", "cumulative_token_prob", CumulativeTokenProb(), ({"min_token_prob": 0.25},)
    ),
    "head": Competitor("head_drawn", "head:it", HEAD, ({"max_rejection_prob": 0.5}, {"max_rejection_prob": 0.125})),
}


def played(speed: float, num_settings: int, seed: int) -> Played:
    """Settings whose last one has this speed, give or take 5 % a prompt, and the others nine tenths of it."""
    noise = np.random.default_rng(seed).normal(1, 0.05, size=(num_settings, NUM))
    noise /= noise.mean(1, keepdims=True)
    slower = np.where(np.arange(num_settings) < num_settings - 1, 1 / 0.9, 1)[:, None]
    rounds = (100_000 / speed * noise * slower).round()
    counts = Counts(num_emitted=np.full(rounds.shape, 1000), num_target=rounds, num_draft_forwards=0 * rounds)
    return Played(counts, np.rint(rounds[..., None]).astype(int), np.arange(NUM))


def replays_at(**speeds: float) -> Replays:
    arms = [
        Arm(grid, *(played(speeds[name], len(grid.settings), 10 * place + split) for split in (1, 2)))
        for place, (name, grid) in enumerate(KINDS.items())
        if name in speeds
    ]
    return Replays(Splits(None, None), arms)


@pytest.fixture
def experiment(tmp_path):
    AcceptanceHead(96, 0, "drawn").save_pretrained(tmp_path / "exported" / "it")
    pair = PairConfig(**{name: ModelSource(path=f"checkpoints/tiny/{name}") for name in ("target", "draft")})
    dirs = {"heads": HeadsConfig(dir=str(tmp_path)), "decode": DecodeConfig(dir=str(tmp_path / "decode"))}
    return Experiment(Config(pair=pair, **dirs))


HEAD_SPEC = "head:{},max_rejection_prob=0.125"


@pytest.mark.parametrize(
    ("free", "head", "policy", "says"),
    [
        (99, 97, "fixed_length:k=3", r"Use fixed length 3: no head beats it here, -\d % \(-\d, -\d\)\."),
        (99, 100.5, "fixed_length:k=3", r"Use fixed length 3: no head beats it beyond chance, \+\d % \(-\d, \d\)\."),
        (99, None, "fixed_length:k=3", r"Use fixed length 3: no head takes part \(`acceptance-heads train` and .*\)\."),
        (110, 109, "cumulative_token_prob:min_token_prob=0.25", "Use product .* at 0.25: .* over fixed length 3; no h"),
        (99, 120, HEAD_SPEC, r"Use head it at 0.125: \+\d+ % \(\d+, \d+\) over fixed length 3\."),
        (110, 120, HEAD_SPEC, r"Use head it at 0.125: .* over product of token prob.* 0.25\."),
    ],
)
def test_what_is_recommended_wins_beyond_chance_and_generate_follows(experiment, free, head, policy, says):
    speeds = {"fixed_length": 100, "cumulative_token_prob": free} | ({} if head is None else {"head": head})
    verdict = recommend(pooled([replays_at(**speeds)], COST), experiment)
    assert verdict["policy"] == policy.format(experiment.exported / "it")
    assert re.match(says, verdict["sentence"])
    gain = "as the best fixed length, 3" if policy.startswith("fixed") else " % ("
    assert gain in verdict["speed"]
    write_verdict(verdict, experiment.directory)
    assert experiment.default_policy == (verdict["policy"], f"{verdict['sentence']} It is {verdict['speed']}")
    assert experiment.policy(verdict["policy"])


def test_a_verdict_over_several_sets_is_that_of_all_prompts_together(experiment):
    """One set is for the head and twice as slow, so that it decides."""
    every = [replays_at(fixed_length=100, head=98), replays_at(fixed_length=50, head=60)]
    whole = joined([replays.arms[1].test for replays in every])
    tokens, seconds = (
        np.concatenate(parts, axis=1) for parts in zip(*(COST.throughput(r.arms[1].test) for r in every), strict=True)
    )
    assert all(map(np.array_equal, COST.throughput(whole), (tokens, seconds)))
    assert recommend(pooled(every, COST), experiment)["sentence"].startswith("Use head it at 0.125: +12 %")


def test_a_verdict_that_is_out_of_date_is_not_followed(experiment):
    verdict = recommend(pooled([replays_at(fixed_length=100, head=120)], COST), experiment)
    path = write_verdict(verdict, experiment.directory)
    verdict = json.loads(path.read_text())
    assert experiment.default_policy.reason.startswith("Use ")
    for change in ({"of": experiment.identity | {"sampling": {}}}, {"head": "runs/gone"}, {}):
        path.write_text(json.dumps(verdict | change))
        if not change:  # the head is newer
            os.utime(experiment.exported / "it" / "model.safetensors", (path.stat().st_mtime + 5,) * 2)
        del experiment.default_policy  # which is read once
        assert "Use " not in experiment.default_policy.reason
