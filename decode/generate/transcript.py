"""A generation in colour.

accepted   drafted, and accepted by the target          green
rejected   drafted, and discarded                       struck through, dim; of a tree the likeliest rejected path
residual   the target's token instead of a rejected    red
bonus      the target's token after full acceptance     blue
"""

import re
from collections.abc import Iterable
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from decode.loop.decoder import Generation, Round
from decode.policies.base import Policy

STYLES = {"accepted": "green", "rejected": "dim strike", "residual": "bold red", "bonus": "bold blue"}
# width of a picture
_COLUMNS = 76
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The text that each token adds; a byte-level token may hold half a character, which waits for its other half."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0

    def add(self, token: int) -> str:
        """Append `token`; returns the text that is complete with it."""
        self._ids.append(token)
        text = self.peek(())
        if text.endswith(_INCOMPLETE):
            return ""
        # spaces and joins depend only on the tokens that were shown last
        del self._ids[: self._num_shown]
        self._num_shown = len(self._ids)
        return text

    def peek(self, tokens: tuple[int, ...]) -> str:
        """The text that `tokens` would add."""
        shown, every = (
            self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (self._ids[: self._num_shown], [*self._ids, *tokens])
        )
        return str(every[len(shown) :])


def legend() -> Text:
    """One line that names the colours."""
    return Text.assemble(*(word for name, style in STYLES.items() for word in ((name, style), "  ")))


def show(
    rounds: Iterable[Round], policy: Policy, *, console: Console, tokenizer: Any, has_rejected: bool = True
) -> tuple[Text, str]:
    """Print the legend, the rounds as they come, and a line on the whole generation; returns (text, that line)."""
    detokenizer = Detokenizer(tokenizer)
    whole = Text()
    shown: list[Round] = []
    console.print(legend())
    for round_ in rounds:
        text = styled(round_, detokenizer, has_rejected=has_rejected)
        console.print(text, end="", soft_wrap=True)
        whole.append_text(text)
        shown.append(round_)
    closing = summary(Generation.of(shown), policy)
    console.print("\n" + closing, soft_wrap=True)
    return whole, closing


def styled(round_: Round, detokenizer: Detokenizer, *, has_rejected: bool = True) -> Text:
    """The tokens of the next round with their styles."""
    text = Text()
    for token in round_.emitted[: round_.num_accepted]:
        text.append(detokenizer.add(token), STYLES["accepted"])
    if has_rejected and round_.rejected:
        text.append(detokenizer.peek(round_.rejected).rstrip("\n"), STYLES["rejected"])
    if round_.next_kind is not None:
        text.append(detokenizer.add(round_.emitted[-1]), STYLES[round_.next_kind])
    return text


def picture(text: Text, closing: str, *, title: str) -> str:
    """Legend, text and closing line as SVG, in the fonts of the reader."""
    console = Console(record=True, file=StringIO(), width=_COLUMNS, highlight=False)
    console.print(legend(), text, closing, sep="\n")
    # rich's own fonts come from another host
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)


def summary(generation: Generation, policy: Policy) -> str:
    """One line on the counts and seconds of a generation."""
    counts = generation.counts
    draft_s = sum(round_.draft_s for round_ in generation.rounds)
    seconds = max(draft_s + sum(round_.target_s for round_ in generation.rounds), 1e-9)
    return (
        f"{counts.num_emitted} tokens in {seconds:.2f} s ({counts.num_emitted / seconds:.0f} tokens/s), "
        f"{counts.num_target} rounds: acceptance length {counts.acceptance_length:.2f}, "
        f"discard rate {counts.discard_rate:.2f}, verification rate {counts.verification_rate:.2f}, "
        f"drafting {100 * draft_s / seconds:.0f} % of the time ({type(policy).__name__})"
    )
