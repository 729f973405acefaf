"""python -m decode hierarchy: does a third model pay? HSDDW's Tables 2 and 4, and Chen's variant, on this trio.

Every arm runs in the real loop, prompt by prompt in turns. Arms with an open length choose it on dev, by the modelled throughput at the
fitted times. Beside the measured speed-ups stand those that the same counts give at other times; and, from dev, where in the plane of
ratios the best hierarchy beats the best plain speculation. Generations are kept (`decode.hierarchies.generations`): a killed run goes on,
and times are those of the run that decoded. With `decode.hierarchies: true` in the YAML, `decode evaluate` shows them beside the replayed
policies.

Some 38 drafters play each dev prompt and 11 each test prompt: about 0.2 s per generation on the embedded trio, 0.35 s on that of
tests/benchmarks/alpaca.yaml, on one quiet core. Four minutes each:

    python -m decode hierarchy --config configs/tiny.yaml --decode.num_dev 16
    python -m decode hierarchy --config tests/benchmarks/alpaca.yaml --decode.num_dev 8 --decode.num_test 36
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import save

from configs.schema import Config
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.splits import Split
from data_gen.prompts.templates import encode
from data_gen.store.manifest import describe_model
from data_gen.store.shards import write_atomic
from decode.evaluation.grids import check_sampling
from decode.hierarchies.contenders import LevelPolicies, arms_of
from decode.hierarchies.gain import gain_frame, gain_plot
from decode.hierarchies.runs import Run, chosen, directory_of, play, times_of
from decode.hierarchies.tables import ablation_table, arms_frame, arms_table, gain_table, verdict
from decode.hierarchies.times import Times
from decode.hierarchies.trio import Trio
from decode.policies.head import HeadPolicy
from decode.traces.command import datasets_of
from heads.model.head import AcceptanceHead
from lm import Pair, load_pair


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
        level_heads: exported heads for two further arms: one trained on (micro, draft), one on (draft, target).
        max_rejection_prob: threshold of both heads, on their calibrated probabilities.
        ratios: t_micro and t_draft in target forwards, for a column at other times than this machine's.
    """
    given = Times(t_micro_s=ratios[0], t_draft_s=ratios[1], t_target_s=1.0)
    directories = {dataset: directory_of(config, dataset) for dataset in datasets_of(config)}
    policies = None if level_heads is None else _level_policies(config, level_heads, max_rejection_prob)
    trio = Trio(lambda: load_pair(config.pair), with_hidden=policies is not None)
    documents, written = {}, []
    for dataset, source in datasets_of(config).items():
        dev, runs = played(config, trio, source, directories[dataset], policies)
        documents[dataset] = report_of(runs, dev, given, directory=directories[dataset])
        written += [str(directories[dataset] / name) for name in ("arms.csv", "gain.csv", "gain.svg")]
    print("\n".join(["wrote", *(f"  {path}" for path in written)]))
    print(json.dumps({"datasets": documents, "written": written}))


def played(config: Config, trio: Trio, source: str, directory: Path, policies: LevelPolicies | None) -> tuple[list[Run], list[Run]]:
    """(every setting of every arm on dev, each arm at its setting on test)."""
    arms = arms_of(trio, policies)
    prompts = {split: prompts_of(config, trio.pair, source, split) for split in ("dev", "test")}
    dev = play(config, trio, arms, prompts["dev"], directory=directory) if prompts["dev"] else []
    times = times_of(dev) if dev else None
    picked = chosen(arms, dev, lambda run: times.speedup(run.counts) if times else 0.0)
    return dev, play(config, trio, picked, prompts["test"], directory=directory)


def report_of(runs: Sequence[Run], dev: Sequence[Run], given: Times, *, directory: Path) -> dict[str, Any]:
    """Print the tables of one dataset and write them; the same as JSON."""
    times = times_of([*dev, *runs])
    frame, gain = arms_frame(runs, times, given), gain_frame(dev or runs, times)
    frame.to_csv(directory / "arms.csv", index=False)
    gain.to_csv(directory / "gain.csv", index=False)
    write_atomic(directory / "gain.svg", gain_plot(gain, directory.name).svg.encode())
    console = Console(width=190)
    title = f"{directory.name}: {len(runs[0].decoded)} test prompts, settings chosen on {len(dev[0].decoded) if dev else 0} dev prompts"
    for table in (ablation_table(frame), arms_table(frame, times, given, title=title), gain_table(gain)):
        console.print(table)
    print(conclusion := verdict(runs, gain, times))
    return {"times": asdict(times), "arms": json.loads(frame.to_json(orient="records")), "verdict": conclusion}


def prompts_of(config: Config, pair: Pair, source: str, split: Split) -> list[list[int]]:
    """Token ids of the split's prompts, those that are too long left out; none where none are asked for on dev."""
    data = replace(config.data, prompts=source, num_dev=config.decode.num_dev, num_test=config.decode.num_test)
    if split == "dev" and not data.num_dev:
        return []
    encoded = (encode(prompt, pair.tokenizer, data.template) for prompt in load_prompts(data, split))
    kept = [ids for ids in encoded if 0 < len(ids) <= data.max_prompt_tokens]
    if not kept:
        raise ValueError(f"no {split} prompt of 1 to {data.max_prompt_tokens} tokens; raise data.max_prompt_tokens or decode.num_{split}")
    return kept


def _level_policies(config: Config, paths: tuple[str, str], max_rejection_prob: float) -> LevelPolicies:
    """Both heads, checked against the models of their level.

    Raises:
        ValueError: a head that was trained for another draft, another target or another `Sampling`.
    """
    heads = [AcceptanceHead.from_pretrained(path) for path in paths]
    for path, head, (drafting, verifying) in zip(paths, heads, (("micro", "draft"), ("draft", "target")), strict=True):
        check_sampling(head, path, vars(config.pair.sampling))
        _check_model(config, path, head.provenance.draft, drafting)
        _check_model(config, path, head.provenance.target, verifying)
    labels = tuple(f"{Path(path).name} r<={max_rejection_prob:g}" for path in paths)
    weights = sha256(b"".join(save(dict(head.state_dict())) for head in heads)).hexdigest()[:8]
    first, second = (HeadPolicy(head, max_rejection_prob=max_rejection_prob, is_calibrated=True) for head in heads)
    return LevelPolicies(micro=first, draft=second, labels=(labels[0], labels[1]), version=weights)


def _check_model(config: Config, path: str, trained: Mapping[str, Any], level: str) -> None:
    """Raise ValueError if the head at `path` says that it was trained with a model other than the pair's `level`."""
    here = describe_model(getattr(config.pair, level), trust_remote_code=config.pair.trust_remote_code)
    if any(trained.get(key) and here[key] and trained[key] != here[key] for key in ("fingerprint", "commit")):
        raise ValueError(
            f"the head at {path} was trained with {trained.get('path')} where pair.{level} is {getattr(config.pair, level).path}; "
            "--level_heads takes one trained on (micro, draft), then one on (draft, target)"
        )
