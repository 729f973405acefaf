"""A generation in colour: each token as what it is to the round that emitted it.

accepted   drafted, and accepted by the target          green
rejected   drafted, and discarded                       struck through, dim; of a tree the likeliest path that was
           refused
residual   the target's token in place of a rejected    red
bonus      the target's token after full acceptance     blue
"""

from io import StringIO

from rich.console import Console
from rich.text import Text

from decode.generate.detokenizer import Detokenizer, TokenDecoder
from decode.loop.decoder import Generation, Round
from decode.policies.base import Policy

STYLES = {"accepted": "green", "rejected": "dim strike", "residual": "bold red", "bonus": "bold blue"}


def legend() -> Text:
    """One line that names the colours."""
    return Text.assemble(*(word for name, style in STYLES.items() for word in ((name, style), "  ")))


class Transcript:
    """Writes rounds to a console as they come."""

    def __init__(self, console: Console, tokenizer: TokenDecoder, *, has_rejected: bool = True) -> None:
        """Args:
        console: what is written to; colours appear where it has them.
        tokenizer: the pair's.
        has_rejected: show rejected drafts as well.
        """
        self.console = console
        self._detokenizer = Detokenizer(tokenizer)
        self._has_rejected = has_rejected
        self.text = Text()
        """Everything written so far."""

    def write(self, round_: Round) -> None:
        """Print one round, without a line break of its own."""
        text = self.text_of(round_)
        self.text.append_text(text)
        self.console.print(text, end="", soft_wrap=True)

    def text_of(self, round_: Round) -> Text:
        """The round's tokens with their styles."""
        text = Text()
        for token in round_.emitted[: round_.num_accepted]:
            text.append(self._detokenizer.add(token), STYLES["accepted"])
        if self._has_rejected and round_.refused:
            text.append(self._detokenizer.peek(round_.refused).rstrip("\n"), STYLES["rejected"])
        if round_.next_kind is not None:
            text.append(self._detokenizer.add(round_.emitted[-1]), STYLES[round_.next_kind])
        return text


def picture(text: Text, closing: str, *, title: str) -> str:
    """Legend, text and closing line as SVG, wrapped at 100 columns."""
    console = Console(record=True, file=StringIO(), width=100, highlight=False)
    console.print(legend(), text, closing, sep="\n")
    return console.export_svg(title=title)


def summary(generation: Generation, policy: Policy) -> str:
    """One line on the counts and seconds of a generation."""
    counts = generation.counts
    draft_s, target_s = (sum(getattr(round_, name) for round_ in generation.rounds) for name in ("draft_s", "target_s"))
    seconds = max(draft_s + target_s, 1e-9)
    return (
        f"{counts.num_emitted} tokens in {seconds:.2f} s ({counts.num_emitted / seconds:.0f} tokens/s), "
        f"{counts.num_target} rounds: "
        f"acceptance length {counts.acceptance_length:.2f}, discard rate {counts.discard_rate:.2f}, "
        f"verification rate {counts.verification_rate:.2f}, drafting {100 * draft_s / seconds:.0f} % of the time "
        f"({type(policy).__name__})"
    )
