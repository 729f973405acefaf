"""`acceptance-heads flags` against a search by real decoding, and transformers' own run on a clock.

    python -m benchmarks.flags --config FILE --for ENGINE [--prompts 24] [--split dev] [--t_draft_ms 1 --t_target_ms 5]
    python -m benchmarks.flags --config FILE --for transformers --clock 40

Every setting of a grid is decoded by the real loop under the engine's rule, on the same prompts, and its speed taken
from what was counted and the times; the printed setting is decoded beside them. `short_of_best` is how far its speed is
below that of the fastest decoded setting, and `replay_off` how far replay's speed on those prompts is from decoding's,
which at temperature 0 are the same but for argmaxes that rounding flips. With `--clock` transformers itself generates,
without an assistant, under its default and under the printed setting, in turns: what was gained stands beside what was
predicted. The last line is one JSON document.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import torch

from configs.command import run
from configs.schema import Config
from decode import SpeculativeDecoder
from decode.drafters.factory import PairModels
from decode.drafters.point_mass import PointMassDrafter
from decode.experiment import Experiment
from decode.policies.base import Policy
from decode.policies.registry import make_policy
from evaluation.bench.arms import Timed, Written
from evaluation.bench.schedules import assisted
from evaluation.contest.grids import label_of
from evaluation.costs.model import CostModel
from evaluation.flag_types import EngineName, Milliseconds
from evaluation.flags.choice import DEFAULT, FLAGS, NONE, Choice, Contest
from evaluation.flags.command import contest_for
from evaluation.flags.engines import ENGINES, of_generation_config
from evaluation.flags.times import given_times
from evaluation.intervals import Spent, gain_over
from evaluation.traces.replay import replay_settings
from evaluation.turns import in_turns

_SEARCHED: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "llama_cpp": {"n_max": (2, 3, 4, 6, 8, 12, 20), "n_min": (0, 2), "p_min": (0.0, 0.2, 0.4, 0.6, 0.8)},
    "assisted": {
        "num_assistant_tokens": (2, 4, 8, 20),
        "assistant_confidence_threshold": (0.0, 0.2, 0.4, 0.6, 0.8),
        "is_heuristic": (False, True),
    },
    "fixed_length": {"k": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)},
}
"""Settings that are decoded: rule -> parameter -> values."""


def flags(
    config: Config,
    *,
    for_: EngineName,
    t_draft_ms: Milliseconds | None = None,
    t_target_ms: Milliseconds | None = None,
    prompts: int = 24,
    split: Literal["dev", "test"] = "dev",
    every: int = 1,
    clock: int = 0,
) -> None:
    """Print what decoding finds beside what `flags` prints.

    Args:
        config: the experiment.
        for_: the engine, written --for.
        t_draft_ms: as of `flags`.
        t_target_ms: as of `flags`.
        prompts: on which settings are decoded.
        split: dev, where the printed setting was chosen, or test.
        every: decode only every so many-th setting of the grid.
        clock: prompts on which transformers generates, timed; 0: settings are decoded.
    """
    experiment, contest = contest_for(config, for_, given_times(t_draft_ms, t_target_ms, None))
    choices = contest.choices()
    found: dict[str, Any] = {"engine": for_, "setting": dict(choices[FLAGS].option.setting)}
    if clock:
        found |= clocked(experiment, choices, num=clock)
    else:
        found |= searched(experiment, contest, choices[FLAGS], prompts=prompts, split=split, every=every)
    print(json.dumps(found, default=float))


def searched(
    experiment: Experiment,
    contest: Contest,
    chosen: Choice,
    *,
    prompts: int,
    split: Literal["dev", "test"],
    every: int = 1,
) -> dict[str, Any]:
    """The decoded speed of every setting, the printed one first; and replay's of the printed one."""
    drafting = chosen.option.drafting
    if drafting is None:
        raise ValueError("no setting is predicted to be faster than the target alone; there is nothing to search")
    rule, cost = contest.engine.rule, contest.times.speculating
    values = _SEARCHED[rule]
    grid = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    settings = [chosen.option.setting, *grid[::every]]
    law = drafting.law(experiment.sampling)
    trace = getattr(contest.traces[drafting], split)
    rows = list(range(min(prompts, len(trace.rows))))
    ids = [list(trace.rows[row].prompt_ids) for row in rows]
    speeds = []
    for setting in settings:
        decoder = decoder_of(experiment, make_policy(rule, **setting), is_likeliest=law.is_greedy)
        speeds.append(decoded_speed(decoder, ids, cost, experiment.decode.max_new_tokens))
        print(f"{label_of('', setting):<70} {speeds[-1]:.2f} tokens/s", flush=True)
    replayed = replay_settings(trace.select(rows), make_policy(rule, **settings[0]))
    best = int(np.argmax(speeds))
    return {
        "split": split,
        "prompts": len(rows),
        "tokens_per_s": speeds[0],
        "best_decoded": dict(settings[best]),
        "best_tokens_per_s": speeds[best],
        "short_of_best": 1 - speeds[0] / speeds[best],
        "replay_off": float(cost.tokens_per_s(replayed)[0]) / speeds[0] - 1,
        "settings_decoded": len(settings),
    }


def decoder_of(experiment: Experiment, policy: Policy, *, is_likeliest: bool) -> SpeculativeDecoder:
    """The real loop under an engine's rule."""
    models = PairModels(experiment.pair)
    draft: Any = models.draft_for(policy)
    drafter = PointMassDrafter(draft, policy) if is_likeliest else models.drafter(policy)
    longest = experiment.decode.max_draft_length
    return models.decoder(drafter, sampling=experiment.sampling, max_draft_length=longest)


def decoded_speed(decoder: SpeculativeDecoder, prompts: Sequence[list[int]], cost: CostModel, limit: int) -> float:
    """Tokens per second of generations by what was counted in each round (law 4.9)."""
    tokens, seconds, generator = 0, 0.0, torch.Generator().manual_seed(0)
    for prompt in prompts:
        for played in decoder.generate(prompt, limit, generator=generator).rounds:
            tokens += len(played.emitted)
            seconds += cost.t_draft_s * played.counts.num_draft_forwards
            seconds += float(cost.target_s(np.array(len(played.drafted))))
    return tokens / seconds


def clocked(experiment: Experiment, choices: Mapping[str, Choice], *, num: int) -> dict[str, Any]:
    """Gains of transformers' own runs, and those that were predicted."""
    dataset = next(iter(experiment.datasets))
    prompts = experiment.prompt_ids(dataset, "test", num=max(num, experiment.decode.num_test))[:num]
    default = ENGINES["transformers"].default
    assert default is not None
    settings = {
        NONE: None,
        DEFAULT: of_generation_config(default),
        FLAGS: of_generation_config(choices[FLAGS].option.setting),
    }
    limit = experiment.decode.max_new_tokens
    arms: dict[str, Timed] = {
        name: assisted(experiment.pair, limit, experiment.sampling, changes, ends_at_eos=True)
        for name, changes in settings.items()
    }
    for timed in arms.values():
        timed(prompts[0], 0)  # warms up
    written: dict[str, list[Written]] = {name: [] for name in arms}
    for (seed, prompt), order in in_turns(arms, enumerate(prompts)):
        for name in order:
            written[name].append(min((arms[name](prompt, seed) for _ in range(2)), key=lambda run: run.seconds))
    spent = {
        name: Spent(np.array([run.tokens for run in runs]), np.array([run.seconds for run in runs]))
        for name, runs in written.items()
    }
    gains = {
        base: {
            "clocked": gain_over(spent[base], spent[FLAGS])._asdict(),
            "predicted": choices[FLAGS].over(choices[base])._asdict(),
        }
        for base in (NONE, DEFAULT)
    }
    for base, gain in gains.items():
        said = {kind: f"{of['value']:+.1%} ({of['low']:+.1%}, {of['high']:+.1%})" for kind, of in gain.items()}
        print(f"over {base}: {said['clocked']} on the clock, {said['predicted']} predicted")
    return {"gains": gains, "tokens_per_s": {name: of.tokens_per_s for name, of in spent.items()}, "prompts": num}


if __name__ == "__main__":
    run({"flags": flags}, default="flags")
