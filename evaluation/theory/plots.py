"""Chen's Figure 1: what m and n do, by the closed form (lines) and on the real loop (points)."""

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from evaluation.figure import panels_of
from evaluation.theory import closed_forms as forms
from evaluation.theory.monte_carlo import interleaved_rounds

_BLOCKS = {1: "tab:blue", 2: "tab:orange", 3: "tab:green", 5: "tab:red"}
"""Colour of each block size m."""
_LONGEST = 10
_MEASURED_AT = (0, 2, 5, 10)
_NUM_RATES = 16


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
    m: int, both: tuple[Axes, Axes], *, colour: str, rates: tuple[float, float], costs: tuple[float, float]
) -> None:
    lengths = range(_LONGEST + 1)
    both[0].plot(lengths, [forms.interleaved_tokens(*rates, m=m, n=n) for n in lengths], color=colour, label=f"m = {m}")
    both[1].plot(
        lengths, [forms.interleaved_speedup(rates, costs, m=m, n=n) for n in lengths], color=colour, label=f"m = {m}"
    )


def _best_of_each(axes: Axes, medium_rate: float, costs: tuple[float, float]) -> None:
    """Speed-up of each drafter at its own best setting."""
    small, interleaved = [], []
    small_rates = [medium_rate * (step + 4) / (_NUM_RATES + 4) for step in range(_NUM_RATES + 1)]
    for rate in small_rates:
        small.append(forms.speedup(rate, forms.best_draft_length(rate, costs[0]), costs[0]))
        both = (rate, medium_rate)
        m, n = forms.best_schedule(partial(forms.interleaved_speedup, both, costs))
        interleaved.append(forms.interleaved_speedup(both, costs, m=m, n=n))
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
