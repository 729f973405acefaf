"""Every policy family and every schedule of transformers in turns, one cell per ratio of times and sampling; finished
cells are kept.

DIR/bench.jsonl holds the seconds of every arm on every prompt of each cell, under what the cell was asked for; a cell
that is there is not measured again.

Policies run as they were named, or each family at what is fastest on dev at the costs of the cell. A trace is of one
sampling, so each sampling has a trace of dev prompts of its own, in DIR/bench/SAMPLING (that of the config's sampling
is the one of every command), recorded with the models as they are: extra layers change no token. Heads were trained
under one sampling, too; elsewhere they run as foreign heads, which is said beside them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from configs.schema import Config, SamplingConfig
from decode.experiment import Experiment
from decode.policies import FixedLength
from decode.policies.registry import read_spec, registered
from evaluation.bench.arms import Racer, Timed, generations_of, turns
from evaluation.bench.schedules import CONSTANT, DEFAULT, HEURISTIC, HEURISTICALLY, about_default, assisted, constant
from evaluation.bench.speeds import Speed, Stopwatch, speed_from
from evaluation.contest.arms import ALONE, Replays, picks_of, replay_dataset
from evaluation.contest.grids import BOUNDS, grids_of
from evaluation.costs.machine import costs_for
from evaluation.costs.measure import Loop
from evaluation.costs.model import CostModel
from evaluation.intervals import Splits
from evaluation.traces.recording import trace_folder
from lm import Pair, Sampling
from store.keyed import KeyedStore
from store.progress import Bar

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(),
    "nucleus": Sampling(temperature=0.7, top_p=0.9),
}
_CONSTANTS = (2, 5, 10)
"""Lengths of transformers' constant schedule where no best fixed length is known."""


@dataclass(frozen=True, kw_only=True)
class RaceTerms:
    """Terms that all cells of a race share."""

    num_prompts: int
    num_tokens: int
    t_draft_ms: float
    policies: tuple[str, ...]
    families: tuple[str, ...]
    constants: tuple[int, ...]


class Race:
    """The race's cells of one config, kept between runs."""

    def __init__(self, config: Config, terms: RaceTerms) -> None:
        """Raises:
        ValueError: a policy that there is not, a head that does not fit.
        FileNotFoundError: a head that is not there.
        """
        self._config, self._terms = config, terms
        self.experiment = Experiment(config)
        self._samplings = SAMPLINGS | {"own": self.experiment.sampling}
        # made here, so that heads and policies of one's own are checked before anything is measured
        named = [self.experiment.policy(spec) for spec in terms.policies]
        self._checked = named or self.experiment.heads
        for name in config.decode.policies:
            registered(name)
        if named and not any(isinstance(policy, FixedLength) for policy in named):
            raise ValueError(
                f"--policies names {', '.join(terms.policies)}, and gains are measured from a fixed length; name one, "
                "too, as fixed_length:k=5"
            )
        self._choices: dict[str, Choices] = {}
        self.path = self.experiment.directory / "bench.jsonl"
        self._store = KeyedStore(self.path, remedy="delete the line, and its cell is measured again")

    @cached_property
    def _cost(self) -> CostModel:
        """Times of the pair as it is."""
        return costs_for(self.experiment)

    @cached_property
    def _prompts(self) -> list[list[int]]:
        num = max(self._terms.num_prompts, 1)
        return self.experiment.prompt_ids(next(iter(self.experiment.datasets)), "test", num=num)

    def cells(self, ratios: Sequence[float], samplings: Sequence[str]) -> Iterator[dict[str, Any]]:
        """One record per ratio (none: the pair as it is) and sampling, each as soon as it is there."""
        if ratios and self.experiment.has_feature_draft:
            raise ValueError(
                "--ratios slows both models by extra layers, and a feature draft takes none; set "
                "pair.target.extra_layers"
            )
        for ratio in ratios or (None,):
            for name in samplings:
                asked = {"ratio": ratio, "sampling": name, **asdict(self._terms)}
                if ratio is None:
                    asked.pop("t_draft_ms")
                yield self._once("cell", asked, partial(self._measured, ratio, name))

    def _once(self, kind: str, asked: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The value kept under this key, or a value that is made now and kept."""
        models = {level: self.experiment.described(level) for level in ("target", "draft")}
        layers = {level: getattr(self.experiment.models, level).extra_layers for level in models}
        decode = self.experiment.decode
        key: dict[str, Any] = {"kind": kind, **asked, "models": models, "extra_layers": layers, "heads": decode.heads}
        key |= {"compile": decode.compile, "threads": self.experiment.models.num_threads}
        key |= {"own": self.experiment.sampling.as_dict(), "datasets": list(self.experiment.datasets)}
        # the families that compete; left out of the key where all do, as in cells that were kept before
        key |= {name: value for name in ("policies", "grid") if (value := getattr(decode, name)) and kind == "cell"}
        kept = self._store.get(key)
        if kept is None:
            kept = make()
            self._store.keep([(key, kept)])
        return kept

    def _measured(self, ratio: float | None, name: str) -> dict[str, Any]:
        sampling, speed = self._samplings[name], Speed(0, 0, self._cost) if ratio is None else self._slowed(ratio)
        chosen = self._chosen(name, speed.cost)
        pair = self.experiment.pair if ratio is None else Experiment(speed.of(self._config)).pair
        arms = self._arms(pair, sampling, chosen)
        label = "as it is" if ratio is None else f"ratio {ratio:g}"
        with Bar(
            desc=f"bench: {label}, {name}", total=(len(self._prompts) + (ratio is None)) * len(arms), unit="texts"
        ) as bar:
            timed = {place: _ticking(generation, bar) for place, (_, generation) in arms.items()}
            rows = list(turns(timed, self._prompts, has_warm_up=ratio is None))
        return {
            "ratio_wished": ratio,
            "sampling": name,
            "speed": speed.as_dict(),
            "num_tokens": self._terms.num_tokens,
            "default_schedule": about_default(),
            "arms": [
                {
                    "family": racer.family,
                    "setting": racer.setting,
                    "is_foreign": racer.is_foreign(sampling),
                    "on_dev": racer.on_dev,
                    "seconds": [row[place] for row in rows],
                }
                for place, (racer, _) in arms.items()
            ],
        }

    def _slowed(self, ratio: float) -> Speed:
        wish = {"ratio": ratio, "t_draft_s": 1e-3 * self._terms.t_draft_ms}

        def make() -> dict[str, Any]:
            print(f"bench: looking for the layers of ratio {ratio:g}", flush=True)
            vocab_size = self.experiment.pair.vocab_size
            watch = Stopwatch(models=self.experiment.models, vocab_size=vocab_size, prompt=self._prompts[0])
            return watch.slowed(self._cost, **wish).as_dict()

        return speed_from(self._once("speed", wish, make), self._cost)

    def _chosen(self, name: str, cost: CostModel) -> Mapping[str, Racer]:
        if name not in self._choices:
            self._choices[name] = Choices(self._config, name, self._samplings[name], cost=self._cost)
        choices = self._choices[name]
        return choices.named(self._terms.policies) if self._terms.policies else choices.at(cost, self._terms.families)

    def _arms(self, pair: Pair, sampling: Sampling, chosen: Mapping[str, Racer]) -> dict[str, tuple[Racer, Timed]]:
        """Every competitor, and its generations, by a name of its own."""
        num_tokens = self._terms.num_tokens
        terms: dict[str, Any] = {"prompts": self._prompts, "sampling": sampling, "max_new_tokens": num_tokens}
        loop = Loop.of(self.experiment, pair=pair, **terms)
        arms = {
            name: (racer, generations_of(loop.decoder(racer.policy), num_tokens))
            for name, racer in {ALONE: Racer(ALONE, "-", FixedLength(0)), **chosen}.items()
            if racer.policy
        }
        if self.experiment.has_feature_draft:  # transformers drafts with models of their own
            return arms
        schedules = {DEFAULT: ("-", {}), HEURISTIC: ("-", HEURISTICALLY)}
        schedules |= {
            f"{CONSTANT} {k}": (f"k={k}", constant(k)) for k in self._terms.constants or _constants_beside(chosen)
        }
        for name, (setting, changes) in schedules.items():
            family = CONSTANT if name.startswith(CONSTANT) else name
            arms[name] = Racer(family, setting), assisted(pair, num_tokens, sampling, changes)
        return arms


def _constants_beside(chosen: Mapping[str, Racer]) -> tuple[int, ...]:
    """The best fixed length on dev and half of it: transformers' draft step is dearer, so it does better with fewer."""
    best = chosen["fixed_length"].policy if "fixed_length" in chosen else None
    return tuple(sorted({max(1, best.k // 2), max(1, best.k)})) if isinstance(best, FixedLength) else _CONSTANTS


def _ticking(timed: Timed, bar: Any) -> Timed:
    def seconds_of(prompt: list[int], seed: int) -> float:
        seconds = timed(prompt, seed)
        bar.update()
        return seconds

    return seconds_of


class Choices:
    """The setting that each family runs at under one sampling."""

    def __init__(self, config: Config, name: str, sampling: Sampling, *, cost: CostModel) -> None:
        """Args:
        config: the experiment.
        name: the name of the sampling.
        sampling: the sampling of the cells.
        cost: the costs of the pair as it is, which decide which head of each timing `auto` reads.
        """
        of_pair = Sampling(**vars(config.pair.sampling))
        self.experiment = Experiment(config if sampling == of_pair else _under(config, name, sampling))
        self._name, self._cost = name, cost

    @cached_property
    def replays(self) -> Replays:
        """Every grid on dev; the trace is recorded first, if need be."""
        experiment, folder = self.experiment, trace_folder(self.experiment)
        folder.complete()
        dev = folder.load(next(iter(experiment.datasets))).dev
        grids = grids_of(
            experiment.decode.grid,
            experiment.heads,
            max_draft_length=experiment.decode.max_draft_length,
            policies=experiment.decode.policies,
        )
        traces = Splits(dev, dev.select([0]))  # nothing is reported on test here
        return replay_dataset(
            traces, grids, heads=experiment.heads, cost=self._cost, perfect_head=False, name=f"dev, {self._name}"
        )

    def at(self, cost: CostModel, families: Sequence[str] = ()) -> dict[str, Racer]:
        """Family -> its setting that is fastest on dev at these costs.

        Args:
            cost: the costs of a cell.
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
            family: Racer(family, pick.label, pick.policy, pick.tokens_per_s_on_dev(cost))
            for family, pick in known.items()
            if not families or family in (*families, "fixed_length")
        }

    def named(self, specs: Sequence[str]) -> Mapping[str, Racer]:
        """The policies that these specs write down (`decode.policies.registry`)."""
        return {spec: Racer(_family_of(spec), spec, self.experiment.policy(spec)) for spec in specs}


def _family_of(spec: str) -> str:
    """The name of a spec's policy, as it is written: entropy, head, auto, or module:Class."""
    name, _ = read_spec(spec)
    return name if ":" in name else spec.partition(":")[0]


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
