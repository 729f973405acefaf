"""`acceptance-heads flags` against a search by real decoding, and transformers' own run on a clock.

    python -m benchmarks.flags --config FILE --for ENGINE [--prompts 60] [--split test] [--t_draft_ms 1 --t_target_ms 5]
    python -m benchmarks.flags --config FILE --for transformers --clock 40

Every setting of a grid is decoded by the real loop under the engine's rule, and those that were fastest on the first
prompts on all of them; what was counted is charged as replay is (`Times.work`). The printed setting is decoded beside
them. `short_of_best` is how far its speed is below that of the fastest decoded setting, and `replay_off` how far
replay's speed on those prompts is from decoding's, which at temperature 0 are the same but for argmaxes that rounding
flips. With `--clock` transformers itself generates, without an assistant, under its default and under the printed
setting, in turns: what was gained stands beside what was predicted. The last line is one JSON document.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
from decode.loop.drafter import ModelDrafter
from decode.policies.base import Policy
from decode.policies.registry import make_policy
from evaluation.bench.arms import Timed, Written
from evaluation.bench.schedules import assisted
from evaluation.contest.grids import label_of
from evaluation.flag_types import EngineName, Milliseconds
from evaluation.flags.choice import DEFAULT, FLAGS, NONE, Choice, Contest, Option
from evaluation.flags.command import contest_for
from evaluation.flags.engines import ENGINES, Setting, of_generation_config
from evaluation.flags.times import given_times
from evaluation.intervals import Spent, gain_over
from evaluation.traces.replay import Replayed, replay_settings
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
_FINALISTS = 6
"""Settings that are decoded on all prompts."""


def flags(
    config: Config,
    *,
    for_: EngineName,
    t_draft_ms: Milliseconds | None = None,
    t_target_ms: Milliseconds | None = None,
    prompts: int = 60,
    split: Literal["dev", "test"] = "test",
    first: int = 12,
    clock: int = 0,
) -> None:
    """Print what decoding finds beside what `flags` prints.

    Args:
        config: the experiment.
        for_: the engine, written --for.
        t_draft_ms: as of `flags`.
        t_target_ms: as of `flags`.
        prompts: on which the fastest settings are decoded.
        split: test, or dev, where the printed setting was chosen.
        first: of these prompts, on which every setting is decoded.
        clock: prompts on which transformers generates, timed; 0: settings are decoded.
    """
    experiment, contest = contest_for(config, for_, given_times(t_draft_ms, t_target_ms, None))
    choices = contest.choices()
    found: dict[str, Any] = {"engine": for_, "setting": dict(choices[FLAGS].option.setting)}
    if clock:
        found |= clocked(experiment, choices, num=clock)
    else:
        found |= searched(experiment, contest, choices[FLAGS].option, num=prompts, split=split, first=first)
    print(json.dumps(found, default=float))


def searched(
    experiment: Experiment, contest: Contest, chosen: Option, *, num: int, split: Literal["dev", "test"], first: int
) -> dict[str, Any]:
    """The decoded speed of the printed setting and of the fastest of the grid; and replay's of the printed one."""
    if chosen.drafting is None:
        raise ValueError("no setting is predicted to be faster than the target alone; there is nothing to search")
    rule, times = contest.engine.rule, contest.times
    is_likeliest = chosen.drafting.law(experiment.sampling).is_greedy
    trace = getattr(contest.traces[chosen.drafting], split)
    trace = trace.select(range(min(num, len(trace.rows))))
    ids = [list(row.prompt_ids) for row in trace.rows]

    def speeds(settings: Sequence[Setting], prompts: Sequence[list[int]]) -> Iterator[float]:
        for setting in settings:
            decoder = decoder_of(experiment, make_policy(rule, **setting), is_likeliest=is_likeliest)
            played = decoded(decoder, prompts, experiment.decode.max_new_tokens)
            speed = float(times.spent(played, [setting]).tokens_per_s[0])
            print(f"{label_of('', setting):<85} {speed:8.2f} tokens/s, {len(prompts)} prompts", flush=True)
            yield speed

    values = _SEARCHED[rule]
    grid = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    fastest = np.argsort([-speed for speed in speeds(grid, ids[:first])], kind="stable")[:_FINALISTS]
    finalists = [chosen.setting, *(grid[place] for place in fastest)]
    found = list(speeds(finalists, ids))
    best = int(np.argmax(found))
    replayed = replay_settings(trace, make_policy(rule, **chosen.setting))
    return {
        "split": split,
        "prompts": len(ids),
        "tokens_per_s": found[0],
        "best_decoded": dict(finalists[best]),
        "best_tokens_per_s": found[best],
        "short_of_best": 1 - found[0] / found[best],
        "replay_off": float(times.spent(replayed, [chosen.setting]).tokens_per_s[0]) / found[0] - 1,
        "settings_decoded": len(grid),
    }


def decoder_of(experiment: Experiment, policy: Policy, *, is_likeliest: bool) -> SpeculativeDecoder:
    """The real loop under an engine's rule; at temperature 0 the ordinary drafter is that of likeliest tokens."""
    models = PairModels(experiment.pair)
    draft: Any = models.draft_for(policy)
    has_masses = is_likeliest and not (experiment.sampling.is_greedy and policy.least == 0)
    drafter = PointMassDrafter(draft, policy) if has_masses else models.drafter(policy)
    longest = experiment.decode.max_draft_length
    return models.decoder(drafter, sampling=experiment.sampling, max_draft_length=longest)


def decoded(decoder: SpeculativeDecoder, prompts: Sequence[list[int]], limit: int) -> Replayed:
    """What generations to these prompts did, many at a time where their drafter can."""
    generator = torch.Generator().manual_seed(0)
    if type(decoder.drafter) is ModelDrafter:
        made = decoder.generate_batch(prompts, limit, generator=generator)
    else:
        made = [decoder.generate(prompt, limit, generator=generator) for prompt in prompts]
    return Replayed.of(made, decoder.max_draft_length)


def clocked(experiment: Experiment, choices: Mapping[str, Choice], *, num: int) -> dict[str, Any]:
    """Gains of transformers' own runs, and those that were predicted."""
    dataset = next(iter(experiment.datasets))
    prompts = experiment.prompt_ids(dataset, "test", num=max(num, experiment.decode.num_test))[:num]
    default = ENGINES["transformers"].default
    assert default is not None
    flags = choices[FLAGS].option
    settings = {
        NONE: None,
        DEFAULT: of_generation_config(default),
        FLAGS: None if flags.drafting is None else of_generation_config(flags.setting),
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
