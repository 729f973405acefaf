"""python -m evaluation theory: the closed forms as tables and as Chen's Figure 1, each beside a Monte Carlo run of the
real loop.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps as to_json
from math import log
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from configs.schema import Config
from evaluation.figure import panels_of
from evaluation.sheet import Sheet, announce, printing, say, shown
from evaluation.theory import closed_forms as forms
from evaluation.theory.monte_carlo import (
    Simulated,
    acceptance_rounds,
    interleaved_rounds,
    pearl_steps,
    pre_verified_rounds,
    two_level_rounds,
)

_WIDTH = 110
_COLUMNS = {
    "form": ("form", ""),
    "setting": ("setting", ""),
    "closed form": ("expected", ".4f"),
    "loop": ("measured", ".4f"),
    "s.e.": ("standard_error", ".4f"),
    "z": ("z_score", "+.2f"),
    "speed-up": ("speedup", ".3f"),
}
_SCHEDULES = ((1, 1), (1, 3), (1, 6), (2, 2), (3, 1), (3, 3))
_DISTRIBUTIONS = {
    "near": ((0.5, 0.3, 0.2), (0.45, 0.35, 0.2)),
    "apart": ((0.7, 0.2, 0.1), (0.3, 0.4, 0.3)),
    "far": ((0.98, 0.01, 0.01), (0.02, 0.49, 0.49)),
}
"""name -> (q, p)"""
_BLOCKS = {1: "tab:blue", 2: "tab:orange", 3: "tab:green", 5: "tab:red"}
"""Colour of each block size m."""
_LONGEST = 10
_MEASURED_AT = (0, 2, 5, 10)
_NUM_RATES = 16
_CHANCE = 4
"""Standard errors that one of a few dozen checks exceeds by chance once in some hundreds of runs."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One closed form beside its measurement, in tokens per target forward (bounds: as a probability)."""

    form: str
    setting: str
    expected: float
    measured: float
    standard_error: float
    z_score: float
    speedup: float | None = None
    """Over the target alone, at the command's costs."""


def theory(
    config: Config,
    *,
    rates: tuple[float, float, float] = (0.6, 0.8, 0.7),
    costs: tuple[float, float] = (0.02, 0.2),
    num_rounds: int = 3000,
    json: bool = False,
) -> None:
    """Closed forms beside Monte Carlo on the real loop, Chen's Figure 1, CSV.

    Args:
        config: decode.dir is where tables and plot go.
        rates: acceptance rates of small under target, of medium (draft) under target, of small (micro) under draft.
        costs: one forward of the small and of the medium model, in target forwards.
        num_rounds: rounds of the real loop per check.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    if num_rounds < 2:
        raise ValueError(f"num_rounds is {num_rounds}; a standard error needs at least 2")
    small, medium, inner = rates
    checks = [
        *_two_level_checks({small: costs[0], medium: costs[1]}, num_rounds),
        *_pearl_checks(medium, costs[1], num_rounds),
        *_schedule_checks(
            interleaved=(small, medium), pre_verified=(inner, medium), costs=costs, num_rounds=num_rounds
        ),
    ]
    bounds = list(_bound_checks(num_rounds))
    directory = Path(config.decode.dir) / "theory"
    directory.mkdir(parents=True, exist_ok=True)
    table, figure = directory / "theory.csv", directory / "chen-figure-1.png"
    pd.DataFrame([asdict(check) for check in [*checks, *bounds]]).to_csv(table, index=False)
    plot_interleaved(figure, rates=(small, medium), costs=costs, num_rounds=num_rounds)
    best = best_settings((small, medium, inner), costs)
    largest = max(abs(check.z_score) for check in checks)
    with printing(aside=json):
        _sheet("tokens per target forward, i.i.d. acceptance", checks).print(_WIDTH)
        _sheet("SVIP's lower bounds of the acceptance rate", bounds).print(_WIDTH)
        best_sheet(best).print(_WIDTH)
        written = announce([table, figure])
        say(f"\n{verdict_of(best, largest, num_checks=len(checks))}")
    if json:
        shown_checks = [asdict(check) for check in checks]
        print(to_json({"largest_z_score": largest, "checks": shown_checks, "best": best, "written": written}))


def verdict_of(best: dict[str, dict[str, int | float]], largest: float, *, num_checks: int) -> str:
    """Whether the loop has the closed forms' means, and which algorithm they recommend."""
    name, values = max(best.items(), key=lambda entry: entry[1]["speedup"])
    setting = ", ".join(f"{key} = {value}" for key, value in values.items() if key != "speedup")
    agreement = (
        "the loop agrees with them"
        if largest < _CHANCE
        else f"more than {_CHANCE} is not chance: raise --num_rounds, and if it stays, the loop or a form is wrong"
    )
    return (
        f"By the closed forms {name} is fastest, {values['speedup']:.2f} times the target alone ({setting}). The "
        f"largest deviation of the real loop in {num_checks} checks is {largest:.1f} standard errors: {agreement}."
    )


def best_settings(rates: tuple[float, float, float], costs: tuple[float, float]) -> dict[str, dict[str, int | float]]:
    """The fastest setting of each algorithm at these rates and costs, by the closed forms."""
    small, medium, inner = rates
    best: dict[str, dict[str, int | float]] = {}
    for name, rate, cost in (("small alone", small, costs[0]), ("medium alone", medium, costs[1])):
        length = forms.best_draft_length(rate, cost)
        best[name] = {"draft_length": length, "speedup": forms.speedup(rate, length, cost)}
    families: dict[str, Callable[..., float]] = {
        "interleaved (Chen)": partial(forms.interleaved_speedup, (small, medium), costs),
        "pre-verified": partial(forms.pre_verified_speedup, (inner, medium), costs),
    }
    for name, speedup in families.items():
        m, n = forms.best_schedule(speedup)
        best[name] = {"m": m, "n": n, "speedup": speedup(m=m, n=n)}
    return best


def best_sheet(best: dict[str, dict[str, int | float]]) -> Sheet:
    """Settings that the closed forms recommend."""
    rows = [
        {
            "drafter": name,
            "setting": ", ".join(f"{key} = {value}" for key, value in values.items() if key != "speedup"),
            "speed-up": f"{values['speedup']:.3f}",
        }
        for name, values in best.items()
    ]
    return Sheet("the fastest setting of each, by the closed forms", rows, names=2)


def _two_level_checks(costs: dict[float, float], num_rounds: int) -> Iterator[Check]:
    """Leviathan's expected tokens at lengths around the best."""
    for rate, cost in costs.items():
        best = forms.best_draft_length(rate, cost)
        for length in sorted({0, 1, max(best - 2, 0), best, best + 2}):
            name = f"a={rate} K={length}" + (" (best)" if length == best else "")
            estimate = two_level_rounds(rate, length, num_rounds=num_rounds, seed=length)
            expected, speed = forms.expected_tokens(rate, length), forms.speedup(rate, length, cost)
            yield _check("Leviathan", name, expected=expected, estimate=estimate, speedup=speed)


def _pearl_checks(rate: float, cost: float, num_rounds: int) -> Iterator[Check]:
    """PEARL's tokens per step; its speed-up is that of two devices."""
    for gamma in sorted({1, 2, max(round(1 / cost), 1) if cost else 8}):
        estimate = pearl_steps(rate, gamma, num_rounds=num_rounds, seed=gamma)
        expected, speed = forms.pearl_tokens(rate, gamma), forms.pearl_speedup(rate, gamma, cost)
        yield _check(
            "PEARL, on two devices", f"a={rate} gamma={gamma}", expected=expected, estimate=estimate, speedup=speed
        )


def _schedule_checks(
    *, interleaved: tuple[float, float], pre_verified: tuple[float, float], costs: tuple[float, float], num_rounds: int
) -> Iterator[Check]:
    """Chen's m and n, and the same schedule with pre-verification."""
    for m, n in _SCHEDULES:
        name = f"m={m} n={n}"
        estimate = interleaved_rounds(interleaved, m=m, n=n, num_rounds=num_rounds, seed=10 * m + n)
        speed = forms.interleaved_speedup(interleaved, costs, m=m, n=n)
        yield _check(
            "Chen", name, expected=forms.interleaved_tokens(*interleaved, m=m, n=n), estimate=estimate, speedup=speed
        )
        estimate = pre_verified_rounds(pre_verified, m=m, n=n, num_rounds=num_rounds, seed=10 * m + n)
        speed = forms.pre_verified_speedup(pre_verified, costs, m=m, n=n)
        expected = forms.pre_verified_tokens(*pre_verified, m=m, n=n)
        yield _check("pre-verified", name, expected=expected, estimate=estimate, speedup=speed)


def _bound_checks(num_rounds: int) -> Iterator[Check]:
    """SVIP's bounds beside the measured acceptance rate that they must not exceed; z is how far above the bound that
    lies.
    """
    for name, (q, p) in _DISTRIBUTIONS.items():
        divergence = sum(mass * log(mass / bounded) for mass, bounded in zip(q, p, strict=True))
        estimate = acceptance_rounds(q, p, num_rounds=num_rounds)
        for form, bound in (("Pinsker", forms.pinsker), ("Bretagnolle-Huber", forms.bretagnolle_huber)):
            yield _check(form, f"{name}, KL={divergence:.3f}", expected=bound(divergence), estimate=estimate)


def _check(form: str, setting: str, *, expected: float, estimate: Simulated, speedup: float | None = None) -> Check:
    return Check(
        form=form,
        setting=setting,
        expected=expected,
        measured=estimate.mean,
        standard_error=estimate.standard_error,
        z_score=estimate.z_score(expected),
        speedup=speedup,
    )


def _sheet(title: str, checks: Sequence[Check]) -> Sheet:
    return Sheet(title, shown(map(asdict, checks), _COLUMNS), names=2)


def plot_interleaved(path: Path, *, rates: tuple[float, float], costs: tuple[float, float], num_rounds: int) -> None:
    """Write the figure: tokens per target forward against n, speed-up against n, and each drafter's best against the
    small model's rate.

    The paper's shows the closed forms only, and its text gives no figure in numbers.
    """
    figure, (tokens, speed, best) = panels_of(3, width=15.0, height=4.6)
    for m, colour in _BLOCKS.items():
        _lines_of(m, (tokens, speed), colour=colour, rates=rates, costs=costs)
        for n in _MEASURED_AT:
            estimate = interleaved_rounds(rates, m=m, n=n, num_rounds=num_rounds, seed=100 * m + n)
            per_token = 1 / (1 + m * (n * costs[0] + costs[1]))
            for axes, scale in ((tokens, 1.0), (speed, per_token)):
                error = 2 * estimate.standard_error * scale
                axes.errorbar(n, estimate.mean * scale, yerr=error, fmt="o", color=colour, markersize=4, capsize=2)
    _best_of_each(best, rates[1], costs)
    tokens.set(
        xlabel="n, small tokens per block",
        ylabel="tokens per target forward",
        title="lines: closed form; points: real loop, 2 s.e.",
    )
    speed.set(xlabel="n, small tokens per block", ylabel="speed-up over the target alone", title=_title(rates, costs))
    tokens.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _lines_of(
    m: int, panels: tuple[Axes, Axes], *, colour: str, rates: tuple[float, float], costs: tuple[float, float]
) -> None:
    lengths = range(_LONGEST + 1)
    panels[0].plot(
        lengths, [forms.interleaved_tokens(*rates, m=m, n=n) for n in lengths], color=colour, label=f"m = {m}"
    )
    panels[1].plot(
        lengths, [forms.interleaved_speedup(rates, costs, m=m, n=n) for n in lengths], color=colour, label=f"m = {m}"
    )


def _best_of_each(axes: Axes, medium_rate: float, costs: tuple[float, float]) -> None:
    """Speed-up of each drafter at its own best setting."""
    small, interleaved = [], []
    small_rates = [medium_rate * (step + 4) / (_NUM_RATES + 4) for step in range(_NUM_RATES + 1)]
    for rate in small_rates:
        small.append(forms.speedup(rate, forms.best_draft_length(rate, costs[0]), costs[0]))
        pair_rates = (rate, medium_rate)
        m, n = forms.best_schedule(partial(forms.interleaved_speedup, pair_rates, costs))
        interleaved.append(forms.interleaved_speedup(pair_rates, costs, m=m, n=n))
    medium = forms.speedup(medium_rate, forms.best_draft_length(medium_rate, costs[1]), costs[1])
    axes.plot(small_rates, small, label="small alone, best K")
    axes.axhline(medium, color="tab:green", label="medium alone, best K")
    axes.plot(small_rates, interleaved, "--", color="tab:red", label="interleaved, best m and n")
    axes.set(
        xlabel="acceptance rate of the small model",
        ylabel="speed-up over the target alone",
        title=f"each at its best; medium's rate {medium_rate}",
    )
    axes.legend(frameon=False)


def _title(rates: tuple[float, float], costs: tuple[float, float]) -> str:
    return f"rates {rates[0]} and {rates[1]}, costs {costs[0]} and {costs[1]} target forwards"
