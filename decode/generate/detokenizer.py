"""Token by token to text: a byte-level token may hold half a character, so text is shown once it is whole."""

from typing import Any, Protocol, runtime_checkable

_HALF = "\ufffd"
_WINDOW = 16
"""Tokens that are decoded again with each new one; spaces and joins depend on their neighbours only."""


@runtime_checkable
class TokenDecoder(Protocol):
    """The methods of a tokenizer that are needed here."""

    def decode(self, token_ids: list[int], **how: Any) -> Any:
        """The text of token ids."""
        ...


class Detokenizer:
    """The text that each token adds after the tokens before it."""

    def __init__(self, tokenizer: TokenDecoder, token_ids: list[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._ids = list(token_ids or [])
        self._shown = len(self._text(0))
        self._start = 0

    def add(self, token: int) -> str:
        """Keep `token` and return the text that it adds; empty while a character is incomplete, and then all of it with
        the token that completes it.
        """
        self._ids.append(token)
        text = self._text(self._start)
        if text.endswith(_HALF):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        if len(self._ids) - self._start > 2 * _WINDOW:
            self._start = len(self._ids) - _WINDOW
            self._shown = len(self._text(self._start))
        return piece

    def peek(self, tokens: tuple[int, ...]) -> str:
        """The text that `tokens` would add; they are not kept."""
        return self._text(self._start, tokens)[self._shown :]

    def _text(self, start: int, more: tuple[int, ...] = ()) -> str:
        return str(self._tokenizer.decode([*self._ids[start:], *more], clean_up_tokenization_spaces=False))
