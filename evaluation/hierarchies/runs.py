"""Competitors (of `evaluation hierarchy`, of the papers' tables) over the same prompts, in the real loop, in turns: if
it slows down, all do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from json import dumps
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_gen.store.manifest import digest, settle
from decode.drafters.factory import PairModels
from decode.experiment import LEVELS, Experiment, Level
from decode.loop.counts import Counts
from decode.loop.decoder import Generation, SpeculativeDecoder
from evaluation.gain import Spent
from evaluation.hierarchies.built import Competitor, Setting, fastest
from evaluation.hierarchies.generations import Decoded, Key, append_decoded, prompt_key, read_decoded
from evaluation.hierarchies.times import TrioTimes, fit_times, swapped
from evaluation.keys import code_key, machine_key, models_key
from evaluation.turns import in_turns
from lm import RandomSampler, Sampling
from lm.uniforms import GENERATOR, seed_of
from store.lock import only_writer
from store.progress import Bar

MICRO_ALONE = "sd with the micro"
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Candidate:
    """One competitor in one setting over the prompts."""

    competitor: Competitor
    setting: Setting
    decoded: tuple[Decoded, ...]

    @property
    def label(self) -> str:
        return self.setting.label

    @property
    def name(self) -> str:
        """Competitor and setting."""
        return f"{self.competitor.name} {self.label}".strip()

    @property
    def is_micro(self) -> bool:
        """Whether the micro alone drafted."""
        return self.competitor.name == MICRO_ALONE

    @cached_property
    def each(self) -> list[Counts]:
        """Counts of each generation, every forward attributed to the model that ran it."""
        return [swapped(generation.counts) if self.is_micro else generation.counts for generation in self.decoded]

    @cached_property
    def counts(self) -> Counts:
        """The sum of all generations' counts."""
        return reduce(add, self.each)

    @property
    def measured(self) -> Spent:
        """Throughput by wall clock."""
        return self.spent([generation.seconds for generation in self.decoded])

    def modelled(self, times: TrioTimes) -> Spent:
        """Throughput by the cost model with three times."""
        return self.spent([times.seconds(counts, self.setting.stops) for counts in self.each])

    def speedup(self, times: TrioTimes) -> float:
        """Speed-up over the target alone by the cost model."""
        return times.speedup(self.counts, self.setting.stops)

    def spent(self, seconds: Sequence[float]) -> Spent:
        """The emitted tokens of each prompt, with these seconds."""
        return Spent(np.array([counts.num_emitted for counts in self.each]), np.array(seconds))


@dataclass(frozen=True, kw_only=True)
class ResumableLoop:
    """The real loop on one trio, with the folder that stores what it wrote for one dataset."""

    directory: Path
    trio: PairModels
    sampling: Sampling
    max_draft_length: int
    max_new_tokens: int
    seed: int
    run: str = ""
    """As a `Key` has it."""

    def play(
        self, competitors: Sequence[Competitor], prompts: Sequence[Sequence[int]], *, repeats: int = 1
    ) -> list[Candidate]:
        """Every setting of every competitor over the prompts, decoded where the folder lacks some, and stored prompt by
        prompt.

        A prompt that lacks one of them is decoded again by all (same seed, same tokens), so that their times are of one
        moment.

        Args:
            competitors: the drafters, which take turns, another one first each time.
            prompts: token ids of each.
            repeats: times that each decodes a prompt; medians of its seconds are kept.
        """
        with only_writer(self.directory, setting="decode.dir"):
            return self._play(competitors, prompts, repeats)

    def _play(
        self, competitors: Sequence[Competitor], prompts: Sequence[Sequence[int]], repeats: int
    ) -> list[Candidate]:
        pairs = [(competitor, setting) for competitor in competitors for setting in competitor.settings]
        keys = [
            [Key(prompt_key(ids), competitor.name, setting.key, self.run) for competitor, setting in pairs]
            for ids in prompts
        ]
        stored = read_decoded(self.directory)
        is_there = {key for key, generation in stored.items() if generation.repeats >= repeats}
        missing = [(ids, row) for ids, row in zip(prompts, keys, strict=True) if not is_there.issuperset(row)]
        if missing:
            decoders = {(competitor.name, setting.key): self._decoder(setting) for competitor, setting in pairs}
            for decoder in decoders.values():
                decoder.generate(prompts[0], _WARM_UP_TOKENS, generator=torch.Generator().manual_seed(0))
            for turn, (ids, row) in enumerate(
                Bar(missing, desc=f"{self.directory.name}: {len(pairs)} drafters", unit="prompts")
            ):
                decoded = self._decode(decoders, row, in_turns(row, repeats * [ids], first=turn))
                append_decoded(self.directory, decoded)
                stored |= decoded
        columns = zip(*([stored[key] for key in row] for row in keys), strict=True)
        return [
            Candidate(competitor, setting, tuple(column))
            for (competitor, setting), column in zip(pairs, columns, strict=True)
        ]

    def _decode(
        self,
        decoders: Mapping[tuple[str, str], SpeculativeDecoder],
        row: Sequence[Key],
        turns: Iterable[tuple[Sequence[int], Sequence[Key]]],
    ) -> dict[Key, Decoded]:
        """One prompt by every decoder, all from the same seed."""
        seed = seed_of(self.seed, "hierarchy", row[0].prompt)
        repeated: dict[Key, list[Generation]] = {key: [] for key in row}
        for prompt_ids, order in turns:
            for key in order:
                decoder = decoders[key.arm, key.setting]
                repeated[key].append(decoder.generate(prompt_ids, self.max_new_tokens, generator=RandomSampler(seed)))
        return {key: Decoded.of(generations) for key, generations in repeated.items()}

    def _decoder(self, setting: Setting) -> SpeculativeDecoder:
        models = setting.models or self.trio
        return models.decoder(setting.build(), sampling=self.sampling, max_draft_length=self.max_draft_length)


def resumable_loop(
    experiment: Experiment, dataset: str, trio: PairModels, *, folder: str = "hierarchy"
) -> ResumableLoop:
    """The loop of one dataset, with a folder below this one of decode.dir.

    Raises:
        ValueError: the generations of other settings lie in its folder.
    """
    settings = {name: getattr(experiment.decode, name) for name in ("max_draft_length", "max_new_tokens", "seed")}
    directory = experiment.directory / folder / dataset
    directory.mkdir(parents=True, exist_ok=True)
    levels = [level for level in LEVELS if getattr(experiment.models, level) is not None]
    models: dict[str, Any] = {level: experiment.described(level) for level in levels}
    manifest = {"format": 1, **models, "sampling": experiment.sampling.as_dict(), **settings, "generator": GENERATOR}
    settle(directory, manifest, setting="decode.dir")
    return ResumableLoop(
        directory=directory, trio=trio, sampling=experiment.sampling, run=run_key(experiment, levels), **settings
    )


def run_key(experiment: Experiment, levels: Sequence[Level]) -> str:
    """A digest of everything that decides seconds and is in neither the manifest nor a setting's key."""
    models = models_key(experiment, *levels)
    return digest(dumps([models, machine_key(experiment), code_key()], sort_keys=True))[:16]


def trio_times(runs: Sequence[Candidate]) -> TrioTimes:
    """t_micro, t_draft, t_target and stops, fitted over all generations."""
    return fit_times(
        [generation for run in runs for generation in run.decoded],
        is_micro=[run.is_micro for run in runs for _ in run.decoded],
        stops=[run.setting.stops for run in runs for _ in run.decoded],
    )


def best_on_dev(dev: Sequence[Candidate], speed: Callable[[Candidate], float]) -> dict[str, Setting]:
    """Competitor -> its setting that is fastest on dev; of equals the one that is built last."""
    return {
        name: run.setting
        for name, run in fastest(reversed(dev), of=lambda run: run.competitor.name, speed=speed).items()
    }


def at_settings(competitors: Sequence[Competitor], best: Mapping[str, Setting]) -> list[Competitor]:
    """Each competitor with its one setting; where there is none, because there was no dev, with its first."""
    return [
        replace(competitor, settings=(best.get(competitor.name, competitor.settings[0]),)) for competitor in competitors
    ]
