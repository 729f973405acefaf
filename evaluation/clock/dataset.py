"""`evaluation evaluate` on a clock: of each family the setting that dev chose, in real generations that the trace is
played to.

The oracle and the perfect head know what no loop knows, so they are not there; the target alone is.
"""

from decode.experiment import Experiment
from decode.policies import FixedLength
from evaluation.clock.primed import PrimedLoop
from evaluation.clock.results import ClockReport, report_of
from evaluation.clock.turns import clock
from evaluation.contest.arms import ALONE, BASELINE, Pick, Replays, picks_of, replay_arms
from evaluation.contest.grids import BOUNDS, Grid
from evaluation.contest.tables import NAMES
from evaluation.costs.model import CostModel
from evaluation.traces.recording import Traces


def check_clock(num_prompts: int, repeats: int) -> None:
    """Raise ValueError unless a clock can run so often."""
    if num_prompts < 0:
        raise ValueError(f"clock is {num_prompts}; it is a number of test prompts, 0 for none")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; every generation is timed at least once")


def clock_dataset(
    experiment: Experiment, replays: Replays, cost: CostModel, *, dataset: str, num_prompts: int, repeats: int
) -> ClockReport:
    """The first test prompts of one dataset, on the loop of the config."""
    loop = PrimedLoop(
        experiment.pair,
        experiment.sampling,
        max_draft_length=experiment.decode.max_draft_length,
        compile=experiment.decode.compile,
    )
    trace = replays.traces.test.select(range(min(num_prompts, replays.num_prompts)))
    picks = picks_of([*replays.arms, *replays.auto_arms(cost)], cost)
    alone = Grid(ALONE, ALONE, FixedLength(0), ({},))
    families = [family for family in NAMES if family in picks and family not in BOUNDS]
    runners = [Pick(next(replay_arms([alone], Traces(trace, trace))), 0), *(picks[family] for family in families)]
    return report_of(
        clock(loop, runners, trace, repeats=repeats, name=dataset), runners, cost, dataset=dataset, baseline=BASELINE
    )
