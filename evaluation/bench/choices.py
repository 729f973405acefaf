"""Settings that compete in a race: those that were named, or each family's fastest on dev under one sampling.

A trace is of one sampling, so each sampling has a trace of dev prompts, in DIR/bench/SAMPLING (that of the config's
sampling is the one of every command).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from configs.schema import Config, SamplingConfig
from decode.experiment import Experiment
from decode.policies.base import Policy
from decode.policies.registry import read_spec
from evaluation.competitor import competitors_with
from evaluation.contest import Replays, Result, hold, replay_dataset, result_of
from evaluation.families import BASELINE, BOUNDS, family
from evaluation.gain import Splits
from evaluation.times import Times
from evaluation.traces.recording import TraceFolder, trace_folder
from heads.model.head import AcceptanceHead
from lm import Sampling


class Racer(NamedTuple):
    """A family at one setting, which takes part in the race."""

    family: str
    setting: str
    policy: Policy | None = None
    """Policy that our loop runs; None: a schedule of transformers."""
    on_dev: float | None = None
    """Tokens per second that were predicted when dev chose the setting; None for a policy that was named."""

    def is_foreign(self, sampling: Sampling) -> bool:
        """Whether one of its heads was trained under another sampling."""
        heads = self.policy.heads if self.policy else ()
        known = [head.provenance.sampling for head in heads if isinstance(head, AcceptanceHead)]
        return any(trained_under and trained_under != sampling.as_dict() for trained_under in known)


class Choices:
    """The setting that each family runs at under one sampling."""

    def __init__(self, config: Config, name: str, sampling: Sampling) -> None:
        """Args:
        config: the experiment.
        name: the name of the sampling.
        sampling: the sampling of the cells.
        """
        of_pair = Sampling(**vars(config.pair.sampling))
        self.experiment = Experiment(config if sampling == of_pair else _under(config, name, sampling))
        self.first_dataset = next(iter(self.experiment.datasets))
        self._name = name
        self._replays: dict[str, Replays] = {}

    @cached_property
    def _folder(self) -> TraceFolder:
        folder = trace_folder(self.experiment)
        folder.complete(("dev",))  # nothing is chosen on test
        return folder

    def replays(self, dataset: str) -> Replays:
        """Every competitor on the dataset's dev prompts; the trace is recorded first, if need be."""
        if dataset not in self._replays:
            dev, heads = self._folder.load_split(dataset, "dev"), self.experiment.heads
            traces = Splits(dev, dev.select([0]))  # nothing is reported on test here
            self._replays[dataset] = replay_dataset(
                traces,
                competitors_with(self.experiment, heads),
                heads=heads,
                perfect_head=False,
                name=f"dev, {dataset}, {self._name}",
            )
        return self._replays[dataset]

    def at(
        self, times: Times, families: Sequence[str] = (), *, dataset: str | None = None, num_fixed: int = 1
    ) -> dict[str, Racer]:
        """Name -> a family at its setting that is fastest on dev at these times.

        Args:
            times: of the pair.
            families: leave out all but these and the best fixed length; none named: keep all.
            dataset: its dev prompts decide, those of the first dataset for trained heads; None: the first.
            num_fixed: fixed lengths that run, the fastest on dev first.

        Raises:
            ValueError: an unknown family.
        """
        names = dict.fromkeys((self.first_dataset, dataset or self.first_dataset))
        results = [hold(self.replays(name), times, is_online=(False,)).results for name in names]
        first, other = results[0], results[-1]
        known = {
            name: first[name] if family(name).needs_training else result
            for name, result in other.items()
            if name not in BOUNDS
        }
        if unknown := [name for name in families if name not in known]:
            raise ValueError(f"there is no family {unknown[0]!r} here; one of {', '.join(known)}")
        members = {name: result for name, result in known.items() if not families or name in (*families, BASELINE)}
        for length in _next_best(known[BASELINE], times, num_fixed - 1):
            members[f"{BASELINE} {length.label}"] = length
        return {name: Racer(one.family, one.label, one.policy, one.on_dev) for name, one in members.items()}

    def named(self, specs: Sequence[str]) -> Mapping[str, Racer]:
        """The policies that these specs write down (`decode.policies.registry`)."""
        return {spec: Racer(_family_of(spec), spec, self.experiment.policy(spec)) for spec in specs}


def _next_best(best: Result, times: Times, num: int) -> list[Result]:
    """The competitor's other settings, the fastest on dev first."""
    assert best.arm is not None
    speeds = times.tokens_per_s(best.arm.dev)
    order = [int(number) for number in speeds.argsort()[::-1] if number != best.number]
    return [result_of(best.arm, number, times, on_dev=float(speeds[number])) for number in order[:num]]


def _family_of(spec: str) -> str:
    """The name of a spec's policy, as it is written: entropy, head, auto, or module:Class."""
    name, _ = read_spec(spec)
    return name if ":" in name else spec.partition(":")[0]


def _under(config: Config, name: str, sampling: Sampling) -> Config:
    """The same experiment under another sampling, in its own folder; its manifest names one test prompt, and only dev
    is traced.
    """
    directory = str(Path(config.decode.dir) / "bench" / name)
    decode = replace(config.decode, dir=directory, allow_foreign_heads=True, num_test=1, perfect_head=False)
    of_pair = SamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return replace(config, decode=decode, pair=replace(config.pair, sampling=of_pair))
