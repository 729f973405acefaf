"""Every policy family and every schedule of transformers in turns, one cell per dataset and sampling.

DIR/bench.jsonl holds what every arm did on each prompt (`evaluation.sources.clock`), and the arms of each finished cell
with its key. An interrupted race resumes with its next prompt; only what transformers' schedules had learnt is lost.
Two processes may run different cells of one race.

Policies run as they were named, or each family at its setting that is fastest on dev at the times of the pair: heads
and `auto` on the dev prompts of the first dataset, all others on those of the raced dataset, which favours the others.
A trace is of one sampling, so each sampling has a trace of dev prompts, in DIR/bench/SAMPLING (that of the config's
sampling is the one of every command). Heads were trained under one sampling; under others they run all the same, and
the tables say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from json import dumps
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from configs.flag_types import RaceRules
from configs.schema import Config, ModelSource, SamplingConfig
from data_gen.store.manifest import describe_model, digest
from decode.experiment import Experiment
from decode.policies import FixedLength, Policy
from decode.policies.registry import AUTO_TOKEN_PROB, read_spec, registered
from evaluation.bench import arms as ways
from evaluation.bench.results import OTHER_SAMPLING, Cell, competitor, contest_of
from evaluation.competitor import Competitor, competes, competitors_with
from evaluation.contest import Contest, Result, hold, replay_dataset
from evaluation.costs.machine import costs_for
from evaluation.costs.measure import Loop
from evaluation.families import ALONE, BASELINE, BOUNDS
from evaluation.families import family as family_named
from evaluation.gain import Splits
from evaluation.keys import class_key, head_key, machine_key, models_key, policy_key, prompts_key
from evaluation.sources.clock import Arm, Request, StoredRuns, clock_in_turns, generations_of
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from evaluation.tuning.calibration import is_of_other_sampling
from heads.model.head import AcceptanceHead
from lm import Sampling, load_model, model_config
from store.json_files import KeyedStore

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(),
    "nucleus": Sampling(temperature=0.7, top_p=0.9),
}
_CONSTANTS = (2, 5, 10)
"""Lengths of transformers' constant schedule where no best fixed length is known."""
_REMEDY = "delete the line, and it is measured again"
_NO_PART = {
    "as_recorded",
    "datasets",
    "dir",
    "heads",
    "num_test",
    "perfect_head",
    "prompts_per_shard",
    "ratios",
    "stop_share",
    "t_draft_s",
    "t_target_s",
    "t_target_ms",
    "trace_hidden",
    "verify_shares",
}
"""Settings of `decode` that do not decide what dev chooses, or that a key has in another form."""


class Race:
    """The race's cells of one config, stored between runs."""

    def __init__(
        self,
        config: Config,
        rules: RaceRules,
        *,
        num_prompts: int,
        num_tokens: int,
        policies: tuple[str, ...] = (),
        families: tuple[str, ...] = (),
        constants: tuple[int, ...] = (),
    ) -> None:
        """Arguments as `evaluation.bench.command.bench` has them.

        Raises:
            ValueError: an unknown policy, a head that does not fit, no fixed length among named policies.
            FileNotFoundError: no head or assistant at that path.
        """
        self._config = config
        self._rules = rules
        self._num_prompts = num_prompts
        self._num_tokens = num_tokens
        self._policies = policies
        self._families = families
        self._constants = constants
        self.experiment = Experiment(config)
        self._samplings = SAMPLINGS | {"own": self.experiment.sampling}
        # heads and custom policies are checked before anything is measured
        self._named = [self.experiment.policy(spec) for spec in policies]
        _ = self._named or self.experiment.heads
        for name in config.decode.policies:
            registered(name)
        if self._named and BASELINE not in map(_family_of, policies):
            raise ValueError(
                f"--policies names {', '.join(policies)}, and gains are measured from a fixed length; name one, "
                "too, as fixed_length:k=5"
            )
        self._assistant_source = _assistant_of(self.experiment, rules.assistant)
        self.under = cache(self._under)
        self._on_dev = cache(self._results_on_dev)
        self.store = KeyedStore(self.experiment.directory / "bench.jsonl", remedy=_REMEDY)

    @cached_property
    def _times(self) -> Times:
        return costs_for(self.experiment)

    def cells(self, samplings: Sequence[str]) -> Iterator[Cell]:
        """One cell per dataset and sampling, each as soon as it is there.

        Raises:
            ValueError: an unknown dataset.
        """
        known = list(self.experiment.datasets)
        datasets = self._rules.datasets
        if unknown := [name for name in datasets if name not in known]:
            raise ValueError(f"--race.datasets names {unknown[0]!r}; decode.datasets are {', '.join(known)}")
        for dataset in datasets or known[:1]:
            for sampling in samplings:
                yield self._cell(dataset, sampling)

    def _cell(self, dataset: str, sampling: str) -> Cell:
        key = self.key(dataset, sampling)
        contest = self._finished(dataset, key)
        if contest is None:
            contest = self._measured(dataset, sampling, key)
            arms = {
                name: {
                    "family": result.family,
                    "setting": result.competitor.name,
                    "version": result.competitor.version,
                    "on_dev": result.on_dev,
                }
                for name, result in contest.results.items()
            }
            self.store.keep([(key, {"arms": arms})])
        return Cell(
            contest=contest,
            sampling=sampling,
            num_tokens=self._num_tokens,
            run=self._rules.run,
            default_schedule=ways.about_default(),
        )

    def key(self, dataset: str, sampling: str) -> dict[str, object]:
        """Everything that a cell's value depends on."""
        experiment = self.experiment
        decode = asdict(self.experiment.decode)
        key = {
            "kind": "cell",
            "dataset": dataset,
            "sampling": sampling,
            "terms": {
                "num_prompts": self._num_prompts,
                "num_tokens": self._num_tokens,
                "policies": self._policies,
                "families": self._families,
                "constants": self._constants,
                "rules": asdict(replace(self._rules, datasets=())),
            },
            "law": self._samplings[sampling].as_dict(),
            "prompts": prompts_key(experiment, experiment.prompts(dataset, "test", num=self._num_prompts)),
            "models": models_key(experiment, "target", "draft"),
            "assistant": self._assistant_source and describe_model(self._assistant_source),
            "default_schedule": ways.about_default(),
            "max_draft_length": decode["max_draft_length"],
            "costs": asdict(self._times),
            **machine_key(experiment),
        }
        if self._named:
            return key | {"policies": list(map(policy_key, self._named))}
        classes = {name: class_key(registered(name).kind) for name in decode["policies"]}
        compared = {name: value for name, value in decode.items() if name not in _NO_PART}
        return key | {
            "decode": compared,
            "classes": classes,
            "heads": {name: head_key(head) for name, head in experiment.heads.items()},
            "dev": [prompts_key(experiment, experiment.prompts(name, "dev")) for name in self._deciding(dataset)],
        }

    def _finished(self, dataset: str, key: Mapping[str, object]) -> Contest | None:
        """A stored cell's contest; None unless all of its generations are there."""
        stored = self.store.get(key)
        if stored is None:
            return None
        arms: Mapping[str, dict[str, Any]] = stored["arms"]
        competitors = {
            name: competitor(arm["family"], arm["setting"], version=arm["version"]) for name, arm in arms.items()
        }
        rows = StoredRuns(self.store, _run_of(key, competitors)).load()
        names = self._requests(dataset)
        if not rows.keys() >= names.keys():
            return None  # a line was deleted
        runs = {arm: [rows[name][arm] for name in names] for arm in arms}
        return contest_of(
            dataset, self._times, competitors, runs, on_dev={name: arm["on_dev"] for name, arm in arms.items()}
        )

    def _measured(self, dataset: str, sampling: str, key: Mapping[str, object]) -> Contest:
        """A cell's contest on the clock; what is in the store is not decoded again."""
        arms = self._arms(dataset, sampling)
        competitors = {name: entry for name, (_, entry) in arms.items()}
        requests = self._requests(dataset)
        runs = clock_in_turns(
            {name: run for name, (run, _) in arms.items()},
            requests,
            desc=f"bench: {dataset}, {sampling}",
            store=StoredRuns(self.store, _run_of(key, competitors)),
            warm_up=next(iter(requests.values())),
        )
        best = {} if self._named else self.best_arms(dataset, sampling)
        return contest_of(
            dataset, self._times, competitors, runs, on_dev={name: result.on_dev for name, result in best.items()}
        )

    def _requests(self, dataset: str) -> dict[str, Request]:
        prompts = self.experiment.prompt_ids(dataset, "test", num=self._num_prompts)
        first_seed = self._rules.run * len(prompts)
        return {str(number): (ids, self._num_tokens, first_seed + number) for number, ids in enumerate(prompts)}

    def _arms(self, dataset: str, sampling_name: str) -> dict[str, tuple[Arm, Competitor]]:
        sampling = self._samplings[sampling_name]
        named = dict(zip(self._policies, self._named, strict=True))
        best = {} if named else self.best_arms(dataset, sampling_name)
        loop = Loop.of(
            self.experiment,
            sampling=sampling,
            max_new_tokens=self._num_tokens,
            ends_at_eos=not self._rules.ignore_eos,
        )

        def ours(family: str, setting: str, policy: Policy) -> tuple[Arm, Competitor]:
            heads = [head for head in policy.heads if isinstance(head, AcceptanceHead)]
            is_foreign = any(is_of_other_sampling(head, sampling) for head in heads)
            version = OTHER_SAMPLING if is_foreign else ""
            return generations_of(loop.decoder(policy)), competitor(family, setting, version=version)

        arms = {ALONE: ours(ALONE, "-", FixedLength(0))}
        arms |= {spec: ours(_family_of(spec), spec, policy) for spec, policy in named.items()}
        arms |= {name: ours(name, result.label, result.policy) for name, result in best.items()}
        fixed = best[BASELINE].policy if best else named.get(BASELINE)
        for (family, setting), changes in self._schedules(fixed).items():
            run = ways.assisted(
                self.experiment.pair,
                sampling,
                changes,
                assistant=self._assistant,
                ends_at_eos=not self._rules.ignore_eos,
            )
            arms[f"{family} {setting}"] = run, competitor(family, setting)
        return arms

    def _schedules(self, fixed: Policy | None) -> dict[tuple[str, str], Mapping[str, object] | None]:
        """(family, setting) of transformers' own ways -> changes of the draft's generation config; None: no draft."""
        if not self._rules.transformers:
            return {}
        schedules: dict[tuple[str, str], Mapping[str, object] | None] = {(ways.UNASSISTED, "-"): None}
        if self.experiment.has_feature_draft and self._assistant is None:
            return schedules
        # half of the best, too: a draft step of transformers costs more, so fewer do better
        beside = sorted({max(1, fixed.k // 2), max(1, fixed.k)}) if isinstance(fixed, FixedLength) else _CONSTANTS
        schedules |= {(ways.DEFAULT, "-"): {}, (ways.HEURISTIC, "-"): ways.HEURISTICALLY}
        schedules |= {(ways.CONSTANT, f"k={k}"): ways.constant(k) for k in self._constants or beside}
        return schedules

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
        families = self._families
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
        competitors = competitors_with(experiment, experiment.heads)
        replays = replay_dataset(
            traces,
            competitors,
            perfect_head=False,
            name=f"dev, {dataset}, {sampling}",
            has_token_rule=competes(AUTO_TOKEN_PROB, experiment),
        )
        return hold(replays, self._times, is_online=(False,)).results

    def _under(self, name: str) -> Experiment:
        config = self._config
        sampling = self._samplings[name]
        if sampling == self.experiment.sampling:
            return self.experiment
        # its manifest names one test prompt, and only dev is traced
        directory = str(Path(config.decode.dir) / "bench" / name)
        decode = replace(config.decode, dir=directory, allow_foreign_heads=True, num_test=1, perfect_head=False)
        of_pair = SamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        return Experiment(replace(config, decode=decode, pair=replace(config.pair, sampling=of_pair)))


def _assistant_of(experiment: Experiment, path: str | None) -> ModelSource | None:
    if path is None:
        return None
    if not experiment.has_feature_draft:
        raise ValueError(f"--race.assistant is {path}, and the pair's own draft drafts for transformers")
    source = ModelSource(path=path, dtype=experiment.models.target.dtype)
    model_config(source)
    return source


def _family_of(spec: str) -> str:
    """The name of a spec's policy, as it is written: entropy, head, auto, or module:Class."""
    name, _ = read_spec(spec)
    return name if ":" in name else spec.partition(":")[0]


def _run_of(key: Mapping[str, object], competitors: Mapping[str, Competitor]) -> str:
    """A digest of everything that decides the generations of a cell."""
    settings = [(name, entry.name) for name, entry in competitors.items()]
    return digest(dumps([key, settings], sort_keys=True, default=str))
