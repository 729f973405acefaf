"""At which setting each family runs: policies that were named, or for each family what is fastest on dev at the costs
of a cell.

A trace is of one sampling, so each sampling has a trace of dev prompts of its own, in DIR/bench/SAMPLING (that of the
config's sampling is the one of every command), recorded with the models as they are: extra layers change no token.
Heads were trained under one sampling, too; elsewhere they run as foreign heads, which is said beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from configs.schema import Config, SamplingConfig
from decode.experiment import Experiment
from decode.policies.base import Policy
from evaluation.contest.arms import Replays, picks_of, replay_dataset
from evaluation.contest.grids import BOUNDS, grids_of
from evaluation.costs.model import CostModel
from evaluation.traces.recording import Traces, trace_folder
from heads.model.head import AcceptanceHead
from lm import Sampling


class Chosen(NamedTuple):
    """A family at one setting."""

    setting: str
    policy: Policy
    on_dev: float | None = None
    """Tokens per second predicted of dev; unknown of a policy that was named."""

    def is_foreign(self, sampling: Sampling) -> bool:
        """Was one of its heads trained under another sampling?"""
        known = [head.provenance.sampling for head in self.policy.heads if isinstance(head, AcceptanceHead)]
        return any(each and each != sampling.as_dict() for each in known)


class Choices:
    """The setting that each family runs at under one sampling."""

    def __init__(self, config: Config, name: str, sampling: Sampling, *, cost: CostModel) -> None:
        """Args:
        config: of the command.
        name: of the sampling.
        sampling: of the cells.
        cost: of the pair as it is; decides which head of each timing `auto` reads.
        """
        own = Sampling(**vars(config.pair.sampling))
        self.experiment = Experiment(config if sampling == own else _under(config, name, sampling))
        self._name, self._cost = name, cost

    @cached_property
    def replays(self) -> Replays:
        """Every grid on dev; the trace is recorded first, if need be."""
        experiment, folder = self.experiment, trace_folder(self.experiment)
        folder.complete()
        dev = folder.load(next(iter(experiment.datasets))).dev
        grids = grids_of(experiment.decode.grid, experiment.heads, max_draft_length=experiment.decode.max_draft_length)
        traces = Traces(dev, dev.select([0]))  # nothing is reported on test here
        return replay_dataset(
            traces, grids, heads=experiment.heads, cost=self._cost, perfect_head=False, name=f"dev, {self._name}"
        )

    def at(self, cost: CostModel, families: Sequence[str] = ()) -> dict[str, Chosen]:
        """Family -> what is fastest on dev at these costs.

        Args:
            cost: of a cell.
            families: leave out all but these and the best fixed length; none named: keep all.

        Raises:
            ValueError: a family that there is not.
        """
        picks = picks_of([*self.replays.arms, *self.replays.auto_arms(cost, is_online=(False,))], cost)
        known = {family: pick for family, pick in picks.items() if family not in BOUNDS}
        for family in families:
            if family not in known:
                raise ValueError(f"there is no family {family!r} here; one of {', '.join(known)}")
        return {
            family: Chosen(pick.label, pick.policy, pick.tokens_per_s_on_dev(cost))
            for family, pick in known.items()
            if not families or family in (*families, "fixed_length")
        }

    def named(self, specs: Sequence[str]) -> Mapping[str, Chosen]:
        """The policies that these specs write down (`decode.policies.registry`)."""
        return {spec: Chosen(spec, self.experiment.policy(spec)) for spec in specs}


def _under(config: Config, name: str, sampling: Sampling) -> Config:
    """The same experiment under another sampling, in a folder of its own; of test prompts one is traced, which a trace
    needs.
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
