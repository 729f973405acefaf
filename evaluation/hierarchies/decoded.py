"""The source that decodes: competitors in the real loop on the same prompts, in turns, stored so that a run resumes.

    DIR/manifest.json    what decides the tokens
    DIR/decoded.jsonl    prompt (a hash of its token ids), arm, setting and run (a hash of the machine and the code)
                         -> counts, seconds, repeats (`store.json_files`)

Hierarchies cannot be replayed from a trace: which tokens an inner verification rejects depends on its random draws.
`hierarchy` and the tables of HSDDW share their generations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from hashlib import sha256
from json import dumps
from operator import add
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from data_gen.store.manifest import digest, settle
from decode.experiment import LEVELS, Experiment, Level
from decode.loop.decoder import Generation, SpeculativeDecoder
from decode.loop.rounds import Counts
from decode.policies.base import Policy
from evaluation.competitor import Competitor, label_of
from evaluation.contest import Result
from evaluation.gain import Throughput
from evaluation.keys import code_key, machine_key, models_key, policy_key
from evaluation.played import Array, Played, joined
from evaluation.turns import in_turns
from lm import RandomSampler
from lm.draws import GENERATOR, seed_of
from store.json_files import KeyedStore
from store.lock import only_writer
from store.progress import Bar

MICRO_ALONE = "sd with the micro"
"""The family whose drafts are the micro's: its forwards count as micro's."""
_WARM_UP_TOKENS = 4
_STORED = ("counts", "seconds", "later", "later_draft_s", "later_target_s", "repeats")
"""Values of a stored generation; "later" leaves out the round that reads the prompt."""


@dataclass(frozen=True)
class Decoded:
    """What every setting of a competitor did in the real loop, and how long it took."""

    competitor: Competitor
    played: Played
    seconds: Float[Array, "setting prompt"]
    """Wall clock, the prompt included; medians over repeats."""
    later: Played
    """Without the rounds that read the prompts."""
    later_draft_s: Float[Array, "setting prompt"]
    """Seconds of drafting in the later rounds."""
    later_target_s: Float[Array, "setting prompt"]
    """Seconds of verifying in them."""

    @classmethod
    def of(cls, competitor: Competitor, stored: Sequence[Sequence[Mapping[str, Any]]]) -> "Decoded":
        """From stored generations, [setting][prompt]."""
        times = (np.array([[run[name] for run in row] for row in stored]) for name in (_STORED[1], *_STORED[3:5]))
        seconds, draft_s, target_s = times
        played, later = (
            played_of(competitor, [[run[name] for run in row] for row in stored]) for name in _STORED[::2][:2]
        )
        return cls(competitor, played, seconds, later, draft_s, target_s)

    @classmethod
    def joined(cls, parts: Sequence["Decoded"]) -> "Decoded":
        """The same competitor on the prompts of several datasets, one after the other."""
        played, later = (joined([getattr(part, name) for part in parts]) for name in ("played", "later"))
        seconds, draft_s, target_s = (
            np.concatenate([getattr(part, name) for part in parts], axis=1)
            for name in ("seconds", "later_draft_s", "later_target_s")
        )
        return cls(parts[0].competitor, played, seconds, later, draft_s, target_s)

    def result(self, number: int = 0) -> Result:
        """One setting, by the clock."""
        throughput = Throughput(self.played.counts.num_emitted[number], self.seconds[number])
        return Result(
            competitor=self.competitor, number=number, throughput=throughput, played=self.played.select([number])
        )


def played_of(competitor: Competitor, counts: Sequence[Sequence[Mapping[str, int]]]) -> Played:
    """Counts by setting and prompt, every forward attributed to the model that ran it.

    Only the totals of rounds and drafted tokens are stored, so `lengths` has the histogram of the same totals with
    drafts of 0 and 1 token: what a line t_target(k) costs is the same.
    """
    columns = {
        count.name: np.array([[row[count.name] for row in of] for of in counts], dtype=int) for count in fields(Counts)
    }
    lengths = np.stack([columns["num_target"] - columns["num_drafted"], columns["num_drafted"]], -1)
    if competitor.family == MICRO_ALONE:
        none = np.zeros_like(columns["num_draft_forwards"])
        columns |= {"num_draft_forwards": none, "num_micro_forwards": columns["num_draft_forwards"]}
        columns["num_micro"] = columns["num_drafted"]
    micro_kind = competitor.micro_policy.stop_kind if competitor.micro_policy else ""
    return Played(Counts(**columns), lengths, np.arange(lengths.shape[1]), competitor.policy.stop_kind, micro_kind)


def stored_of(repeated: Sequence[Generation]) -> dict[str, Any]:
    """The stored values of one generation that was decoded several times from the same seed."""
    draft_s, target_s = ([[getattr(r, n) for r in run.rounds] for run in repeated] for n in ("draft_s", "target_s"))
    later = reduce(add, (round_.counts for round_ in repeated[0].rounds[1:]), Counts())
    values = (
        asdict(repeated[0].counts),
        median(sum(map(add, *both)) for both in zip(draft_s, target_s, strict=True)),
        asdict(later),
        *(median(sum(seconds[1:]) for seconds in part) for part in (draft_s, target_s)),
        len(repeated),
    )
    return dict(zip(_STORED, values, strict=True))


class StoredLoop:
    """The real loop for one dataset, and `directory`, which stores its generations."""

    def __init__(self, experiment: Experiment, dataset: str, *, folder: str = "hierarchy") -> None:
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
        remedy = "delete the line, and its prompt is decoded again"
        self._store = KeyedStore(self.directory / "decoded.jsonl", remedy=remedy, fields=_STORED)
        self._decode, self._run = experiment.decode, run_key(experiment, levels)

    def play(
        self, competitors: Sequence[Competitor], prompts: Sequence[Sequence[int]], *, repeats: int = 1
    ) -> list[Decoded]:
        """Every setting of every competitor on the prompts; each prompt is stored as soon as it is decoded.

        A prompt that lacks one of them is decoded again by all (same seed, same tokens), so that their times are of one
        moment.

        Args:
            competitors: their settings take turns, another one first on each prompt.
            prompts: token ids of each.
            repeats: how often each decodes a prompt; medians of the seconds are stored.
        """
        members = {member: entry.at(number) for entry in competitors for number, member in enumerate(members_of(entry))}
        hashes = [sha256(repr(list(ids)).encode()).hexdigest()[:16] for ids in prompts]
        with only_writer(self.directory, setting="decode.dir"):
            stored = {tuple(key.values()): value for key, value in self._store.entries() if len(key) == len(_KEY)}
            done = {key for key, value in stored.items() if value["repeats"] >= repeats}
            rows = [[(prompt, *member, self._run) for member in members] for prompt in hashes]
            missing = [(ids, row) for ids, row in zip(prompts, rows, strict=True) if not done.issuperset(row)]
            decoders = {member: _built(entry) for member, entry in members.items()} if missing else {}
            for decoder in decoders.values():
                decoder.generate(prompts[0], _WARM_UP_TOKENS, generator=torch.Generator().manual_seed(0))
            desc = f"{self.directory.name}: {len(members)} drafters"
            for turn, (ids, row) in enumerate(Bar(missing, desc=desc, unit="prompts") if missing else ()):
                repeated: dict[tuple[str, ...], list[Generation]] = {key: [] for key in row}
                for _, order in in_turns(row, range(repeats), first=turn):
                    for key in order:
                        sampler = RandomSampler(seed_of(self._decode.seed, "hierarchy", key[0]))
                        decoder, longest = decoders[key[1:3]], self._decode.max_new_tokens  # type: ignore[index]
                        repeated[key].append(decoder.generate(ids, longest, generator=sampler))
                new = {key: stored_of(generations) for key, generations in repeated.items()}
                self._store.keep((dict(zip(_KEY, key, strict=True)), value) for key, value in new.items())
                stored |= new
        return [
            Decoded.of(
                entry, [[stored[prompt, *member, self._run] for prompt in hashes] for member in members_of(entry)]
            )
            for entry in competitors
        ]


_KEY = ("prompt", "arm", "setting", "run")
"""Key of a stored generation; `run` is a digest of the machine, the code and how models are loaded."""


def members_of(competitor: Competitor) -> list[tuple[str, str]]:
    """Arm and setting of the stored generations of every setting."""
    settings = (label_of(competitor.name, setting) for setting in competitor.settings)
    return [(competitor.family, f"{setting} {competitor.version}".strip()) for setting in settings]


def _built(competitor: Competitor) -> SpeculativeDecoder:
    assert competitor.build is not None
    return competitor.build(**competitor.settings[0])


def version_of(*policies: Policy) -> str:
    """A digest of policies: their heads may be retrained, and their classes edited."""
    return digest(dumps(list(map(policy_key, policies)), sort_keys=True))[:8]


def run_key(experiment: Experiment, levels: Sequence[Level]) -> str:
    """A digest of everything that decides seconds and is in neither the manifest nor a competitor's key."""
    models = models_key(experiment, *levels)
    return digest(dumps([models, machine_key(experiment), code_key()], sort_keys=True))[:16]
