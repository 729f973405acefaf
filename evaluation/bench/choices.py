"""Settings that compete in a race: those that were named, or each family's fastest on dev under one sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from configs.schema import Config, SamplingConfig
from decode.experiment import Experiment
from decode.policies.registry import read_spec
from evaluation.bench.arms import Racer
from evaluation.competitor import competitors_of
from evaluation.contest.arms import Pick, Replays, picks_of, replay_dataset
from evaluation.families import BASELINE, BOUNDS
from evaluation.families import family as family_named
from evaluation.gain import Splits
from evaluation.times import Times
from evaluation.traces.recording import TraceFolder, trace_folder
from lm import Sampling

"""How the families of trained heads begin, whose settings are chosen at home."""


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
        self._name = name
        self._replays: dict[str, Replays] = {}

    @cached_property
    def _folder(self) -> TraceFolder:
        folder = trace_folder(self.experiment)
        folder.complete(("dev",))  # nothing is chosen on test
        return folder

    @property
    def home(self) -> str:
        """The first dataset, on whose dev prompts heads are chosen."""
        return next(iter(self.experiment.datasets))

    def replays(self, dataset: str) -> Replays:
        """Every grid on the dataset's dev prompts; the trace is recorded first, if need be."""
        if dataset not in self._replays:
            decode, heads = self.experiment.decode, self.experiment.heads
            dev = self._folder.load_split(dataset, "dev")
            grids = competitors_of(
                decode.grid, heads, max_draft_length=decode.max_draft_length, policies=decode.policies
            )
            traces = Splits(dev, dev.select([0]))  # nothing is reported on test here
            self._replays[dataset] = replay_dataset(
                traces, grids, heads=heads, perfect_head=False, name=f"dev, {dataset}, {self._name}"
            )
        return self._replays[dataset]

    def at(
        self, cost: Times, families: Sequence[str] = (), *, dataset: str | None = None, num_fixed: int = 1
    ) -> dict[str, Racer]:
        """Family -> its setting that is fastest on dev at these costs.

        Args:
            cost: the costs of a cell.
            families: leave out all but these and the best fixed length; none named: keep all.
            dataset: its dev prompts decide, those of home for trained heads; None: home.
            num_fixed: fixed lengths that run, the fastest on dev first.

        Raises:
            ValueError: a family that there is not.
        """
        picks = self._picks(dataset or self.home, cost)
        trained = picks if dataset in (None, self.home) else self._picks(self.home, cost)
        known = {
            family: trained[family] if family_named(family).needs_training else pick
            for family, pick in picks.items()
            if family not in BOUNDS
        }
        for family in families:
            if family not in known:
                raise ValueError(f"there is no family {family!r} here; one of {', '.join(known)}")
        kept = {family: pick for family, pick in known.items() if not families or family in (*families, BASELINE)}
        for pick in _next_best(kept[BASELINE], cost, num_fixed - 1):
            kept[f"{BASELINE} {pick.label}"] = pick
        return {
            name: Racer(pick.family, pick.label, pick.policy, pick.tokens_per_s_on_dev(cost))
            for name, pick in kept.items()
        }

    def _picks(self, dataset: str, cost: Times) -> dict[str, Pick]:
        replays = self.replays(dataset)
        return picks_of([*replays.arms, *replays.auto_arms(cost, is_online=(False,))], cost)

    def named(self, specs: Sequence[str]) -> Mapping[str, Racer]:
        """The policies that these specs write down (`decode.policies.registry`)."""
        return {spec: Racer(_family_of(spec), spec, self.experiment.policy(spec)) for spec in specs}


def _next_best(best: Pick, cost: Times, num: int) -> list[Pick]:
    """The arm's other settings, the fastest on dev first."""
    order = cost.tokens_per_s(best.arm.dev).argsort()[::-1]
    return [Pick(best.arm, int(setting)) for setting in order if setting != best.setting][:num]


def _family_of(spec: str) -> str:
    """The name of a spec's policy, as it is written: entropy, head, auto, or module:Class."""
    name, _ = read_spec(spec)
    return name if ":" in name else spec.partition(":")[0]


def _under(config: Config, name: str, sampling: Sampling) -> Config:
    """The same experiment under another sampling, in a folder of its own, whose manifest names one test prompt and of
    which dev alone is traced.
    """
    decode = replace(
        config.decode,
        dir=str(Path(config.decode.dir) / "bench" / name),
        allow_foreign_heads=True,
        num_test=1,
        perfect_head=False,
    )
    law = SamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return replace(config, decode=decode, pair=replace(config.pair, sampling=law))
