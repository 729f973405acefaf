"""What an engine lacks: our policies and heads at its costs and those of their stops.

They run in our loop or plugin, which draws what it drafts: so they compete on drafts that are drawn as the target's
tokens are, and on the engine's own, where these are others.
"""

from collections.abc import Mapping

from evaluation.contest.arms import BASELINE, Arm, Pick, picks_of, replay_dataset
from evaluation.contest.grids import BOUNDS, grids_of
from evaluation.contest.results import GROUPS, HEADS, TRAINING_FREE
from evaluation.contest.travel import calibrated_on
from evaluation.flags.choice import Choice, Contest, Option
from evaluation.intervals import Splits
from evaluation.traces.trace import Trace
from heads.model.head import AcceptanceHead

NAMES = {TRAINING_FREE: "our best policy without training", HEADS: "our best head"}


def ours(contest: Contest, heads: Mapping[str, AcceptanceHead], *, drawn: Splits[Trace]) -> dict[str, Choice]:
    """The best of our policies without training and of our heads, on the engine's drafts and on those of our loop.

    Args:
        contest: the engine's.
        heads: by name.
        drawn: the trace of drafts that are drawn as the target's tokens are.
    """
    cost, home = contest.times.speculating, contest.home
    arms_of = {"": _arms(home, contest, heads)}
    if home.dev.draft_sampling is not None:
        arms_of[" on drawn drafts"] = _arms(drawn, contest, heads)
    found = {}
    for group, belongs in GROUPS.items():
        members = {
            label: [arm for arm in arms if belongs(arm.grid.family) and arm.grid.family not in (*BOUNDS, BASELINE)]
            for label, arms in arms_of.items()
        }
        picks = [(label, pick) for label, arms in members.items() for pick in picks_of(arms, cost).values()]
        if not picks:
            continue
        label, best = max(picks, key=lambda labelled: labelled[1].tokens_per_s_on_dev(cost))
        found[NAMES[group]] = Choice(NAMES[group], option_of(best, contest, label))
    return found


def _arms(traces: Splits[Trace], contest: Contest, heads: Mapping[str, AcceptanceHead]) -> list[Arm]:
    """Everything of ours that runs, replayed; heads calibrated to drafts that are none of theirs."""
    cost, fitting = contest.times.speculating, calibrated_on(traces.dev, heads)
    every = dict(heads) | fitting
    grids = grids_of({}, every, max_draft_length=traces.dev.max_draft_length)
    replays = replay_dataset(traces, grids, heads=every, perfect_head=False, name="our policies")
    return [*replays.arms, *replays.auto_arms(cost, is_online=(False,))]


def option_of(pick: Pick, contest: Contest, label: str) -> Option:
    """What an arm did at its setting."""
    dev, test = pick.arm.spent(contest.times.speculating)
    return Option(f"{pick.family}{label}", pick.values, Splits(dev.at(pick.setting), test.at(pick.setting)))
