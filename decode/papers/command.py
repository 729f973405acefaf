"""python -m decode tables --paper NAME: a paper's tables as printed, in rows and columns, for the pair of a config.

    specdec++   (arXiv 2405.19715) Tables 1 and 3, replayed; Table 2, clocked. Figure 4 is the Pareto plot that `evaluate` writes.
    svip        (arXiv 2411.18462) Table 1, or Table 5 where the temperature is above 0; Table 2, or Table 6 where it is 0: replayed.
    svip-trees  its Tables 3 and 4, clocked: chains with CaPE's siblings, and EAGLE-2's trees, of the pair's draft, with and without stops.
    hsddw       Tables 1 to 4 with a window of 10, clocked: hierarchies are decoded. `decode hierarchy` compares more of them.

Replayed throughputs are predictions: counts times measured or given times (law 4.9). The paper SpecDec++ does the same; the others clock.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Literal

from configs.schema import Config
from decode.console import wide_console
from decode.experiment import Experiment
from decode.papers.hsddw import hsddw_tables
from decode.papers.on_trees import tree_tables
from decode.papers.sheet import Sheet
from decode.papers.specdec import specdec_tables
from decode.papers.svip import svip_tables

_TABLES: dict[str, Callable[[Experiment], list[Sheet]]] = {
    "specdec++": specdec_tables,
    "svip": svip_tables,
    "hsddw": hsddw_tables,
}


def tables(
    config: Config,
    *,
    paper: Literal["specdec++", "svip", "svip-trees", "hsddw"],
    stops: tuple[str, ...] = ("entropy:max_sqrt_entropy=0.5",),
) -> None:
    """A paper's tables for this pair.

    Args:
        config: the experiment.
        paper: specdec++, svip, svip-trees, or hsddw (which decodes with three models).
        stops: of svip-trees: policies, each with its threshold: entropy:max_sqrt_entropy=0.5, head:PATH,max_rejection_prob=0.7.
    """
    makers = _TABLES | {"svip-trees": partial(tree_tables, policies=stops)}
    made = makers[paper](Experiment(config, needs_micro=paper == "hsddw", takes_feature_drafts=paper == "svip-trees"))
    for each in made:
        wide_console().print(each.table())
    print(json.dumps({"paper": paper, "tables": [each._asdict() for each in made]}))
