"""Every policy family and every schedule of transformers in turns, one cell per dataset and sampling; finished rows are
kept.

DIR/bench.jsonl holds the tokens and seconds of every arm on each prompt of each cycle, a row, as soon as all arms have
had their turn, and each finished cell under what it was asked for. What is there is not measured again; an interrupted
race goes on with its next row, and two processes may run different cells of one race. Only what transformers' schedules
had learnt is lost then.

Policies run as they were named, or each family at what is fastest on dev at the costs of the cell: heads and `auto` on
the dev prompts of the first dataset, their home, all others on those of the dataset that is raced, a favour to them. A
trace is of one sampling, so each sampling has a trace of dev prompts of its own, in DIR/bench/SAMPLING (that of the
config's sampling is the one of every command). Heads were trained under one sampling, too; elsewhere they run as
foreign heads, which is said beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from configs.schema import Config, ModelSource
from data_gen.store.identity import describe_model
from data_gen.store.manifest import digest
from decode.experiment import Experiment, Level
from decode.policies import FixedLength
from decode.policies.registry import registered
from evaluation.bench.arms import Racer, Timed, Written, generations_of, warm_up
from evaluation.bench.choices import Choices
from evaluation.bench.schedules import (
    CONSTANT,
    DEFAULT,
    HEURISTIC,
    HEURISTICALLY,
    UNASSISTED,
    about_default,
    assisted,
    constant,
)
from evaluation.costs.machine import costs_for
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, BASELINE
from evaluation.flag_types import RaceRules
from evaluation.keys import class_key, code_key, head_key, machine_key, models_key, policy_key, prompts_key
from evaluation.times import Times
from evaluation.turns import in_turns
from lm import Pair, Sampling, load_config, load_model
from store.keyed import KeyedStore
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


class Cell(NamedTuple):
    """What a cell of a race is of."""

    dataset: str
    sampling: str


class Race:
    """The race's cells of one config, kept between runs."""

    def __init__(self, config: Config, terms: RaceTerms) -> None:
        """Raises:
        ValueError: a policy that there is not, a head that does not fit.
        FileNotFoundError: a head or an assistant that is not there.
        """
        self._config, self._terms = config, terms
        self.experiment = Experiment(config)
        self._samplings = SAMPLINGS | {"own": self.experiment.sampling}
        # made here, so that heads and policies of one's own are checked before anything is measured
        self._named = [self.experiment.policy(spec) for spec in terms.policies]
        self._checked = self._named or self.experiment.heads
        for name in config.decode.policies:
            registered(name)
        if self._named and not any(isinstance(policy, FixedLength) for policy in self._named):
            raise ValueError(
                f"--policies names {', '.join(terms.policies)}, and gains are measured from a fixed length; name one, "
                "too, as fixed_length:k=5"
            )
        rules = terms.rules
        asked = {"num_prompts": terms.num_prompts, "num_tokens": terms.num_tokens}
        for name, value in (asked | {"race.num_fixed": rules.num_fixed, "race.cycles": rules.cycles}).items():
            if value < 1:
                raise ValueError(f"--{name} is {value}; at least 1")
        self._assistant_source: ModelSource | None = None
        if rules.assistant is not None:
            if not self.experiment.has_feature_draft:
                drafts = "and the pair's own draft drafts for transformers"
                raise ValueError(f"--race.assistant is {rules.assistant}, {drafts}")
            self._assistant_source = ModelSource(path=rules.assistant, dtype=config.pair.target.dtype)
            load_config(self._assistant_source)
        self._choices: dict[str, Choices] = {}
        self.path = self.experiment.directory / "bench.jsonl"
        self._store = KeyedStore(self.path, remedy="delete the line, and it is measured again")

    @cached_property
    def _cost(self) -> Times:
        """Times of the pair as it is."""
        return costs_for(self.experiment)

    def _prompts(self, dataset: str) -> list[list[int]]:
        return self.experiment.prompt_ids(dataset, "test", num=self._terms.num_prompts)

    def cells(self, samplings: Sequence[str]) -> Iterator[dict[str, Any]]:
        """One record per dataset and sampling, each as soon as it is there.

        Raises:
            ValueError: a dataset that there is not.
        """
        known, rules = list(self.experiment.datasets), self._terms.rules
        for name in rules.datasets:
            if name not in known:
                raise ValueError(f"--race.datasets names {name!r}; decode.datasets are {', '.join(known)}")
        for dataset in rules.datasets or known[:1]:
            for name in samplings:
                cell = Cell(dataset, name)
                key = self.key(cell)
                kept = self._store.get(key)
                if kept is None:
                    kept = self._measured(cell, key)
                    self._store.keep([(key, kept)])
                yield kept

    def key(self, cell: Cell) -> dict[str, Any]:
        """Everything that a cell's value depends on."""
        terms = asdict(replace(self._terms, rules=replace(self._terms.rules, datasets=())))
        key = {"kind": "cell", **cell._asdict(), "law": self._samplings[cell.sampling].as_dict(), "terms": terms}
        return key | self._competing_key(cell) | self._run_key

    def _competing_key(self, cell: Cell) -> dict[str, Any]:
        """What competes in a cell and on which prompts: the policies that were named, or all that dev chooses from."""
        experiment, decode = self.experiment, asdict(self.experiment.decode)
        timed = experiment.prompts(cell.dataset, "test", num=self._terms.num_prompts)
        key = {"prompts": prompts_key(experiment, timed)}
        if self._named:
            return key | {"policies": list(map(policy_key, self._named))}
        home = next(iter(experiment.datasets))
        return key | {
            "decode": {name: value for name, value in decode.items() if name not in _NO_PART},
            "classes": {name: class_key(registered(name).kind) for name in decode["policies"]},
            "heads": {name: head_key(head) for name, head in experiment.heads.items()},
            "dev": [prompts_key(experiment, experiment.prompts(name, "dev")) for name in (home, cell.dataset)],
        }

    @cached_property
    def _run_key(self) -> dict[str, Any]:
        """What all cells depend on: models, costs, machine, code."""
        levels: tuple[Level, ...] = ("target", "draft")
        assistant = self._assistant_source
        return {
            "models": models_key(self.experiment, *levels),
            "assistant": None if assistant is None else describe_model(assistant),
            "default_schedule": about_default(),
            "max_draft_length": self.experiment.decode.max_draft_length,
            "compile": self.experiment.decode.compile,
            "costs": asdict(self._cost),
            **machine_key(self.experiment),
            "code": code_key(),
        }

    def _measured(self, cell: Cell, key: Mapping[str, Any]) -> dict[str, Any]:
        sampling = self._samplings[cell.sampling]
        arms = self._arms(self.experiment.pair, sampling, self._chosen(cell))
        rows = self._rows(cell, key, arms)
        return {
            "dataset": cell.dataset,
            "sampling": cell.sampling,
            "times": {
                "t_draft_s": self._cost.t_draft_s,
                "t_target_s": list(self._cost.t_target_s),
                "origin": self._cost.origin,
            },
            "num_tokens": self._terms.num_tokens,
            "cycles": self._terms.rules.cycles,
            "run": self._terms.rules.run,
            "default_schedule": about_default(),
            "arms": [
                {
                    "family": racer.family,
                    "setting": racer.setting,
                    "is_foreign": racer.is_foreign(sampling),
                    "on_dev": racer.on_dev,
                    **{
                        name: [sum(row[name][place] for row in of_prompt) for of_prompt in rows]
                        for name in ("tokens", "seconds")
                    },
                }
                for place, (racer, _) in enumerate(arms.values())
            ],
        }

    def _rows(
        self, cell: Cell, key: Mapping[str, Any], arms: Mapping[str, tuple[Racer, Timed]]
    ) -> list[list[dict[str, Any]]]:
        """The rows of each prompt, one per cycle; each is kept as soon as every arm has had its turn."""
        prompts, num_cycles = self._prompts(cell.dataset), self._terms.rules.cycles
        settings = [(name, racer.setting) for name, (racer, _) in arms.items()]
        race = digest(repr((sorted(key.items(), key=str), settings)))
        kept: dict[tuple[int, int], dict[str, Any]] = {
            (of["prompt"], of["cycle"]): row for of, row in self._store.entries() if of.get("race") == race
        }
        is_warm, total = False, len(prompts) * num_cycles
        with Bar(
            desc=f"bench: {cell.dataset}, {cell.sampling}",
            total=total * len(arms),
            initial=len(kept) * len(arms),
            unit="texts",
        ) as bar:
            timed = {name: _ticking(generation, bar) for name, (_, generation) in arms.items()}
            for cycle in range(num_cycles):
                for place, order in in_turns(timed, range(len(prompts)), first=cycle):
                    if (place, cycle) in kept:
                        continue
                    if not is_warm:
                        warm_up({name: generation for name, (_, generation) in arms.items()}, prompts)
                        is_warm = True
                    seed = place + len(prompts) * (cycle + num_cycles * self._terms.rules.run)
                    texts = {name: timed[name](prompts[place], seed) for name in order}
                    row = {
                        "tokens": [texts[name].tokens for name in arms],
                        "seconds": [texts[name].seconds for name in arms],
                    }
                    self._store.keep([({"kind": "row", "race": race, "prompt": place, "cycle": cycle}, row)])
                    kept[place, cycle] = row
        return [[kept[place, cycle] for cycle in range(num_cycles)] for place in range(len(prompts))]

    def _chosen(self, cell: Cell) -> Mapping[str, Racer]:
        name, terms = cell.sampling, self._terms
        if name not in self._choices:
            self._choices[name] = Choices(self._config, name, self._samplings[name])
        choices = self._choices[name]
        if terms.policies:
            return choices.named(terms.policies)
        return choices.at(self._cost, terms.families, dataset=cell.dataset, num_fixed=terms.rules.num_fixed)

    @cached_property
    def _assistant(self) -> PreTrainedModel | None:
        """The language model that drafts for transformers where it is not the pair's own draft."""
        source = self._assistant_source
        return None if source is None else load_model(source, device=self.experiment.pair.target.device)

    def _arms(self, pair: Pair, sampling: Sampling, chosen: Mapping[str, Racer]) -> dict[str, tuple[Racer, Timed]]:
        """Every competitor, and its generations, by a name of its own."""
        num_tokens, ends_at_eos = self._terms.num_tokens, not self._terms.rules.ignore_eos
        loop = Loop.of(
            self.experiment, pair=pair, sampling=sampling, max_new_tokens=num_tokens, ends_at_eos=ends_at_eos
        )
        arms = {
            name: (racer, generations_of(loop.decoder(racer.policy), num_tokens))
            for name, racer in {ALONE: Racer(ALONE, "-", FixedLength(0)), **chosen}.items()
            if racer.policy
        }
        schedules: dict[str, tuple[str, Mapping[str, Any] | None]] = {UNASSISTED: ("-", None)}
        if not self.experiment.has_feature_draft or self._assistant is not None:
            schedules |= {DEFAULT: ("-", {}), HEURISTIC: ("-", HEURISTICALLY)}
            constants = self._terms.constants or _constants_beside(chosen)
            schedules |= {f"{CONSTANT} {k}": (f"k={k}", constant(k)) for k in constants}
        for name, (setting, changes) in schedules.items():
            family = CONSTANT if name.startswith(CONSTANT) else name
            generation = assisted(
                pair, num_tokens, sampling, changes, assistant=self._assistant, ends_at_eos=ends_at_eos
            )
            arms[name] = Racer(family, setting), generation
        return arms


def _constants_beside(chosen: Mapping[str, Racer]) -> tuple[int, ...]:
    """The best fixed length on dev and half of it: transformers' draft step is dearer, so it does better with fewer."""
    best = chosen[BASELINE].policy if BASELINE in chosen else None
    return tuple(sorted({max(1, best.k // 2), max(1, best.k)})) if isinstance(best, FixedLength) else _CONSTANTS


def _ticking(timed: Timed, bar: Any) -> Timed:
    def written(prompt: list[int], seed: int) -> Written:
        text = timed(prompt, seed)
        bar.update()
        return text

    return written
