"""`Prompt`, one record of a prompt set -> one `Prompt`, and the JSONL files that hold such records.

Fields by which a record is recognised, first match wins: `messages` (role/content), `conversations` (from/value,
ShareGPT), `turns` (MT-Bench, Spec-Bench), `instruction` with `input` (Alpaca), `question` (GSM8K), `prompt`
(HumanEval), `text`. Replies that a conversation brings along are dropped, because the target writes its own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ID_FIELDS = ("id", "idx", "task_id", "question_id")
_EXPECTED = "one of the fields messages, conversations, turns, instruction, question, prompt, text"
_USER = {"user", "human"}


@dataclass(frozen=True)
class Prompt:
    """What the user says in one conversation with the target."""

    id: str
    """Stays the same from run to run: it decides the split and names the row."""
    turns: tuple[str, ...]
    """The user's messages in order; the target's own replies stand between them."""
    context: str = ""
    """Material that belongs to the first turn (Alpaca's `input`); the template decides how it is joined."""
    system: str = ""
    category: str = ""
    set: str = field(default="", repr=False, compare=False)
    """Name of the set that it comes from, where the run has several; the id begins with it."""

    @property
    def is_text(self) -> bool:
        """False if part of it cannot be encoded."""
        return all(map(is_text, (*self.turns, self.context, self.system)))

    @property
    def text(self) -> str:
        """The first turn with its context."""
        return f"{self.turns[0]}\n{self.context}" if self.context else self.turns[0]


def is_text(text: str) -> bool:
    """Whether a string is characters; JSON can spell half of one, a lone surrogate, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_jsonl(path: str | Path) -> list[Prompt]:
    """Every prompt of a JSONL file; errors as `prompts_of` has them, and FileNotFoundError."""
    return prompts_of((f"{path}:{number}", str(number - 1), record) for number, record in json_lines(path))


def prompts_of(
    records: Iterable[tuple[str, str, dict[str, Any]]], columns: Mapping[str, str] | None = None
) -> list[Prompt]:
    """Every prompt of a set.

    Args:
        records: (where it stands, its id if it has none, the record).
        columns: field that is looked for -> the set's own name of it.

    Raises:
        ValueError: a malformed record (where it stands, what was expected and what is there), or a repeated id.
    """
    prompts: dict[str, Prompt] = {}
    for where, default_id, record in records:
        if absent := [name for name in (columns or {}).values() if name not in record]:
            raise ValueError(
                f"{where}: no column {absent[0]!r}, which columns names; there are {', '.join(sorted(record))}"
            )
        try:
            prompt = prompt_of(
                record | {name: record[column] for name, column in (columns or {}).items()}, default_id=default_id
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if prompt.id in prompts:
            raise ValueError(
                f"{where}: id {prompt.id!r} stands on an earlier line too; ids decide the split, so give each prompt "
                "one of its own"
            )
        prompts[prompt.id] = prompt
    return list(prompts.values())


def json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank.

    Raises:
        ValueError: a line that is no JSON object.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: the line is no text in UTF-8; save the file in that encoding"
                ) from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: expected one JSON object on the line; {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
            yield number, record


def prompt_of(record: dict[str, Any], *, default_id: str) -> Prompt:
    """The prompt of one record; `default_id` where it has none of its own.

    Raises:
        ValueError: no known field, or one of the wrong type.
    """
    prompt_id = next((str(record[name]) for name in _ID_FIELDS if record.get(name) is not None), default_id)
    if not is_text(prompt_id):
        raise ValueError(f"expected the id to be text, got half a character in {_shown(prompt_id)}")
    category = str(record.get("category") or "")
    if "messages" in record:
        return _conversation(prompt_id, _messages(record["messages"], ("role", "content")), category)
    if "conversations" in record:
        return _conversation(prompt_id, _messages(record["conversations"], ("from", "value")), category)
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"expected turns to be a list of strings, got {_shown(turns)}")
        return Prompt(prompt_id, tuple(turns), category=category)
    for name in ("instruction", "question", "prompt", "text"):
        if name in record:
            return Prompt(prompt_id, (_text(record, name),), context=_text(record, "input"), category=category)
    raise ValueError(
        f"expected {_EXPECTED}; got {', '.join(sorted(record))}; say which of them it is, as data.prompts: "
        f"{{path: …, columns: {{prompt: {min(record, default='NAME')}}}}}"
    )


def _conversation(prompt_id: str, messages: list[tuple[str, str]], category: str) -> Prompt:
    turns = tuple(text for role, text in messages if role in _USER)
    if not turns:
        raise ValueError("expected at least one message of the user")
    system = next((text for role, text in messages if role == "system"), "")
    return Prompt(prompt_id, turns, system=system, category=category)


def _messages(value: Any, names: tuple[str, str]) -> list[tuple[str, str]]:
    """(role, text) of every message, where `names` are the fields that hold the two."""
    role, text = names
    # how some Parquet files store such lists
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    if isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get(role), str) and isinstance(message.get(text), str)
        for message in value
    ):
        return [(message[role], message[text]) for message in value]
    raise ValueError(f"expected a list of messages with the strings {role!r} and {text!r}, got {_shown(value)}")


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None and name == "input":  # Alpaca's optional material
        return ""
    if not isinstance(value, str):
        raise ValueError(f"expected {name} to be a string, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:80]
