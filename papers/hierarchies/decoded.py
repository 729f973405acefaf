"""The source that decodes: competitors in the real loop on the same prompts, on a clock, stored so that a run resumes.

    DIR/manifest.json    what decides the tokens
    DIR/clocked.jsonl    run (a hash of the machine and the code), prompt (a hash of its token ids), arm (family and
                         setting) -> counts, seconds, repeats (`evaluation.sources.clock`)

Hierarchies cannot be replayed from a trace: which tokens an inner verification rejects depends on its random draws.
`hierarchy` and the tables of HSDDW share their generations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from json import dumps

import numpy as np

from data_gen.prompts.sets import Split
from data_gen.store.manifest import digest, settle
from decode.experiment import LEVELS, Experiment, Level
from decode.policies.base import Policy
from evaluation.competitor import Competitor, label_of
from evaluation.contest import Result
from evaluation.keys import machine_key, models_key, policy_key
from evaluation.played import Played, joined
from evaluation.sources.clock import Arm, Clocked, StoredRuns, clock_in_turns, generations_of, played_of
from lm.draws import GENERATOR, seed_of
from store.json_files import KeyedStore
from store.lock import only_writer

MICRO_ALONE = "sd with the micro"
"""The family whose drafts are the micro's: its forwards count as micro's."""
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Decoded:
    """What every setting of a competitor did in the real loop, on a clock."""

    competitor: Competitor
    played: Played

    @cached_property
    def num_levels(self) -> int:
        """Models that ran: 1 is the target alone."""
        counts = self.played.counts
        return 1 + bool(counts.num_draft_forwards.any()) + bool(counts.num_micro_forwards.any())

    def result(self, number: int = 0) -> Result:
        """One setting, by the clock."""
        return Result(competitor=self.competitor, number=number, played=self.played.select([number]))


def decoded_of(competitor: Competitor, runs: Sequence[Sequence[Clocked]]) -> Decoded:
    """A competitor from its generations [setting][prompt], every forward attributed to the model that ran it."""
    played = played_of(
        runs,
        stop_kind=competitor.policy.stop_kind,
        micro_stop_kind=competitor.micro_policy.stop_kind if competitor.micro_policy else "",
    )
    return Decoded(competitor, _drafted_by_micro(played) if competitor.family == MICRO_ALONE else played)


def _drafted_by_micro(played: Played) -> Played:
    forwards = played.counts.num_draft_forwards
    counts = replace(
        played.counts,
        num_draft_forwards=np.zeros_like(forwards),
        num_micro_forwards=forwards,
        num_micro=played.counts.num_drafted,
    )
    return replace(played, counts=counts, later=played.later and _drafted_by_micro(played.later))


class StoredLoop:
    """The real loop for one dataset, and `directory`, which stores its generations; ValueError if it has those of other
    settings.
    """

    def __init__(self, experiment: Experiment, dataset: str, *, folder: str = "hierarchy") -> None:
        settings = {name: getattr(experiment.decode, name) for name in ("max_draft_length", "max_new_tokens", "seed")}
        levels = [level for level in LEVELS if getattr(experiment.models, level) is not None]
        models: dict[str, object] = {level: experiment.described(level) for level in levels}
        self.directory = experiment.directory / folder / dataset
        self.directory.mkdir(parents=True, exist_ok=True)
        facts = {"format": 1, **models, "sampling": experiment.sampling.as_dict(), **settings, "generator": GENERATOR}
        settle(self.directory, facts, setting="decode.dir")
        store = KeyedStore(
            self.directory / "clocked.jsonl",
            remedy="delete the line, and its prompt is decoded again",
            fields=[f.name for f in fields(Clocked)],
        )
        self._store = StoredRuns(store, run_key(experiment, levels))
        self._experiment = experiment

    def play(self, competitors: Sequence[Competitor], split: Split, *, repeats: int = 1) -> list[Decoded]:
        """Every setting of every competitor on the prompts of a split, as `clock_in_turns` does it; none if there are
        no dev prompts. ValueError for no test prompts.
        """
        prompts = self._experiment.prompt_ids(self.directory.name, split)
        if not prompts and split == "test":
            raise ValueError("there are no test prompts to decode; raise decode.num_test")
        if not prompts:
            return []
        limit = self._experiment.decode.max_new_tokens
        seed = self._experiment.decode.seed
        arms: dict[str, Arm] = {}
        for entry in competitors:
            arms |= {name: _arm_of(entry.at(number)) for number, name in enumerate(members_of(entry))}
        requests = {_name_of(ids): (ids, limit, seed_of(seed, "hierarchy", _name_of(ids))) for ids in prompts}
        with only_writer(self.directory, setting="decode.dir"):
            runs = clock_in_turns(
                arms,
                requests,
                desc=f"{self.directory.name}: {len(arms)} drafters",
                store=self._store,
                repeats=repeats,
                warm_up=(prompts[0], _WARM_UP_TOKENS, seed),
            )
        at = [list(requests).index(_name_of(ids)) for ids in prompts]  # a prompt may be there twice
        decoded = []
        for entry in competitors:
            members = [[runs[name][index] for index in at] for name in members_of(entry)]
            decoded.append(decoded_of(entry, members))
        return decoded


def _arm_of(competitor: Competitor) -> Arm:
    """A competitor at its only setting; its models are loaded where it first decodes."""
    assert competitor.build is not None
    decoder = cache(partial(competitor.build, **competitor.settings[0]))
    return lambda request: generations_of(decoder())(request)


def play_all(
    loops: Iterable[StoredLoop], competitors: Sequence[Competitor], split: Split, *, repeats: int = 1
) -> list[Decoded]:
    """`StoredLoop.play` on several datasets, their prompts one after the other."""
    parts = [played for loop in loops if (played := loop.play(competitors, split, repeats=repeats))]
    return [Decoded(same[0].competitor, joined([part.played for part in same])) for same in zip(*parts, strict=True)]


def members_of(competitor: Competitor) -> list[str]:
    """Names of the stored generations of every setting."""
    settings = (label_of(competitor.name, setting) for setting in competitor.settings)
    return [f"{competitor.family}: {setting} {competitor.version}".strip() for setting in settings]


def _name_of(prompt: list[int]) -> str:
    return sha256(repr(prompt).encode()).hexdigest()[:16]


def version_of(*policies: Policy) -> str:
    """A digest of policies: their heads may be retrained, and their classes edited."""
    return digest(dumps(list(map(policy_key, policies)), sort_keys=True))[:8]


def run_key(experiment: Experiment, levels: Sequence[Level]) -> str:
    """A digest of everything that decides seconds and is in neither the manifest nor a competitor's key."""
    return digest(dumps([models_key(experiment, *levels), machine_key(experiment)], sort_keys=True))[:16]
