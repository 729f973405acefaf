"""python -m evaluation theory: the closed forms as tables and as Chen's Figure 1. That the real loop has their means is
a test.
"""

from collections.abc import Callable, Iterator
from functools import partial
from json import dumps as to_json
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from configs.schema import Config
from evaluation.figure import panels_of
from evaluation.table import Table, announce, printing, say, shown
from evaluation.theory import closed_forms as forms

_WIDTH = 110
_COLUMNS = {
    "form": ("form", ""),
    "setting": ("setting", ""),
    "tokens": ("tokens", ".4f"),
    "speed-up": ("speedup", ".3f"),
}
_SCHEDULES = ((1, 1), (1, 3), (1, 6), (2, 2), (3, 1), (3, 3))
_DIVERGENCES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0)
"""KL(q || p) in nats at which SVIP's bounds are shown."""
_BLOCKS = {1: "tab:blue", 2: "tab:orange", 3: "tab:green", 5: "tab:red"}
"""Colour of each block size m."""
_LONGEST = 10
_NUM_RATES = 16

Form = dict[str, str | float]
"""A row: form, setting, tokens per target forward, speed-up."""


def theory(
    config: Config,
    *,
    rates: tuple[float, float, float] = (0.6, 0.8, 0.7),
    costs: tuple[float, float] = (0.02, 0.2),
    json: bool = False,
) -> None:
    """Closed forms, Chen's Figure 1, CSV.

    Args:
        config: decode.dir is where tables and plot go.
        rates: acceptance rates of small under target, of medium (draft) under target, of small (micro) under draft.
        costs: one forward of the small and of the medium model, in target forwards.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """
    small, medium, inner = rates
    forms_of = list(_two_level({small: costs[0], medium: costs[1]}))
    forms_of += _schedules(interleaved=(small, medium), pre_verified=(inner, medium), costs=costs)
    bounds = [
        {"KL in nats": f"{kl:g}", "Pinsker": f"{forms.pinsker(kl):.3f}"}
        | {"Bretagnolle-Huber": f"{forms.bretagnolle_huber(kl):.3f}"}
        for kl in _DIVERGENCES
    ]
    directory = Path(config.decode.dir) / "theory"
    directory.mkdir(parents=True, exist_ok=True)
    table, figure = directory / "theory.csv", directory / "chen-figure-1.png"
    pd.DataFrame(forms_of).to_csv(table, index=False)
    plot_interleaved(figure, rates=(small, medium), costs=costs)
    best = best_settings((small, medium, inner), costs)
    with printing(aside=json):
        Table("tokens per target forward, i.i.d. acceptance", shown(forms_of, _COLUMNS), names=2).print(_WIDTH)
        Table("SVIP's lower bounds of the acceptance rate", bounds).print(_WIDTH)
        best_sheet(best).print(_WIDTH)
        written = announce([table, figure])
        say(f"\n{verdict_of(best)}")
    if json:
        print(to_json({"forms": forms_of, "best": best, "written": written}))


def verdict_of(best: dict[str, dict[str, int | float]]) -> str:
    """Which algorithm the closed forms recommend."""
    name, values = max(best.items(), key=lambda entry: entry[1]["speedup"])
    setting = ", ".join(f"{key} = {value}" for key, value in values.items() if key != "speedup")
    return f"By the closed forms {name} is fastest, {values['speedup']:.2f} times the target alone ({setting})."


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


def best_sheet(best: dict[str, dict[str, int | float]]) -> Table:
    """Settings that the closed forms recommend."""
    rows = [
        {
            "drafter": name,
            "setting": ", ".join(f"{key} = {value}" for key, value in values.items() if key != "speedup"),
            "speed-up": f"{values['speedup']:.3f}",
        }
        for name, values in best.items()
    ]
    return Table("the fastest setting of each, by the closed forms", rows, names=2)


def _two_level(costs: dict[float, float]) -> Iterator[Form]:
    """Leviathan's expected tokens at lengths around the best."""
    for rate, cost in costs.items():
        best = forms.best_draft_length(rate, cost)
        for length in sorted({0, 1, max(best - 2, 0), best, best + 2}):
            name = f"a={rate} K={length}" + (" (best)" if length == best else "")
            yield _form("Leviathan", name, forms.expected_tokens(rate, length), forms.speedup(rate, length, cost))


def _schedules(
    *, interleaved: tuple[float, float], pre_verified: tuple[float, float], costs: tuple[float, float]
) -> Iterator[Form]:
    """Chen's m and n, and the same schedule with pre-verification."""
    for m, n in _SCHEDULES:
        name = f"m={m} n={n}"
        tokens = forms.interleaved_tokens(*interleaved, m=m, n=n)
        yield _form("Chen", name, tokens, forms.interleaved_speedup(interleaved, costs, m=m, n=n))
        tokens = forms.pre_verified_tokens(*pre_verified, m=m, n=n)
        yield _form("pre-verified", name, tokens, forms.pre_verified_speedup(pre_verified, costs, m=m, n=n))


def _form(form: str, setting: str, tokens: float, speedup: float) -> Form:
    return {"form": form, "setting": setting, "tokens": tokens, "speedup": speedup}


def plot_interleaved(path: Path, *, rates: tuple[float, float], costs: tuple[float, float]) -> None:
    """Write the figure: tokens per target forward against n, speed-up against n, and each drafter's best against the
    small model's rate.

    The paper's shows the closed forms only, and its text gives no figure in numbers.
    """
    figure, (tokens, speed, best) = panels_of(3, width=15.0, height=4.6)
    for m, colour in _BLOCKS.items():
        _lines_of(m, (tokens, speed), colour=colour, rates=rates, costs=costs)
    _best_of_each(best, rates[1], costs)
    tokens.set(xlabel="n, small tokens per block", ylabel="tokens per target forward", title="closed form")
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
