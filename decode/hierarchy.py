"""python -m decode hierarchy: does a third model pay? HSDDW's Tables 2 and 4, and Chen's variant, on this trio.

Every arm runs in the real loop, prompt by prompt in turns, so that a machine that slows down slows all of them. Arms with an open length
choose it on dev, by the modelled throughput at the fitted times. Beside the measured speed-ups stand those that the same counts give at
other ratios of the three times; and, from dev, where in the plane of ratios the best hierarchy beats the best plain speculation.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from configs.schema import Config
from data_gen.prompts import Split, load_prompts
from data_gen.templates import encode
from decode.counts import Counts
from decode.hierarchy_arms import Arm, arms_of
from decode.hierarchy_costs import Times, fit_times, swapped
from decode.hierarchy_tables import ablation_table, arms_frame, arms_table, gain_frame, gain_table, verdict
from decode.loop import Generation, SpeculativeDecoder
from decode.policies.head import HeadPolicy
from heads.head import AcceptanceHead
from lm import CachedModel, Pair, Sampling, load_pair


@dataclass(frozen=True)
class Run:
    """One arm in one setting over the prompts."""

    arm: Arm
    label: str
    generations: tuple[Generation, ...]

    @property
    def is_micro(self) -> bool:
        """Whether the micro alone drafted."""
        return self.arm.name == "sd with the micro"

    @property
    def counts(self) -> Counts:
        """Totals, each forward booked to the model that ran it."""
        total = reduce(add, (generation.counts for generation in self.generations))
        return swapped(total) if self.is_micro else total

    @property
    def seconds(self) -> list[float]:
        """Wall clock of each generation."""
        return [sum(played.draft_s + played.target_s for played in generation.rounds) for generation in self.generations]


def hierarchy(
    config: Config,
    *,
    level_heads: tuple[str, str] | None = None,
    max_rejection_prob: float = 0.5,
    ratios: tuple[float, float] = (0.02, 0.2),
) -> None:
    """HSDDW's Tables 2 and 4 for this trio, Chen's variant beside them, and where a third level pays.

    Args:
        config: pair.micro is needed; decode.num_dev and num_test say how many prompts.
        level_heads: exported heads for a further arm: one trained on (micro, draft), one on (draft, target).
        max_rejection_prob: threshold of both heads, on their calibrated probabilities.
        ratios: t_micro and t_draft in target forwards, for a column at other times than this machine's.
    """
    pair = load_pair(config.pair)
    if pair.micro is None:
        raise ValueError("pair.micro is not set; a hierarchy needs a third model, smaller than the draft")
    arms = _arms(pair, level_heads, max_rejection_prob)
    dev = _run(config, pair, arms, "dev") if config.decode.num_dev else []
    chosen = _chosen(arms, dev)
    runs = _run(config, pair, chosen, "test")
    times = _times(runs)
    given = Times(t_micro_s=ratios[0], t_draft_s=ratios[1], t_target_s=1.0)
    frame = arms_frame(runs, times, given)
    gain = gain_frame(dev or runs)
    directory = Path(config.decode.dir) / "hierarchy"
    directory.mkdir(parents=True, exist_ok=True)
    frame.to_csv(directory / "arms.csv", index=False)
    gain.to_csv(directory / "gain.csv", index=False)
    console = Console(width=170)
    for table in (ablation_table(frame), arms_table(frame, times, given, num_prompts=len(runs[0].generations)), gain_table(gain)):
        console.print(table)
    print(conclusion := verdict(frame, gain, times))
    written = [str(directory / name) for name in ("arms.csv", "gain.csv")]
    print("\n".join(["wrote", *(f"  {path}" for path in written)]))
    records = {"arms": json.loads(frame.to_json(orient="records")), "gain": json.loads(gain.to_json(orient="records"))}
    print(json.dumps({"times": asdict(times), **records, "verdict": conclusion, "written": written}))


def _arms(pair: Pair, heads: tuple[str, str] | None, max_rejection_prob: float) -> list[Arm]:
    """The arms, on models that are loaded once."""
    assert pair.micro is not None
    policies = None
    if heads is not None:
        first, second = (
            HeadPolicy(AcceptanceHead.from_pretrained(path), max_rejection_prob=max_rejection_prob, is_calibrated=True) for path in heads
        )
        policies = first, second
    keep = policies is not None
    micro, draft = (CachedModel(model, vocab_size=pair.vocab_size, with_hidden=keep) for model in (pair.micro, pair.draft))
    return arms_of(micro, draft, policies)


def _prompts(config: Config, pair: Pair, split: Split) -> list[list[int]]:
    """Token ids of the split's prompts, those that are too long left out."""
    prompts = load_prompts(replace(config.data, num_dev=config.decode.num_dev, num_test=config.decode.num_test), split)
    encoded = (encode(prompt, pair.tokenizer, config.data.template) for prompt in prompts)
    kept = [ids for ids in encoded if 0 < len(ids) <= config.data.max_prompt_tokens]
    if not kept:
        raise ValueError(
            f"no {split} prompt of 1 to {config.data.max_prompt_tokens} tokens; raise data.max_prompt_tokens or decode.num_{split}"
        )
    return kept


def _run(config: Config, pair: Pair, arms: Sequence[Arm], split: Split) -> list[Run]:
    """Every setting of every arm over the split's prompts, in turns, after a short warm-up."""
    target = CachedModel(pair.target, vocab_size=pair.vocab_size)
    pairs = [(arm, setting) for arm in arms for setting in arm.settings]
    decoders = [
        SpeculativeDecoder(
            target,
            setting.build(),
            sampling=Sampling(**vars(config.pair.sampling)),
            max_draft_length=config.decode.max_draft_length,
            eos_ids=pair.eos_ids,
        )
        for _, setting in pairs
    ]
    prompts = _prompts(config, pair, split)
    played: list[list[Generation]] = [[] for _ in pairs]
    for decoder in decoders:
        decoder.generate(prompts[0], min(8, config.decode.max_new_tokens))
    for index, prompt in enumerate(tqdm(prompts, desc=f"{split}: {len(pairs)} drafters, prompts", leave=False, disable=None)):
        for decoder, generations in zip(decoders, played, strict=True):
            generator = torch.Generator().manual_seed(config.decode.seed + index)
            generations.append(decoder.generate(prompt, config.decode.max_new_tokens, generator=generator))
    return [Run(arm, setting.label, tuple(each)) for (arm, setting), each in zip(pairs, played, strict=True)]


def _times(runs: Sequence[Run]) -> Times:
    generations = [generation for run in runs for generation in run.generations]
    return fit_times(generations, is_micro=[run.is_micro for run in runs for _ in run.generations])


def _chosen(arms: Sequence[Arm], dev: Sequence[Run]) -> list[Arm]:
    """Each arm with the setting that is fastest on dev at the times fitted there; with the first where there is no dev."""
    if not dev:
        return [replace(arm, settings=arm.settings[:1]) for arm in arms]
    times = _times(dev)
    best = {}
    for run in sorted(dev, key=lambda run: times.speedup(run.counts)):
        best[run.arm.name] = run.label
    return [replace(arm, settings=tuple(s for s in arm.settings if s.label == best[arm.name])) for arm in arms]
