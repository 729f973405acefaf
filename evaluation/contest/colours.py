"""A colour for every family: one hue for each kind of policy, and shades of it for the families of that kind, so that
no plot uses a colour twice. All are of middle lightness, to be told apart on a light page and on a dark one.
"""

from collections.abc import Iterable, Sequence
from colorsys import hls_to_rgb
from typing import NamedTuple

from decode.policies.registry import POLICIES, RULES
from evaluation.contest.grids import BOUNDS
from evaluation.contest.tables import NAMES


class Hue(NamedTuple):
    """Hue in degrees, its saturation, and the lightness of a kind's first and last family."""

    degrees: float
    saturation: float
    first: float = 0.36
    last: float = 0.68


LENGTHS, PROBABILITIES, ENTROPIES, OWN = "lengths", "probabilities", "entropies", "own policies"
PAPERS, HEADS, AUTO, LIMITS = "SpecDec++", "heads", "auto", "bounds"
_HUES = {
    LENGTHS: Hue(215, 0.1, 0.42, 0.56),
    PROBABILITIES: Hue(214, 0.65),
    ENTROPIES: Hue(168, 0.6, 0.3, 0.55),
    PAPERS: Hue(46, 0.85, 0.44, 0.44),
    HEADS: Hue(2, 0.65, 0.34, 0.76),
    AUTO: Hue(285, 0.45, 0.38, 0.74),
    LIMITS: Hue(215, 0.16, 0.66, 0.8),
    OWN: Hue(330, 0.6, 0.4, 0.68),
}
_ENTROPIES = ("entropy", "self_verify", "ada_edl")
_LENGTHS = ("target_alone", "fixed_length", "heuristic")
_BUILT_IN = tuple(name for name in NAMES if name not in RULES)  # engines' rules have colours where they compete


def kind_of(family: str) -> str:
    """Kind of policy that a family is: what it looks at, or why nothing can reach it."""
    prefixes = {"auto_": AUTO, "head_": HEADS}
    if family in BOUNDS:
        return LIMITS
    if family == "head_specdec":
        return PAPERS
    if family in _LENGTHS:
        return LENGTHS
    if family in _ENTROPIES:
        return ENTROPIES
    by_prefix = next((kind for prefix, kind in prefixes.items() if family.startswith(prefix)), None)
    return by_prefix or (PROBABILITIES if family in _BUILT_IN and family in POLICIES else OWN)


def colours_of(families: Iterable[str]) -> dict[str, str]:
    """Family -> its colour, in every plot of an evaluation the same one; none is that of two."""
    named = list(dict.fromkeys([*_BUILT_IN, *families]))
    members: dict[str, list[str]] = {}
    for family in named:
        members.setdefault(kind_of(family), []).append(family)
    return {
        family: _shade(_HUES[kind], place, of_kind)
        for kind, of_kind in members.items()
        for place, family in enumerate(of_kind)
    }


def _shade(hue: Hue, place: int, of_kind: Sequence[str]) -> str:
    """Colour as #rrggbb: neighbours take steps of lightness, and every second one turns a little, so that two shades
    side by side differ in more than lightness.
    """
    share = place / max(1, len(of_kind) - 1)
    lightness, turn = hue.first + share * (hue.last - hue.first), 18 * (place % 2)
    rgb = hls_to_rgb((hue.degrees + turn) % 360 / 360, lightness, hue.saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
