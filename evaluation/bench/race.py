"""Every policy family and every schedule of transformers in turns, one cell per dataset and sampling.

DIR/bench.jsonl holds a row for each prompt, the tokens and seconds of every arm, and each finished cell with its key.
An interrupted race resumes with its next row; only what transformers' schedules had learnt is lost. Two processes may
run different cells of one race.

Policies run as they were named, or each family at its setting that is fastest on dev at the times of the pair: heads
and `auto` on the dev prompts of the first dataset, all others on those of the raced dataset, which favours the others.
A trace is of one sampling, so each sampling has a trace of dev prompts, in DIR/bench/SAMPLING (that of the config's
sampling is the one of every command). Heads were trained under one sampling; under others they run all the same, and
the tables say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from configs.flag_types import RaceRules
from configs.schema import Config, ModelSource, SamplingConfig
from data_gen.store.manifest import describe_model, digest
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from decode.policies.registry import read_spec, registered
from evaluation.bench import arms as ways
from evaluation.bench.arms import Timed, generations_of, warm_up
from evaluation.competitor import competitors_with
from evaluation.contest import Result, hold, replay_dataset
from evaluation.costs.machine import costs_for
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, BASELINE, BOUNDS
from evaluation.families import family as family_named
from evaluation.gain import Splits
from evaluation.keys import class_key, head_key, machine_key, models_key, policy_key, prompts_key
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.tuning.calibration import is_of_other_sampling
from evaluation.turns import in_turns
from heads.model.head import AcceptanceHead
from lm import Sampling, load_model, model_config
from store.json_files import KeyedStore
from store.progress import Bar

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(),
    "nucleus": Sampling(temperature=0.7, top_p=0.9),
}
_CONSTANTS = (2, 5, 10)
"""Lengths of transformers' constant schedule where no best fixed length is known."""
_NO_PART = {"as_recorded", "datasets", "dir", "heads", "num_test", "perfect_head", "ratios"}
_NO_PART |= {
    "prompts_per_shard",
    "stop_share",
    "t_draft_s",
    "t_target_s",
    "t_target_ms",
    "trace_hidden",
    "verify_shares",
}
"""Settings of `decode` that do not decide what dev chooses, or that a key has in another form."""
Row = dict[str, list[Any]]
"""Arm -> its tokens and seconds on one prompt."""


@dataclass(frozen=True)
class RaceTerms:
    """Terms that all cells of a race share."""

    num_prompts: int
    num_tokens: int
    policies: tuple[str, ...]
    families: tuple[str, ...]
    constants: tuple[int, ...]
    rules: RaceRules


class RaceArm(NamedTuple):
    """What a cell keeps of a competitor, and its generations."""

    family: str
    setting: str
    timed: Timed
    of_other_sampling: bool = False
    """One of its heads was trained under another sampling."""
    on_dev: float | None = None


class Race:
    """The race's cells of one config, stored between runs."""

    def __init__(self, config: Config, terms: RaceTerms) -> None:
        """Raises:
        ValueError: an unknown policy, a head that does not fit, no fixed length among named policies.
        FileNotFoundError: no head or assistant at that path.
        """
        self._config, self._terms = config, terms
        self.experiment = Experiment(config)
        self._samplings = SAMPLINGS | {"own": self.experiment.sampling}
        # made here, so that heads and custom policies are checked before anything is measured
        self._named = [self.experiment.policy(spec) for spec in terms.policies]
        self._checked = self._named or self.experiment.heads
        for name in config.decode.policies:
            registered(name)
        if self._named and BASELINE not in map(_family_of, terms.policies):
            raise ValueError(
                f"--policies names {', '.join(terms.policies)}, and gains are measured from a fixed length; name one, "
                "too, as fixed_length:k=5"
            )
        self._assistant_source: ModelSource | None = None
        if (path := terms.rules.assistant) is not None:
            if not self.experiment.has_feature_draft:
                raise ValueError(f"--race.assistant is {path}, and the pair's own draft drafts for transformers")
            self._assistant_source = ModelSource(path=path, dtype=config.pair.target.dtype)
            model_config(self._assistant_source)
        self.under = cache(self._under)
        """The experiment under a sampling, by its name."""
        self._on_dev = cache(self._results_on_dev)
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
        key = {
            "kind": "cell",
            "dataset": dataset,
            "sampling": sampling,
            "terms": asdict(replace(self._terms, rules=replace(self._terms.rules, datasets=()))),
            "law": self._samplings[sampling].as_dict(),
            "prompts": prompts_key(experiment, experiment.prompts(dataset, "test", num=self._terms.num_prompts)),
            "models": models_key(experiment, "target", "draft"),
            "assistant": self._assistant_source and describe_model(self._assistant_source),
            "default_schedule": ways.about_default(),
            "max_draft_length": decode["max_draft_length"],
            "costs": asdict(self._times),
            **machine_key(experiment),
        }
        if self._named:
            return key | {"policies": list(map(policy_key, self._named))}
        return key | {
            "decode": {name: value for name, value in decode.items() if name not in _NO_PART},
            "classes": {name: class_key(registered(name).kind) for name in decode["policies"]},
            "heads": {name: head_key(head) for name, head in experiment.heads.items()},
            "dev": [prompts_key(experiment, experiment.prompts(name, "dev")) for name in self._deciding(dataset)],
        }

    def _measured(self, dataset: str, sampling: str, key: Mapping[str, Any]) -> dict[str, Any]:
        arms, terms, times = self._arms(dataset, sampling), self._terms, self._times
        settings = [(name, arm.setting) for name, arm in arms.items()]
        rows = measured_rows(
            self._store,
            digest(repr((sorted(key.items(), key=str), settings))),
            {name: arm.timed for name, arm in arms.items()},
            self.experiment.prompt_ids(dataset, "test", num=terms.num_prompts),
            run=terms.rules.run,
            desc=f"bench: {dataset}, {sampling}",
        )
        cell_arms = []
        for name, arm in arms.items():
            tokens, seconds = zip(*(row[name] for row in rows), strict=True)
            facts = {fact: value for fact, value in arm._asdict().items() if fact != "timed"}
            cell_arms.append(facts | {"tokens": list(tokens), "seconds": list(seconds)})
        return {
            "dataset": dataset,
            "sampling": sampling,
            "times": {"t_draft_s": times.t_draft_s, "t_target_s": list(times.t_target_s), "origin": times.origin},
            "num_tokens": terms.num_tokens,
            "run": terms.rules.run,
            "default_schedule": ways.about_default(),
            "arms": cell_arms,
        }

    def _arms(self, dataset: str, sampling_name: str) -> dict[str, RaceArm]:
        """Every arm of a cell by a unique name."""
        sampling, terms, experiment = self._samplings[sampling_name], self._terms, self.experiment
        num_tokens, ends_at_eos = terms.num_tokens, not terms.rules.ignore_eos
        named = dict(zip(terms.policies, self._named, strict=True))
        best = {} if named else self.best_arms(dataset, sampling_name)
        loop = Loop.of(experiment, sampling=sampling, max_new_tokens=num_tokens, ends_at_eos=ends_at_eos)

        def ours(family: str, setting: str, policy: Policy, on_dev: float | None = None) -> RaceArm:
            timed = generations_of(loop.decoder(policy), num_tokens)
            heads = (head for head in policy.heads if isinstance(head, AcceptanceHead))
            return RaceArm(family, setting, timed, any(is_of_other_sampling(head, sampling) for head in heads), on_dev)

        arms = {ALONE: ours(ALONE, "-", FixedLength(0))}
        arms |= {spec: ours(_family_of(spec), spec, policy) for spec, policy in named.items()}
        arms |= {name: ours(name, result.label, result.policy, result.on_dev) for name, result in best.items()}
        schedules: dict[tuple[str, str], Mapping[str, Any] | None] = {(ways.UNASSISTED, "-"): None}
        if not experiment.has_feature_draft or self._assistant is not None:
            fixed = best[BASELINE].policy if best else named.get(BASELINE)
            # half of the best, too: a draft step of transformers costs more, so fewer do better
            beside = sorted({max(1, fixed.k // 2), max(1, fixed.k)}) if isinstance(fixed, FixedLength) else _CONSTANTS
            schedules |= {(ways.DEFAULT, "-"): {}, (ways.HEURISTIC, "-"): ways.HEURISTICALLY}
            schedules |= {(ways.CONSTANT, f"k={k}"): ways.constant(k) for k in terms.constants or beside}
        for (family, setting), changes in schedules.items():
            options: dict[str, Any] = {"assistant": self._assistant, "ends_at_eos": ends_at_eos}
            timed = ways.assisted(experiment.pair, num_tokens, sampling, changes, **options)
            arms[f"{family} {setting}"] = RaceArm(family, setting, timed)
        return arms

    @cached_property
    def _assistant(self) -> PreTrainedModel | None:
        """The language model that drafts for transformers where it is not the pair's own draft."""
        source = self._assistant_source
        return None if source is None else load_model(source, device=self.experiment.pair.target.device)

    def best_arms(self, dataset: str, sampling: str) -> dict[str, Result]:
        """Family -> its setting that is fastest on dev, under the sampling of this name; without the bounds.

        Raises:
            ValueError: an unknown family.
        """
        first, other = (self._on_dev(sampling, name) for name in self._deciding(dataset))
        known = {
            name: first[name] if family_named(name).needs_training else result
            for name, result in other.items()
            if name not in BOUNDS
        }
        families = self._terms.families
        if unknown := [name for name in families if name not in known]:
            raise ValueError(f"there is no family {unknown[0]!r} here; one of {', '.join(known)}")
        return {name: result for name, result in known.items() if not families or name in (*families, BASELINE)}

    def _deciding(self, dataset: str) -> tuple[str, str]:
        """The datasets whose dev prompts decide for trained heads, and for the others."""
        return next(iter(self.experiment.datasets)), dataset

    def _results_on_dev(self, sampling: str, dataset: str) -> Mapping[str, Result]:
        experiment = self.under(sampling)
        folder = trace_folder(experiment)
        folder.complete(("dev",))  # nothing is chosen on test
        dev = folder.load_split(dataset, "dev")
        traces = Splits(dev, dev.select([0]))  # the second is not read
        competitors, name = competitors_with(experiment, experiment.heads), f"dev, {dataset}, {sampling}"
        replays = replay_dataset(traces, competitors, perfect_head=False, name=name)
        return hold(replays, self._times, is_online=(False,)).results

    def _under(self, name: str) -> Experiment:
        config, sampling = self._config, self._samplings[name]
        if sampling == self.experiment.sampling:
            return self.experiment
        # its manifest names one test prompt, and only dev is traced
        directory = str(Path(config.decode.dir) / "bench" / name)
        decode = replace(config.decode, dir=directory, allow_foreign_heads=True, num_test=1, perfect_head=False)
        of_pair = SamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        return Experiment(replace(config, decode=decode, pair=replace(config.pair, sampling=of_pair)))


def _family_of(spec: str) -> str:
    """The name of a spec's policy, as it is written: entropy, head, auto, or module:Class."""
    name, _ = read_spec(spec)
    return name if ":" in name else spec.partition(":")[0]


def measured_rows(
    store: KeyedStore, race: str, arms: Mapping[str, Timed], prompts: Sequence[list[int]], *, run: int, desc: str
) -> list[Row]:
    """The row of each prompt, stored as soon as every arm has had its turn; stored ones are not measured again.

    Args:
        race: identifies the rows of this race in the store.
        run: number of the repetition, which has its own seeds.
    """
    keys = {"kind": "row", "race": race}
    rows: dict[int, Row] = {key["prompt"]: row for key, row in store.entries() if keys.items() <= key.items()}
    if len(rows) < len(prompts):
        warm_up(arms, prompts)
    with Bar(desc=desc, total=len(prompts), initial=len(rows), unit="prompts") as bar:
        for index, order in in_turns(arms, range(len(prompts))):
            if index not in rows:
                seed = index + run * len(prompts)
                rows[index] = {name: list(arms[name](prompts[index], seed)) for name in order}
                store.keep([(keys | {"prompt": index}, rows[index])])
                bar.update()
    return [rows[index] for index in range(len(prompts))]
