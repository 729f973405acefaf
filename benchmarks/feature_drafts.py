"""Feature drafts for any small target, by the trio's recipe: an EAGLE and a GliDe draft, taught on a file of
instructions, and measured.

    python -m benchmarks.feature_drafts --target DIR --text FILE.jsonl --out DIR [--steps 1300]

FILE has one JSON object per line with instruction, input and output; the last 64 are held out. Both drafts are saved in
their released layouts under DIR/eagle and DIR/glide. Tokens per round are those of the real loop at fixed draft lengths
and temperature 1, no EOS heeded. The last line is one JSON document.
"""

import json
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from jsonargparse import auto_cli

from checkpoints.recipes.feature_drafts import (
    FEATURE_DRAFTS,
    acceptance_rates,
    new_feature_draft,
    save_feature_draft,
    teach,
)
from checkpoints.recipes.training import Encoded, encode_story, story_batches
from configs.schema import ModelSource, PairConfig
from data_gen.stories.stories import Story
from decode.drafters.factory import PairModels
from decode.policies import FixedLength
from lm import Sampling, load_model, load_pair, load_tokenizer
from store.progress import Bar

LENGTHS = (1, 2, 4, 6)
_HELD_OUT = 64
_LONGEST = 256
"""Tokens of a row; longer ones are left out."""


def feature_drafts(
    target: str, text: str, out: str, *, steps: int = 1300, batch_size: int = 16, learning_rate: float = 4e-3
) -> None:
    """Train, save and measure the feature drafts."""
    torch.manual_seed(0)
    source = ModelSource(path=target, dtype="float32", device_map="cpu")
    model, tokenizer = load_model(source), load_tokenizer(source)
    records = [json.loads(line) for line in Path(text).read_text(encoding="utf-8").splitlines()]
    rows = [encode_story(_story(record), tokenizer) for record in records[-_HELD_OUT - steps * batch_size :]]
    fitting = [row for row in rows if len(row[0]) <= _LONGEST]
    drafts = {kind: new_feature_draft(kind, model) for kind in FEATURE_DRAFTS}
    how = {"batch_size": batch_size, "seed": 0, "pad_id": tokenizer.pad_token_id}
    taught = teach(
        list(drafts.values()),
        model,
        story_batches(fitting[:-_HELD_OUT], **how),
        num_steps=steps,
        learning_rate=learning_rate,
    )
    started_s = perf_counter()
    with Bar(taught, desc="distil", unit="steps", total=steps) as bar:
        for losses in bar:
            bar.set_postfix_str(" ".join(f"{loss:.3f}" for loss in losses))
    figures: dict[str, object] = {"seconds": round(perf_counter() - started_s), "steps": steps}
    for kind, draft in drafts.items():
        save_feature_draft(draft, Path(out) / kind)
        held_out = list(islice(story_batches(fitting[-_HELD_OUT:], **how), _HELD_OUT // batch_size))
        figures[kind] = {"acceptance_rates": acceptance_rates(draft, model, held_out)} | _rounds(
            target, Path(out) / kind, fitting[-8:]
        )
    print(json.dumps(figures))


def _story(record: dict[str, str]) -> Story:
    prompt = "\n".join(part for part in (record["instruction"], record.get("input", "")) if part)
    return Story(id="", kind="", prompt=prompt, answer=record["output"])


def _rounds(target: str, draft: Path, rows: list[Encoded]) -> dict[str, float]:
    """Tokens per round of the real loop, which loads the draft from its directory."""
    pair = load_pair(
        PairConfig(
            target=ModelSource(path=target, dtype="float32"), draft=ModelSource(path=str(draft), dtype="float32")
        )
    )
    models, found = PairModels(pair), {}
    for length in LENGTHS:
        decoder = models.decoder(models.drafter(FixedLength(length)), sampling=Sampling(), eos_ids=frozenset())
        generator = torch.Generator().manual_seed(0)
        counts = [decoder.generate(ids[:start], 64, generator=generator).counts for ids, start in rows]
        found[f"tokens_per_round_{length}"] = sum(count.num_emitted for count in counts) / sum(
            count.num_target for count in counts
        )
    return found


if __name__ == "__main__":
    auto_cli(feature_drafts, as_positional=False)
