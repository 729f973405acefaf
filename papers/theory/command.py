"""acceptance-heads theory: the closed forms as tables and as Chen's Figure 1. Tests check that the real loop has
their means.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pandas as pd

from configs.load import accepts_yaml
from configs.schema import Config
from evaluation.table import Table, announce, printing, say, shown
from heads.measures.figure import panels_of
from papers.theory import closed_forms as forms
from store.shards import write_atomic

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
"""Colour of each number of blocks m."""
_CHEN = "interleaved (Chen)"


@accepts_yaml
def theory(
    config: Config,
    *,
    rates: tuple[float, float, float] = (0.6, 0.8, 0.7),
    costs: tuple[float, float] = (0.02, 0.2),
    json: bool = False,
) -> None:
    """Run `acceptance-heads theory`; `configs.measuring` documents its flags."""
    rows = list(form_rows(rates, costs))
    best = best_settings(rates, costs)
    bounds = {"Pinsker": forms.pinsker, "Bretagnolle-Huber": forms.bretagnolle_huber}
    bound_rows = [
        {"KL in nats": f"{kl:g}"} | {name: f"{bound(kl):.3f}" for name, bound in bounds.items()} for kl in _DIVERGENCES
    ]
    settings = {name: ", ".join(f"{k} = {v}" for k, v in setting.items()) for name, (setting, _) in best.items()}
    best_rows = [
        {"drafter": name, "setting": settings[name], "speed-up": f"{speed:.3f}"} for name, (_, speed) in best.items()
    ]
    directory = Path(config.decode.dir) / "theory"
    directory.mkdir(parents=True, exist_ok=True)
    table = directory / "theory.csv"
    figure = directory / "chen-figure-1.png"
    write_atomic(table, pd.DataFrame(rows).to_csv(index=False).encode())
    plot_interleaved(figure, rates=rates[:2], costs=costs)
    with printing(json) as publish:
        Table("tokens per target forward, i.i.d. acceptance", shown(rows, _COLUMNS), names=2).print(_WIDTH)
        Table("SVIP's lower bounds of the acceptance rate", bound_rows).print(_WIDTH)
        Table("the fastest setting of each, by the closed forms", best_rows, names=2).print(_WIDTH)
        written = announce([table, figure])
        fastest = max(best, key=lambda name: best[name][1])
        speed = f"{best[fastest][1]:.2f} times the target alone ({settings[fastest]})"
        say(f"\nBy the closed forms {fastest} is fastest, {speed}.")
        fields = {name: setting | {"speedup": speed} for name, (setting, speed) in best.items()}
        publish({"forms": rows, "best": fields, "written": written})


def form_rows(rates: tuple[float, float, float], costs: forms.Rates) -> Iterator[dict[str, object]]:
    """Leviathan's form at lengths around the best; Chen's at several m and n, and the same schedules pre-verified."""
    for rate, cost in zip(rates, costs, strict=False):
        best = forms.best_draft_length(rate, cost)
        for length in sorted({0, 1, max(best - 2, 0), best, best + 2}):
            tokens = forms.expected_tokens(rate, length)
            yield {
                "form": "Leviathan",
                "setting": f"a={rate} K={length}{' (best)' if length == best else ''}",
                "tokens": tokens,
                "speedup": forms.speedup(tokens, cost * length),
            }
    for (m, n), (form, (tokens_of, of)) in product(_SCHEDULES, schedules_of(rates).items()):
        yield {
            "form": form,
            "setting": f"m={m} n={n}",
            "tokens": tokens_of(of, m=m, n=n),
            "speedup": forms.schedule_speedup(tokens_of, of, costs, m=m, n=n),
        }


def schedules_of(rates: tuple[float, float, float]) -> dict[str, tuple[forms.Tokens, forms.Rates]]:
    """Algorithm with three models -> its form and its two rates."""
    small, medium, inner = rates
    return {
        "Chen": (forms.interleaved_tokens, (small, medium)),
        "pre-verified": (forms.pre_verified_tokens, (inner, medium)),
    }


def best_settings(rates: tuple[float, float, float], costs: forms.Rates) -> dict[str, tuple[dict[str, int], float]]:
    """Algorithm -> the parameters and the speed-up of its fastest setting, by the closed forms."""
    best: dict[str, tuple[dict[str, int], float]] = {}
    for name, rate, cost in zip(("small alone", "medium alone"), rates, costs, strict=False):
        length = forms.best_draft_length(rate, cost)
        best[name] = {"draft_length": length}, forms.speedup(forms.expected_tokens(rate, length), cost * length)
    for name, (tokens, of) in schedules_of(rates).items():
        m, n = forms.best_schedule(tokens, of, costs)
        speed = forms.schedule_speedup(tokens, of, costs, m=m, n=n)
        best[_CHEN if name == "Chen" else name] = {"m": m, "n": n}, speed
    return best


def plot_interleaved(path: Path, *, rates: forms.Rates, costs: forms.Rates) -> None:
    """Write the figure: tokens per target forward against n, speed-up against n, and each drafter's best against the
    small model's rate. The paper's shows the closed forms only, and its text gives no figure in numbers.
    """
    figure, (tokens, speed, at_best) = panels_of(3, width=15.0, height=4.6)
    small, medium = rates
    lengths = range(11)
    form = forms.interleaved_tokens
    for m, colour in _BLOCKS.items():
        tokens.plot(lengths, [form(rates, m=m, n=n) for n in lengths], color=colour, label=f"m = {m}")
        speed.plot(lengths, [forms.schedule_speedup(form, rates, costs, m=m, n=n) for n in lengths], color=colour)
    small_rates = [medium * step / 20 for step in range(4, 21)]
    best = [best_settings((rate, medium, rate), costs) for rate in small_rates]
    at_best.plot(small_rates, [of["small alone"][1] for of in best], label="small alone, best K")
    series = [of[_CHEN][1] for of in best]
    at_best.plot(small_rates, series, "--", color="tab:red", label="interleaved, best m and n")
    at_best.axhline(best[0]["medium alone"][1], color="tab:green", label="medium alone, best K")
    n = "n, small tokens per block"
    gain = "speed-up over the target alone"
    tokens.set(title="closed form", xlabel=n, ylabel="tokens per target forward")
    speed.set(
        title=f"rates {small} and {medium}, costs {costs[0]} and {costs[1]} target forwards", xlabel=n, ylabel=gain
    )
    at_best.set(
        title=f"each at its best; medium's rate {medium}",
        xlabel="acceptance rate of the small model",
        ylabel=gain,
    )
    tokens.legend(frameon=False)
    at_best.legend(frameon=False)
    figure.savefig(path, dpi=120)
