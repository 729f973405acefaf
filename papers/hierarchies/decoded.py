"""The source that decodes: competitors in the real loop on the same prompts, in turns, stored so that a run resumes.

    DIR/manifest.json    what decides the tokens
    DIR/decoded.jsonl    prompt (a hash of its token ids), arm, setting and run (a hash of the machine and the code)
                         -> counts, seconds, repeats (`store.json_files`)

Hierarchies cannot be replayed from a trace: which tokens an inner verification rejects depends on its random draws.
`hierarchy` and the tables of HSDDW share their generations.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import sha256
from itertools import chain
from json import dumps
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from data_gen.prompts.sets import Split
from data_gen.store.manifest import digest, settle
from decode.experiment import LEVELS, Experiment, Level
from decode.loop.decoder import Generation, SpeculativeDecoder
from decode.loop.rounds import Counts
from decode.policies.base import Policy
from evaluation.competitor import Competitor, label_of
from evaluation.contest import Result
from evaluation.gain import Throughput
from evaluation.keys import machine_key, models_key, policy_key
from evaluation.played import Array, Played
from evaluation.turns import in_turns
from lm import RandomSampler
from lm.draws import GENERATOR, seed_of
from store.json_files import KeyedStore
from store.lock import only_writer
from store.progress import Bar

MICRO_ALONE = "sd with the micro"
"""The family whose drafts are the micro's: its forwards count as micro's."""
_WARM_UP_TOKENS = 4
_KEY = ("prompt", "arm", "setting", "run")
"""Key of a stored generation; `run` is a digest of the machine, the code and how models are loaded."""
_STORED = ("counts", "seconds", "later", "later_draft_s", "later_target_s", "repeats")
"""Values of a stored generation; "later" leaves out the round that reads the prompt."""


@dataclass(frozen=True)
class Decoded:
    """What every setting of a competitor did in the real loop, and how long it took."""

    competitor: Competitor
    stored: Sequence[Sequence[Mapping[str, Any]]]
    """Values of `stored_of`, [setting][prompt]."""

    def column(self, name: str) -> Array:
        """One of the values, as an array [setting, prompt]."""
        return np.array([[generation[name] for generation in row] for row in self.stored])

    @cached_property
    def played(self) -> Played:
        """Counts of all rounds."""
        return self._played("counts")

    @cached_property
    def num_levels(self) -> int:
        """Models that ran: 1 is the target alone."""
        counts = self.played.counts
        return 1 + bool(counts.num_draft_forwards.any()) + bool(counts.num_micro_forwards.any())

    @cached_property
    def later(self) -> Played:
        """Counts without the rounds that read the prompts."""
        return self._played("later")

    def _played(self, name: str) -> Played:
        """Counts by setting and prompt, every forward attributed to the model that ran it.

        Only the totals of rounds and drafted tokens are stored, so `lengths` has the histogram of the same totals with
        drafts of 0 and 1 token: what a line t_target(k) costs is the same.
        """
        entry, stored = self.competitor, self.column(name)
        columns = {of.name: np.vectorize(itemgetter(of.name), otypes=[int])(stored) for of in fields(Counts)}
        lengths = np.stack([columns["num_target"] - columns["num_drafted"], columns["num_drafted"]], -1)
        if entry.family == MICRO_ALONE:
            forwards = columns["num_draft_forwards"]
            columns |= {"num_draft_forwards": np.zeros_like(forwards), "num_micro_forwards": forwards}
            columns["num_micro"] = columns["num_drafted"]
        micro_kind = entry.micro_policy.stop_kind if entry.micro_policy else ""
        return Played(Counts(**columns), lengths, np.arange(lengths.shape[1]), entry.policy.stop_kind, micro_kind)

    def result(self, number: int = 0) -> Result:
        """One setting, by the clock."""
        played = self.played.select([number])
        throughput = Throughput(played.counts.num_emitted[0], self.column("seconds")[number])
        return Result(competitor=self.competitor, number=number, throughput=throughput, played=played)


def stored_of(repeated: Sequence[Generation]) -> dict[str, Any]:
    """The stored values of one generation that was decoded several times from the same seed; medians of seconds."""
    seconds = np.array([[(round_.draft_s, round_.target_s) for round_ in run.rounds] for run in repeated])
    later_draft_s, later_target_s = np.median(seconds[:, 1:].sum(1), axis=0).tolist()
    return {
        "counts": asdict(repeated[0].counts),
        "seconds": float(np.median(seconds.sum((1, 2)))),
        "later": asdict(Generation.of(repeated[0].rounds[1:]).counts),
        "later_draft_s": later_draft_s,
        "later_target_s": later_target_s,
        "repeats": len(repeated),
    }


class StoredLoop:
    """The real loop for one dataset, and `directory`, which stores its generations; ValueError if it has those of other
    settings.
    """

    def __init__(self, experiment: Experiment, dataset: str, *, folder: str = "hierarchy") -> None:
        settings = {name: getattr(experiment.decode, name) for name in ("max_draft_length", "max_new_tokens", "seed")}
        levels = [level for level in LEVELS if getattr(experiment.models, level) is not None]
        models: dict[str, Any] = {level: experiment.described(level) for level in levels}
        self.directory = experiment.directory / folder / dataset
        self.directory.mkdir(parents=True, exist_ok=True)
        facts = {"format": 1, **models, "sampling": experiment.sampling.as_dict(), **settings, "generator": GENERATOR}
        settle(self.directory, facts, setting="decode.dir")
        remedy = "delete the line, and its prompt is decoded again"
        self._store = KeyedStore(self.directory / "decoded.jsonl", remedy=remedy, fields=_STORED)
        self._experiment, self._run = experiment, run_key(experiment, levels)

    def play(self, competitors: Sequence[Competitor], split: Split, *, repeats: int = 1) -> list[Decoded]:
        """Every setting of every competitor on the prompts of a split; none if there are no dev prompts.

        Settings take turns, another one first on each prompt. A prompt that lacks one of them is decoded again by all
        (same seed, same tokens), so that their times are of one moment, and stored as soon as it is decoded; medians of
        the seconds, if each is decoded in several `repeats`. ValueError for no test prompts.
        """
        decode, prompts = self._experiment.decode, self._experiment.prompt_ids(self.directory.name, split)
        if not prompts and split == "test":
            raise ValueError("there are no test prompts to decode; raise decode.num_test")
        names = [sha256(repr(ids).encode()).hexdigest()[:16] for ids in prompts]
        members = {member: entry.at(number) for entry in competitors for number, member in enumerate(members_of(entry))}
        with only_writer(self.directory, setting="decode.dir"):
            entries = ((tuple(key.values()), value) for key, value in self._store.entries())
            stored = {key[:-1]: value for key, value in entries if key[-1] == self._run}
            done = {key for key, value in stored.items() if value["repeats"] >= repeats}
            missing = [
                (name, ids)
                for name, ids in zip(names, prompts, strict=True)
                if not done.issuperset((name, *member) for member in members)
            ]
            decoders = {member: _warm(entry, prompts[0]) for member, entry in members.items()} if missing else {}
            desc = f"{self.directory.name}: {len(members)} drafters"
            for turn, (name, ids) in enumerate(Bar(missing, desc=desc, unit="prompts") if missing else ()):
                repeated: dict[tuple[str, str], list[Generation]] = {member: [] for member in members}
                for _, order in in_turns(members, range(repeats), first=turn):
                    for member in order:
                        sampler = RandomSampler(seed_of(decode.seed, "hierarchy", name))
                        generation = decoders[member].generate(ids, decode.max_new_tokens, generator=sampler)
                        repeated[member].append(generation)
                new = {(name, *member): stored_of(generations) for member, generations in repeated.items()}
                self._store.keep((dict(zip(_KEY, (*key, self._run), strict=True)), new[key]) for key in new)
                stored |= new
        return [
            Decoded(entry, [[stored[name, *member] for name in names] for member in members_of(entry)])
            for entry in (competitors if prompts else ())
        ]


def play_all(
    loops: Iterable[StoredLoop], competitors: Sequence[Competitor], split: Split, *, repeats: int = 1
) -> list[Decoded]:
    """`StoredLoop.play` on several datasets, their prompts one after the other."""
    parts = [played for loop in loops if (played := loop.play(competitors, split, repeats=repeats))]
    return [
        Decoded(same[0].competitor, [list(chain(*rows)) for rows in zip(*(part.stored for part in same), strict=True)])
        for same in zip(*parts, strict=True)
    ]


def members_of(competitor: Competitor) -> list[tuple[str, str]]:
    """Arm and setting of the stored generations of every setting."""
    settings = (label_of(competitor.name, setting) for setting in competitor.settings)
    return [(competitor.family, f"{setting} {competitor.version}".strip()) for setting in settings]


def _warm(competitor: Competitor, prompt: list[int]) -> SpeculativeDecoder:
    assert competitor.build is not None
    decoder = competitor.build(**competitor.settings[0])
    decoder.generate(prompt, _WARM_UP_TOKENS, generator=torch.Generator().manual_seed(0))
    return decoder


def version_of(*policies: Policy) -> str:
    """A digest of policies: their heads may be retrained, and their classes edited."""
    return digest(dumps(list(map(policy_key, policies)), sort_keys=True))[:8]


def run_key(experiment: Experiment, levels: Sequence[Level]) -> str:
    """A digest of everything that decides seconds and is in neither the manifest nor a competitor's key."""
    models = models_key(experiment, *levels)
    return digest(dumps([models, machine_key(experiment)], sort_keys=True))[:16]
