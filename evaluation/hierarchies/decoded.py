"""Drafters decoded on the same prompts, in turns: what each wrote and how long it took, stored so that a run resumes.

    DIR/manifest.json    what decides the tokens
    DIR/decoded.jsonl    prompt (a hash of its token ids), arm, setting and run (a hash of the machine and the code)
                         -> counts, seconds, repeats (`store.json_files`)

Hierarchies cannot be replayed from a trace: which tokens an inner verification rejects depends on its random draws.
`hierarchy` and the tables of HSDDW share their generations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, reduce
from hashlib import sha256
from json import dumps
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from data_gen.store.manifest import digest, settle
from decode.drafters.factory import PairModels
from decode.experiment import LEVELS, Experiment, Level
from decode.loop.decoder import Generation, SpeculativeDecoder
from decode.loop.drafter import Drafter
from decode.loop.rounds import Counts
from evaluation.gain import Spent
from evaluation.keys import code_key, machine_key, models_key
from evaluation.turns import in_turns
from lm import RandomSampler
from lm.draws import GENERATOR, seed_of
from store.json_files import KeyedStore
from store.lock import only_writer
from store.progress import Bar

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Configuration:
    """One way to decode: a drafter at one setting."""

    name: str
    """Row of the tables; dev chooses among the configurations of one name."""
    setting: str
    build: Callable[[], Drafter]
    num_levels: int = 2
    """Models in it: 1 is the target alone."""
    version: str = ""
    """Identifies what name and setting do not, such as a head's weights."""
    models: PairModels | None = None
    """Models that the drafter is built on, whose target verifies; None: the trio."""
    stops: Mapping[str, str] = field(default_factory=dict)
    """micro, draft -> the `Policy.stop_kind` that each of its forwards pays (law 4.9)."""
    is_micro: bool = False
    """Whether the micro model drafts for the target directly."""

    @property
    def label(self) -> str:
        """Name and setting."""
        return f"{self.name} {self.setting}".strip()

    @property
    def key(self) -> tuple[str, str]:
        """Arm and setting of its stored generations."""
        return self.name, f"{self.setting} {self.version}".strip()


class Key(NamedTuple):
    """Key of one generation; `run` is a digest of the machine, the code and how models are loaded."""

    prompt: str
    arm: str
    setting: str
    run: str = ""


@dataclass(frozen=True)
class Decoded:
    """Counts and seconds of one generation."""

    counts: Counts
    seconds: float
    """Wall clock, the prompt included."""
    later: Counts
    """Without the round that reads the prompt."""
    later_draft_s: float
    """Seconds of drafting in the same rounds."""
    later_target_s: float
    """Seconds of verifying in them."""
    repeats: int = 1
    """How often it was decoded; the seconds are medians."""

    @classmethod
    def of(cls, repeated: Sequence[Generation]) -> "Decoded":
        """One generation that was decoded several times from the same seed."""
        draft_s, target_s = ([[getattr(r, n) for r in one.rounds] for one in repeated] for n in ("draft_s", "target_s"))
        return cls(
            counts=repeated[0].counts,
            seconds=median(sum(map(add, *both)) for both in zip(draft_s, target_s, strict=True)),
            later=reduce(add, (round_.counts for round_ in repeated[0].rounds[1:]), Counts()),
            later_draft_s=median(sum(seconds[1:]) for seconds in draft_s),
            later_target_s=median(sum(seconds[1:]) for seconds in target_s),
            repeats=len(repeated),
        )


@dataclass(frozen=True)
class Run:
    """One configuration over the prompts."""

    configuration: Configuration
    decoded: tuple[Decoded, ...]

    @cached_property
    def each(self) -> Counts:
        """Counts by prompt, as arrays, every forward attributed to the model that ran it."""
        return attributed((one.counts for one in self.decoded), self.configuration)

    @cached_property
    def counts(self) -> Counts:
        """Counts of all prompts together."""
        return Counts(**{name: int(np.sum(values)) for name, values in vars(self.each).items()})

    @property
    def measured(self) -> Spent:
        """Tokens and wall clock of each prompt."""
        return self.spent(np.array([one.seconds for one in self.decoded]))

    def spent(self, seconds: np.ndarray) -> Spent:
        """Tokens of each prompt, with these seconds."""
        return Spent(np.asarray(self.each.num_emitted), seconds)


def attributed(counts: Iterable[Counts], configuration: Configuration) -> Counts:
    """Counts of several generations as arrays; where the micro drafts for the target, its forwards count as micro's."""
    listed = list(counts)
    each = {each.name: np.array([getattr(one, each.name) for one in listed], dtype=int) for each in fields(Counts)}
    if configuration.is_micro:
        none = np.zeros_like(each["num_draft_forwards"])
        each |= {"num_draft_forwards": none, "num_micro_forwards": each["num_draft_forwards"]}
        each["num_micro"] = each["num_drafted"]
    return Counts(**each)


def chosen_on_dev(dev: Iterable[Run], speed: Callable[[Run], float]) -> dict[str, Configuration]:
    """Name -> its configuration that is fastest on dev; the last of equals."""
    best: dict[str, tuple[float, Configuration]] = {}
    for run in dev:
        name, value = run.configuration.name, speed(run)
        if name not in best or value >= best[name][0]:
            best[name] = value, run.configuration
    return {name: configuration for name, (_, configuration) in best.items()}


class StoredLoop:
    """The real loop for one dataset, and `directory`, which stores its generations."""

    def __init__(self, experiment: Experiment, dataset: str, trio: PairModels, *, folder: str = "hierarchy") -> None:
        """Raises:
        ValueError: the folder has generations of other settings.
        """
        settings = {name: getattr(experiment.decode, name) for name in ("max_draft_length", "max_new_tokens", "seed")}
        levels = [level for level in LEVELS if getattr(experiment.models, level) is not None]
        models: dict[str, Any] = {level: experiment.described(level) for level in levels}
        sampling = {"sampling": experiment.sampling.as_dict()}
        self.directory = experiment.directory / folder / dataset
        self.directory.mkdir(parents=True, exist_ok=True)
        manifest = {"format": 1, **models, **sampling, **settings, "generator": GENERATOR}
        settle(self.directory, manifest, setting="decode.dir")
        self._trio, self._sampling, self._decode = trio, experiment.sampling, experiment.decode
        self._run = run_key(experiment, levels)

    def play(
        self, configurations: Sequence[Configuration], prompts: Sequence[Sequence[int]], *, repeats: int = 1
    ) -> list[Run]:
        """Every configuration over the prompts; each prompt is stored as soon as it is decoded.

        A prompt that lacks one of them is decoded again by all (same seed, same tokens), so that their times are of one
        moment.

        Args:
            configurations: take turns, another one first on each prompt.
            prompts: token ids of each.
            repeats: how often each decodes a prompt; medians of the seconds are stored.
        """
        with only_writer(self.directory, setting="decode.dir"):
            keys = [[Key(prompt_key(ids), *one.key, self._run) for one in configurations] for ids in prompts]
            stored = read_decoded(self.directory)
            done = {key for key, decoded in stored.items() if decoded.repeats >= repeats}
            missing = [(ids, row) for ids, row in zip(prompts, keys, strict=True) if not done.issuperset(row)]
            decoders = {one.key: self._decoder(one) for one in configurations} if missing else {}
            for decoder in decoders.values():
                decoder.generate(prompts[0], _WARM_UP_TOKENS, generator=torch.Generator().manual_seed(0))
            desc = f"{self.directory.name}: {len(configurations)} drafters"
            for turn, (ids, row) in enumerate(Bar(missing, desc=desc, unit="prompts") if missing else ()):
                repeated: dict[Key, list[Generation]] = {key: [] for key in row}
                for _, order in in_turns(row, range(repeats), first=turn):
                    for key in order:
                        repeated[key].append(self._generation(decoders[key.arm, key.setting], ids))
                decoded = {key: Decoded.of(generations) for key, generations in repeated.items()}
                append_decoded(self.directory, decoded)
                stored |= decoded
        columns = zip(*([stored[key] for key in row] for row in keys), strict=True)
        return [Run(one, tuple(column)) for one, column in zip(configurations, columns, strict=True)]

    def _decoder(self, configuration: Configuration) -> SpeculativeDecoder:
        models, longest = configuration.models or self._trio, self._decode.max_draft_length
        return models.decoder(configuration.build(), sampling=self._sampling, max_draft_length=longest)

    def _generation(self, decoder: SpeculativeDecoder, ids: Sequence[int]) -> Generation:
        sampler = RandomSampler(seed_of(self._decode.seed, "hierarchy", prompt_key(ids)))
        return decoder.generate(ids, self._decode.max_new_tokens, generator=sampler)


def run_key(experiment: Experiment, levels: Sequence[Level]) -> str:
    """A digest of everything that decides seconds and is in neither the manifest nor a configuration's key."""
    models = models_key(experiment, *levels)
    return digest(dumps([models, machine_key(experiment), code_key()], sort_keys=True))[:16]


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """A digest of a prompt's tokens."""
    return sha256(repr(list(prompt_ids)).encode()).hexdigest()[:16]


def append_decoded(directory: Path, decoded: Mapping[Key, Decoded]) -> None:
    """Store generations, in one write."""
    _store(directory).keep((key._asdict(), asdict(one)) for key, one in decoded.items())


def read_decoded(directory: Path) -> dict[Key, Decoded]:
    """Read all stored generations.

    Raises:
        ValueError: a line that is no generation.
    """
    entries = _store(directory).entries()
    # entries of earlier versions have no run
    return {Key(**key): _parsed(value) for key, value in entries if key.keys() == set(Key._fields)}


def _store(directory: Path) -> KeyedStore:
    remedy = "delete the line, and its prompt is decoded again"
    return KeyedStore(directory / "decoded.jsonl", remedy=remedy, fields=[each.name for each in fields(Decoded)])


def _parsed(value: Mapping[str, Any]) -> Decoded:
    known = {each.name: value[each.name] for each in fields(Decoded)}  # earlier versions stored draft lengths, too
    return Decoded(**known | {name: Counts(**value[name]) for name in ("counts", "later")})
