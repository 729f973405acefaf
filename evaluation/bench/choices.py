"""Settings that compete in a race: each family's fastest on dev under one sampling.

A trace is of one sampling, so each sampling has a trace of dev prompts, in DIR/bench/SAMPLING (that of the config's
sampling is the one of every command).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from configs.schema import Config, SamplingConfig
from decode.experiment import Experiment
from decode.policies.base import Policy
from evaluation.competitor import competitors_with
from evaluation.contest import Replays, Result, hold, replay_dataset, result_of
from evaluation.families import BASELINE, BOUNDS, family
from evaluation.gain import Splits
from evaluation.times import Times
from evaluation.traces.recording import trace_folder
from heads.model.head import AcceptanceHead
from lm import Sampling


class Choices:
    """The setting that each family runs at under one sampling."""

    def __init__(self, config: Config, name: str, sampling: Sampling) -> None:
        """`name`: that of the sampling."""
        of_pair = Sampling(**vars(config.pair.sampling))
        self.experiment = Experiment(config if sampling == of_pair else _under(config, name, sampling))
        self.first_dataset = next(iter(self.experiment.datasets))
        self.replays = cache(self._replays)
        """Every competitor on a dataset's dev prompts; the trace is recorded first, if need be."""
        self._name = name

    def _replays(self, dataset: str) -> Replays:
        folder = trace_folder(self.experiment)
        folder.complete(("dev",))  # nothing is chosen on test
        dev = folder.load_split(dataset, "dev")
        competitors = competitors_with(self.experiment, self.experiment.heads)
        traces = Splits(dev, dev.select([0]))  # test: not read
        name = f"dev, {dataset}, {self._name}"
        return replay_dataset(traces, competitors, perfect_head=False, name=name)

    def at(
        self, times: Times, families: Sequence[str] = (), *, dataset: str | None = None, num_fixed: int = 1
    ) -> dict[str, Result]:
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
        best, arm = known[BASELINE], known[BASELINE].arm
        assert arm is not None
        speeds = times.tokens_per_s(arm.dev)
        order = [int(number) for number in speeds.argsort()[::-1] if number != best.number][: num_fixed - 1]
        others = [result_of(arm, number, times, on_dev=float(speeds[number])) for number in order]
        members = {name: result for name, result in known.items() if not families or name in (*families, BASELINE)}
        return members | {f"{BASELINE} {length.label}": length for length in others}


def of_other_sampling(policy: Policy, sampling: Sampling) -> bool:
    """Whether one of a policy's heads was trained under another sampling."""
    known = [head.provenance.sampling for head in policy.heads if isinstance(head, AcceptanceHead)]
    return any(trained_under and trained_under != sampling.as_dict() for trained_under in known)


def _under(config: Config, name: str, sampling: Sampling) -> Config:
    """The same experiment under another sampling, in its own folder; its manifest names one test prompt, and only dev
    is traced.
    """
    directory = str(Path(config.decode.dir) / "bench" / name)
    decode = replace(config.decode, dir=directory, allow_foreign_heads=True, num_test=1, perfect_head=False)
    of_pair = SamplingConfig(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return replace(config, decode=decode, pair=replace(config.pair, sampling=of_pair))
