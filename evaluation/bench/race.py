"""Every policy family and every schedule of transformers in turns, one cell per dataset and sampling.

DIR/bench.jsonl holds a row for each prompt and cycle, the tokens and seconds of every arm, and each finished cell with
its key. An interrupted race resumes with its next row; only what transformers' schedules had learnt is lost. Two
processes may run different cells of one race.

Policies run as they were named, or each family at its setting that is fastest on dev at the times of the pair: heads
and `auto` on the dev prompts of the first dataset, all others on those of the raced dataset, which favours the others.
Heads were trained under one sampling; under others they run all the same, and the tables say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any

from transformers import PreTrainedModel

from configs.schema import Config, ModelSource
from data_gen.store.identity import describe_model
from data_gen.store.manifest import digest
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from decode.policies.registry import read_spec, registered
from evaluation.bench import arms as ways
from evaluation.bench.arms import CONSTANT, Timed, generations_of, warm_up
from evaluation.bench.choices import Choices, of_other_sampling
from evaluation.costs.machine import costs_for
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, BASELINE
from evaluation.flag_types import RaceRules
from evaluation.keys import class_key, code_key, head_key, machine_key, models_key, policy_key, prompts_key
from evaluation.times import Times
from evaluation.turns import in_turns
from lm import Sampling, load_config, load_model
from store.json_files import KeyedStore
from store.progress import Bar

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(),
    "nucleus": Sampling(temperature=0.7, top_p=0.9),
}
_CONSTANTS = (2, 5, 10)
"""Lengths of transformers' constant schedule where no best fixed length is known."""
_NO_PART = {"as_recorded", "compile", "datasets", "dir", "heads", "num_test", "perfect_head", "ratios"}
_NO_PART |= {"prompts_per_shard", "stop_share", "t_draft_s", "t_target_s", "trace_hidden", "verify_shares"}
"""Settings of `decode` that do not decide what dev chooses, or that a key has in another form."""


@dataclass(frozen=True)
class RaceTerms:
    """Terms that all cells of a race share."""

    num_prompts: int
    num_tokens: int
    policies: tuple[str, ...]
    families: tuple[str, ...]
    constants: tuple[int, ...]
    rules: RaceRules


class Race:
    """The race's cells of one config, stored between runs."""

    def __init__(self, config: Config, terms: RaceTerms) -> None:
        """Raises:
        ValueError: an unknown policy, a head that does not fit, no fixed length among named policies.
        FileNotFoundError: no head or assistant at that path.
        """
        self._terms, rules = terms, terms.rules
        self.experiment = Experiment(config)
        self._samplings = SAMPLINGS | {"own": self.experiment.sampling}
        # made here, so that heads and custom policies are checked before anything is measured
        self._named = [self.experiment.policy(spec) for spec in terms.policies]
        self._checked = self._named or self.experiment.heads
        for name in config.decode.policies:
            registered(name)
        if self._named and not any(isinstance(policy, FixedLength) for policy in self._named):
            raise ValueError(
                f"--policies names {', '.join(terms.policies)}, and gains are measured from a fixed length; name one, "
                "too, as fixed_length:k=5"
            )
        for name, value in {"num_fixed": rules.num_fixed, "cycles": rules.cycles}.items():
            if value < 1:
                raise ValueError(f"--race.{name} is {value}; at least 1")
        if rules.assistant is not None and not self.experiment.has_feature_draft:
            raise ValueError(f"--race.assistant is {rules.assistant}, and the pair's own draft drafts for transformers")
        self._assistant_source: ModelSource | None = None
        if rules.assistant is not None:
            self._assistant_source = ModelSource(path=rules.assistant, dtype=config.pair.target.dtype)
            load_config(self._assistant_source)
        self._choices = cache(lambda name: Choices(config, name, self._samplings[name]))
        self.path = self.experiment.directory / "bench.jsonl"
        self._store = KeyedStore(self.path, remedy="delete the line, and it is measured again")

    @cached_property
    def _times(self) -> Times:
        return costs_for(self.experiment)

    def cells(self, samplings: Sequence[str]) -> Iterator[dict[str, Any]]:
        """One record per dataset and sampling, each as soon as it is there.

        Raises:
            ValueError: an unknown dataset.
        """
        known, datasets = list(self.experiment.datasets), self._terms.rules.datasets
        if unknown := [name for name in datasets if name not in known]:
            raise ValueError(f"--race.datasets names {unknown[0]!r}; decode.datasets are {', '.join(known)}")
        for dataset in datasets or known[:1]:
            for sampling in samplings:
                key = self.key(dataset, sampling)
                cell = self._store.get(key)
                if cell is None:
                    cell = self._measured(dataset, sampling, key)
                    self._store.keep([(key, cell)])
                yield cell

    def key(self, dataset: str, sampling: str) -> dict[str, Any]:
        """Everything that a cell's value depends on."""
        experiment, decode = self.experiment, asdict(self.experiment.decode)
        terms = asdict(replace(self._terms, rules=replace(self._terms.rules, datasets=())))
        key = {"kind": "cell", "dataset": dataset, "sampling": sampling, "terms": terms}
        key["law"] = self._samplings[sampling].as_dict()
        key["prompts"] = prompts_key(experiment, experiment.prompts(dataset, "test", num=self._terms.num_prompts))
        if self._named:
            return key | {"policies": list(map(policy_key, self._named))} | self._run_key
        datasets = next(iter(experiment.datasets)), dataset
        return (
            key
            | self._run_key
            | {
                "decode": {name: value for name, value in decode.items() if name not in _NO_PART},
                "classes": {name: class_key(registered(name).kind) for name in decode["policies"]},
                "heads": {name: head_key(head) for name, head in experiment.heads.items()},
                "dev": [prompts_key(experiment, experiment.prompts(name, "dev")) for name in datasets],
            }
        )

    @cached_property
    def _run_key(self) -> dict[str, Any]:
        """What all cells depend on: models, times, machine, code."""
        assistant, decode = self._assistant_source, self.experiment.decode
        return machine_key(self.experiment) | {
            "models": models_key(self.experiment, "target", "draft"),
            "assistant": None if assistant is None else describe_model(assistant),
            "default_schedule": ways.about_default(),
            "max_draft_length": decode.max_draft_length,
            "compile": decode.compile,
            "costs": asdict(self._times),
            "code": code_key(),
        }

    def _measured(self, dataset: str, sampling: str, key: Mapping[str, Any]) -> dict[str, Any]:
        arms, terms, times = self._arms(dataset, sampling), self._terms, self._times
        settings = [(name, arm["setting"]) for name, (arm, _) in arms.items()]
        rows = measured_rows(
            self._store,
            digest(repr((sorted(key.items(), key=str), settings))),
            {name: timed for name, (_, timed) in arms.items()},
            self.experiment.prompt_ids(dataset, "test", num=terms.num_prompts),
            rules=terms.rules,
            desc=f"bench: {dataset}, {sampling}",
        )
        return {
            "dataset": dataset,
            "sampling": sampling,
            "times": {"t_draft_s": times.t_draft_s, "t_target_s": list(times.t_target_s), "origin": times.origin},
            "num_tokens": terms.num_tokens,
            "cycles": terms.rules.cycles,
            "run": terms.rules.run,
            "default_schedule": ways.about_default(),
            "arms": [arm | totals for (arm, _), totals in zip(arms.values(), totals_of(rows), strict=True)],
        }

    def _arms(self, dataset: str, name: str) -> dict[str, tuple[dict[str, Any], Timed]]:
        """Unique name -> what a cell keeps of a competitor, and its generations; `name` is the sampling's."""
        sampling, terms, pair = self._samplings[name], self._terms, self.experiment.pair
        arms: dict[str, tuple[dict[str, Any], Timed]] = {}
        ends_at_eos, num_tokens = not terms.rules.ignore_eos, terms.num_tokens
        loop = Loop.of(
            self.experiment, pair=pair, sampling=sampling, max_new_tokens=num_tokens, ends_at_eos=ends_at_eos
        )
        policies: dict[str, tuple[str, str, Policy, float | None]] = {ALONE: (ALONE, "-", FixedLength(0), None)}
        if self._named:
            policies |= {
                spec: (_family_of(spec), spec, policy, None)
                for spec, policy in zip(terms.policies, self._named, strict=True)
            }
        else:
            choices = self._choices(name)
            best_arms = choices.at(self._times, terms.families, dataset=dataset, num_fixed=terms.rules.num_fixed)
            policies |= {key: (arm.family, arm.label, arm.policy, arm.on_dev) for key, arm in best_arms.items()}
        for key, (family, setting, policy, on_dev) in policies.items():
            timed = generations_of(loop.decoder(policy), num_tokens)
            facts = _arm(family, setting, of_other_sampling=of_other_sampling(policy, sampling), on_dev=on_dev)
            arms[key] = facts, timed
        schedules: dict[tuple[str, str], Mapping[str, Any] | None] = {(ways.UNASSISTED, "-"): None}
        if not self.experiment.has_feature_draft or self._assistant is not None:
            best = policies[BASELINE][2] if BASELINE in policies else None
            schedules |= {(ways.DEFAULT, "-"): {}, (ways.HEURISTIC, "-"): ways.HEURISTICALLY}
            schedules |= {(CONSTANT, f"k={k}"): ways.constant(k) for k in terms.constants or _constants_beside(best)}
        for (family, setting), changes in schedules.items():
            options: dict[str, Any] = {"assistant": self._assistant, "ends_at_eos": ends_at_eos}
            timed = ways.assisted(pair, num_tokens, sampling, changes, **options)
            arms[f"{family} {setting}"] = _arm(family, setting), timed
        return arms

    @cached_property
    def _assistant(self) -> PreTrainedModel | None:
        """The language model that drafts for transformers where it is not the pair's own draft."""
        source = self._assistant_source
        return None if source is None else load_model(source, device=self.experiment.pair.target.device)


def _arm(family: str, setting: str, *, of_other_sampling: bool = False, on_dev: float | None = None) -> dict[str, Any]:
    return {"family": family, "setting": setting, "of_other_sampling": of_other_sampling, "on_dev": on_dev}


def _family_of(spec: str) -> str:
    """The name of a spec's policy, as it is written: entropy, head, auto, or module:Class."""
    name, _ = read_spec(spec)
    return name if ":" in name else spec.partition(":")[0]


def _constants_beside(best: Policy | None) -> tuple[int, ...]:
    """The best fixed length on dev and half of it: a draft step of transformers costs more, so fewer do better."""
    return tuple(sorted({max(1, best.k // 2), max(1, best.k)})) if isinstance(best, FixedLength) else _CONSTANTS


Row = dict[str, list[Any]]
"""Tokens and seconds of every arm on one prompt in one cycle."""


def measured_rows(
    store: KeyedStore,
    race: str,
    arms: Mapping[str, Timed],
    prompts: Sequence[list[int]],
    *,
    rules: RaceRules,
    desc: str,
) -> list[list[Row]]:
    """The rows of each prompt, one per cycle; each is stored as soon as every arm has had its turn.

    `race` identifies the rows of this race in the store, which are not measured again.
    """
    keys = {"kind": "row", "race": race}
    rows: dict[tuple[int, int], Row] = {
        (key["prompt"], key["cycle"]): row for key, row in store.entries() if keys.items() <= key.items()
    }
    is_warm, total = False, len(prompts) * rules.cycles * len(arms)
    with Bar(desc=desc, total=total, initial=len(rows) * len(arms), unit="texts") as bar:
        for cycle in range(rules.cycles):
            for index, order in in_turns(arms, range(len(prompts)), first=cycle):
                if (index, cycle) in rows:
                    continue
                if not is_warm:
                    warm_up(arms, prompts)
                    is_warm = True
                seed = index + len(prompts) * (cycle + rules.cycles * rules.run)
                texts: dict[str, tuple[int, float]] = {}
                for name in order:
                    texts[name] = arms[name](prompts[index], seed)
                    bar.update()
                tokens, seconds = zip(*(texts[name] for name in arms), strict=True)
                rows[index, cycle] = {"tokens": list(tokens), "seconds": list(seconds)}
                store.keep([(keys | {"prompt": index, "cycle": cycle}, rows[index, cycle])])
    return [[rows[index, cycle] for cycle in range(rules.cycles)] for index in range(len(prompts))]


def totals_of(rows: Sequence[Sequence[Row]]) -> list[dict[str, list[Any]]]:
    """Tokens and seconds of every arm on each prompt, all cycles together."""
    num_arms = len(rows[0][0]["tokens"])
    return [
        {name: [sum(row[name][arm] for row in of_prompt) for of_prompt in rows] for name in ("tokens", "seconds")}
        for arm in range(num_arms)
    ]
