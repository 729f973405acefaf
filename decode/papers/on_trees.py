"""SVIP (arXiv 2411.18462), Tables 3 and 4, clocked: stopping on drafts that are not plain chains, GliDe with CaPE and EAGLE-2.

    Table 3   a chain of the paper's length, the same with CaPE's siblings; each alone and with every stop
    Table 4   EAGLE-2's tree of six levels; alone and with every stop, which is heeded after every second level

Speed-ups over the target alone, by category of the prompts, all arms in turns on every prompt. The last column has what a stop gains over
the same draft without it, with its 95 % interval (prompts resampled in pairs). The tables are of the pair's own draft: a GliDe draft makes
Table 3, an EAGLE draft Table 4, and a draft that is a model of its own makes both, which are then not of the paper's systems. The paper
gives the threshold .5 for GliDe and none for EAGLE-2; its temperatures are 0 (Table 3) and 1 (Table 4), here the config's decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from decode.experiment import Experiment
from decode.intervals import Spent, gain_over
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import ModelDrafter
from decode.papers.sheet import Sheet
from decode.policies import FixedLength, Policy
from decode.trees.decoder import TreeDecoder
from decode.trees.drafter import TreeDrafter
from decode.trees.models import TreeModels, tree_models_of
from decode.trees.shapes import Cape, Dynamic
from lm.features.eagle import Eagle
from lm.features.glide import Glide

CHAIN, LEVELS = 4, 6
"""Published lengths: GliDe's chain, EAGLE-2's tree."""
_ALONE = "target alone"
_WARM_UP_TOKENS = 4


class Arm(NamedTuple):
    """One row."""

    name: str
    base: str
    """The row that it is compared with: the same draft without a stop."""
    decoder: SpeculativeDecoder


def tree_tables(experiment: Experiment, policies: Sequence[str]) -> list[Sheet]:
    """Those of Tables 3 and 4 that this draft makes.

    Raises:
        ValueError: no test prompts; a draft or a target that cannot hold a tree.
    """
    stops = {spec: experiment.policy(spec) for spec in policies}
    encoded = {dataset: experiment.encoded(dataset, "test") for dataset in experiment.datasets}
    prompts = [(prompt.category or dataset, ids) for dataset, members in encoded.items() for prompt, ids in members]
    if not prompts:
        raise ValueError("there are no test prompts to decode; raise decode.num_test")
    models, drafting = tree_models_of(experiment.pair), experiment.pair.drafting
    making = Making(experiment, models)
    tables = {}
    if not isinstance(drafting, Eagle):
        tables["3: chains, and CaPE"] = [*making.chains(stops), *making.trees("CaPE", Cape(), stops, num_levels=CHAIN, read_every=1)]
    if not isinstance(drafting, Glide):
        tables["4: EAGLE-2's tree"] = list(making.trees("EAGLE-2", Dynamic(), stops, num_levels=LEVELS, read_every=2))
    alone = Arm(_ALONE, _ALONE, making.decoder(ModelDrafter(models.draft, FixedLength(0))))
    figures = f"speed-up at T = {experiment.sampling.temperature:g}, clocked over {len(prompts)} test prompts"
    return [Sheet(f"SVIP Table {name}: {figures}", rows_of([alone, *arms], experiment, prompts)) for name, arms in tables.items()]


class Making:
    """Rows of one experiment."""

    def __init__(self, experiment: Experiment, models: TreeModels) -> None:
        self._models, self._longest = models, experiment.decode.max_draft_length
        self._how: dict[str, Any] = {"sampling": experiment.sampling, "eos_ids": experiment.pair.eos_ids}

    def decoder(self, drafter: ModelDrafter | TreeDrafter) -> SpeculativeDecoder:
        """The loop for this drafter."""
        kind = TreeDecoder if isinstance(drafter, TreeDrafter) else SpeculativeDecoder
        return kind(self._models.target, drafter, max_draft_length=self._longest, **self._how)

    def chains(self, stops: Mapping[str, Policy]) -> Iterator[Arm]:
        """Without siblings."""
        for name, policy in {"chain": FixedLength(CHAIN), **_after("chain", stops)}.items():
            yield Arm(name, "chain", self.decoder(ModelDrafter(self._models.draft, policy)))

    def trees(self, base: str, shape: Cape | Dynamic, stops: Mapping[str, Policy], *, num_levels: int, read_every: int) -> Iterator[Arm]:
        """Of one shape."""
        for name, policy in {base: FixedLength(num_levels), **_after(base, stops)}.items():
            yield Arm(name, base, self.decoder(TreeDrafter(self._models.draft, policy, shape, read_every=read_every)))


def _after(base: str, stops: Mapping[str, Policy]) -> dict[str, Policy]:
    return {f"{base} + {spec}": policy for spec, policy in stops.items()}


def rows_of(arms: Sequence[Arm], experiment: Experiment, prompts: Sequence[tuple[str, list[int]]]) -> list[dict[str, str]]:
    """Play every arm, and one row for each; the target alone comes first, and has none."""
    spent = play(arms, experiment, [ids for _, ids in prompts])
    categories = np.array([category for category, _ in prompts])
    alone, rows = spent[_ALONE], []
    for arm in arms[1:]:
        own, base = spent[arm.name], spent[arm.base]
        parts = {name: categories == name for name in sorted(set(categories.tolist()))} | {"Avg.": np.full(len(prompts), True)}
        cells = {name: f"{_part(own, part).tokens_per_s / _part(alone, part).tokens_per_s:.2f}" for name, part in parts.items()}
        gain = gain_over(base, own)
        interval = "" if arm.name == arm.base else f"{gain.value:+.1%} ({gain.low:+.1%}, {gain.high:+.1%})"
        rows.append({"Methods": arm.name, **cells, "gain of the stop": interval})
    return rows


def play(arms: Sequence[Arm], experiment: Experiment, prompts: Sequence[list[int]]) -> dict[str, Spent]:
    """Tokens and seconds of every prompt, of every arm."""
    seconds, tokens = np.zeros((len(arms), len(prompts))), np.zeros((len(arms), len(prompts)), dtype=np.int64)
    for arm in arms:
        arm.decoder.generate(prompts[0], _WARM_UP_TOKENS, generator=torch.Generator().manual_seed(0))
    for row, ids in enumerate(tqdm(prompts, desc=f"clock: {len(arms)} arms", unit="prompt")):
        for turn in range(len(arms)):
            place = (turn + row) % len(arms)
            generator = torch.Generator().manual_seed(experiment.decode.seed + row)
            started_s = perf_counter()
            generation = arms[place].decoder.generate(ids, experiment.decode.max_new_tokens, generator=generator)
            seconds[place, row], tokens[place, row] = perf_counter() - started_s, len(generation.token_ids)
    return {arm.name: Spent(tokens[place], seconds[place]) for place, arm in enumerate(arms)}


def _part(spent: Spent, chosen: np.ndarray) -> Spent:
    return Spent(spent.tokens[chosen], spent.seconds[chosen])
