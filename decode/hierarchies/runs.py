"""Every drafter of `decode hierarchy` over the same prompts, in the real loop, in turns, so that a machine that slows down slows all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path

import torch
from tqdm import tqdm

from configs.schema import Config
from data_gen.store.manifest import describe_model, settle
from decode.hierarchies.contenders import Arm, Setting
from decode.hierarchies.generations import Decoded, Key, append_decoded, prompt_key, read_decoded
from decode.hierarchies.times import Times, fit_times, swapped
from decode.hierarchies.trio import Trio, check_micro
from decode.loop.counts import Counts
from decode.loop.decoder import SpeculativeDecoder
from lm import Sampling
from lm.uniforms import seed_of

MICRO_ALONE = "sd with the micro"
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    """One arm in one setting over the prompts."""

    arm: Arm
    setting: Setting
    decoded: tuple[Decoded, ...]

    @property
    def label(self) -> str:
        return self.setting.label

    @property
    def is_micro(self) -> bool:
        """Whether the micro alone drafted."""
        return self.arm.name == MICRO_ALONE

    @property
    def each(self) -> list[Counts]:
        """Counts of each generation, every forward booked to the model that ran it."""
        return [swapped(one.counts) if self.is_micro else one.counts for one in self.decoded]

    @property
    def counts(self) -> Counts:
        """Their sum."""
        return reduce(add, self.each)

    @property
    def seconds(self) -> list[float]:
        """Wall clock of each generation."""
        return [one.seconds for one in self.decoded]


def directory_of(config: Config, dataset: str) -> Path:
    """Where the generations of one dataset are kept; made, or its manifest compared with this run's.

    Raises:
        ValueError: the config has no micro model, or another run's generations lie there.
    """
    check_micro(config.pair)
    sources = {name: getattr(config.pair, name) for name in ("target", "draft", "micro")}
    described = {name: describe_model(source, trust_remote_code=config.pair.trust_remote_code) for name, source in sources.items()}
    settings = {name: getattr(config.decode, name) for name in ("max_draft_length", "max_new_tokens", "seed")}
    directory = Path(config.decode.dir) / "hierarchy" / dataset
    directory.mkdir(parents=True, exist_ok=True)
    settle(directory, {"format": 1, **described, "sampling": vars(config.pair.sampling), **settings}, setting="decode.dir")
    return directory


def play(config: Config, trio: Trio, arms: Sequence[Arm], prompts: Prompts, *, directory: Path) -> list[Run]:
    """Every setting of every arm over the prompts, decoded where not all are there yet, and kept prompt by prompt.

    A prompt that lacks one arm is decoded anew by all of them (same seed, same tokens), so that their times are of one moment.
    """
    pairs = [(arm, setting) for arm in arms for setting in arm.settings]
    keys = [[Key(prompt_key(ids), arm.name, setting.key) for arm, setting in pairs] for ids in prompts]
    kept = read_decoded(directory)
    missing = [(ids, row) for ids, row in zip(prompts, keys, strict=True) if any(key not in kept for key in row)]
    if missing:
        decoders = {(arm.name, setting.key): _decoder(config, trio, setting) for arm, setting in pairs}
        _warm_up(decoders, prompts[0])
        for ids, row in tqdm(missing, desc=f"hierarchies: {len(pairs)} drafters", unit="prompt"):
            seed = seed_of(config.decode.seed, "hierarchy", row[0].prompt)
            found = {}
            for key in row:
                generator = torch.Generator().manual_seed(seed)
                generation = decoders[key.arm, key.setting].generate(ids, config.decode.max_new_tokens, generator=generator)
                found[key] = Decoded.of(generation)
            append_decoded(directory, found)
            kept |= found
    columns = zip(*([kept[key] for key in row] for row in keys), strict=True)
    return [Run(arm, setting, tuple(column)) for (arm, setting), column in zip(pairs, columns, strict=True)]


def times_of(runs: Sequence[Run]) -> Times:
    """t_micro, t_draft and t_target, fitted over all generations."""
    return fit_times([one for run in runs for one in run.decoded], is_micro=[run.is_micro for run in runs for _ in run.decoded])


def chosen(arms: Sequence[Arm], dev: Sequence[Run], speed: Callable[[Run], float]) -> list[Arm]:
    """Each arm with the setting that is fastest on dev; with its first where there is no dev."""
    if not dev:
        return [replace(arm, settings=arm.settings[:1]) for arm in arms]
    best = {run.arm.name: run.setting.key for run in sorted(dev, key=speed)}
    return [replace(arm, settings=tuple(s for s in arm.settings if s.key == best[arm.name])) for arm in arms]


def _decoder(config: Config, trio: Trio, setting: Setting) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        trio.target,
        setting.build(),
        sampling=Sampling(**vars(config.pair.sampling)),
        max_draft_length=config.decode.max_draft_length,
        eos_ids=trio.pair.eos_ids,
    )


def _warm_up(decoders: Mapping[tuple[str, str], SpeculativeDecoder], prompt_ids: Sequence[int], *, num_tokens: int = 4) -> None:
    for decoder in decoders.values():
        decoder.generate(prompt_ids, num_tokens, generator=torch.Generator().manual_seed(0))
