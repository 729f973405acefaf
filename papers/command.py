"""acceptance-heads tables --paper NAME: a paper's tables as printed, in rows and columns, for the pair of a config.

specdec++ (arXiv 2405.19715) and svip (arXiv 2411.18462) are replayed, but for SpecDec++'s Table 2: replayed throughputs
are predictions, counts times measured or given times (law 4.9), as in the paper SpecDec++. svip-trees (its Tables 3 and
4) and hsddw are clocked.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from configs.load import accepts_yaml
from configs.paths import check_local
from configs.schema import Config
from decode.experiment import Experiment
from evaluation.table import Table, printing, say
from papers.hsddw import hsddw_tables
from papers.specdec import specdec_tables
from papers.svip import svip_tables, tree_tables


@accepts_yaml
def paper_tables(
    config: Config,
    *,
    paper: Literal["specdec++", "svip", "svip-trees", "hsddw"],
    stops: tuple[str, ...] = ("entropy",),
    eagle: str | None = None,
    repeats: int = 3,
    json: bool = False,
) -> None:
    """Run `acceptance-heads tables`; `configs.measuring` documents its flags."""
    check_local(eagle, "--eagle", may_be_on_hub=True)
    if repeats < 1:
        raise ValueError(f"--repeats is {repeats}; each test prompt is decoded at least once")
    clocked: dict[str, Callable[[Experiment], list[Table]]] = {
        "svip-trees": partial(tree_tables, specs=stops, repeats=repeats),
        "hsddw": partial(hsddw_tables, eagle=eagle, repeats=repeats),
    }
    tables_of = {"specdec++": specdec_tables, "svip": svip_tables, **clocked}[paper]
    with printing(json) as publish:
        tables = tables_of(Experiment(config, needs_micro=paper == "hsddw"))
        for table in tables:
            table.print()
        figures = "measured on this machine" if paper in clocked else "predicted from a trace and times"
        more = "hierarchy compares more drafters" if paper == "hsddw" else "evaluate compares every policy"
        say(f"\nFigures of {paper}'s tables are {figures}: compare them with one another, not with the paper's.")
        say(f"acceptance-heads {more}.")
        publish({"paper": paper, "tables": [table.as_dict() for table in tables]})
