"""Commands that replay, time and compare policies: their flags and help. `configs.making` has the others."""

from collections.abc import Sequence
from typing import Literal

from configs.flag_types import EngineName, Milliseconds, RaceRules, Sizes
from configs.running import Experiment, runs


@runs("evaluation.report.evaluate:evaluate")
def evaluate(
    config: Experiment,
    *,
    batch: Sizes | None = None,
    clock: int = 0,
    repeats: int = 3,
    transfer_from: str | None = None,
    against: str | None = None,
    all: bool = False,
    json: bool = False,
) -> object:
    """Replay every policy and threshold on the trace (recorded first, if need be); table, CSV, Parquet, report.

    Args:
        config: of the experiment.
        batch: also replay every policy in continuous batches of these sizes: 1,4,16,64.
        clock: number of test prompts to generate for real and time, next to the prediction; every family runs at its
            best setting, in turns; 0: none.
        repeats: number of timed generations per prompt; the median counts.
        transfer_from: decode.dir of an evaluation under another sampling; the settings chosen on its first dataset are
            also judged on every dataset of this one.
        against: decode.dir of another evaluation of the same trace, such as of heads that were trained before; every
            policy is compared with its own there, paired by test prompt, at the times of this evaluation.
        all: also print one row per policy.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("papers.confidence.command:judge")
def judge(config: Experiment, *, json: bool = False) -> object:
    """Measure the calibration of a DSpark draft's confidence head on your prompts.

    Args:
        config: of the experiment, whose pair.draft is a DSpark draft and whose data exists. Prefix heads of
            decode.heads, or of heads.dir/exported, are measured too.
        json: print everything as one JSON document on stdout; tables then go to stderr.

    Raises:
        FileNotFoundError: no data.
        ValueError: no draft with a confidence head, or no test prompts.
    """


@runs("evaluation.report.tune:tune")
def tune(
    config: Experiment, *, write: bool | None = None, ratio: float | None = None, all: bool = False, json: bool = False
) -> object:
    """Choose each head's threshold for this hardware by replay; write it into the head's config.json.

    Args:
        config: the experiment.
        write: put `recommended` into every head's config.json, and the verdict into decode.dir and the model
            cards; null: yes, unless a `ratio` is given, whose hardware is not this machine.
        ratio: t_target / t_draft of other hardware, instead of the measured times.
        all: print a row for every head, not only for the fastest on dev.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("evaluation.flags.command:flags")
def flags(
    config: Experiment,
    *,
    for_: EngineName,
    t_draft_ms: Milliseconds | None = None,
    t_target_ms: Milliseconds | None = None,
    log: str | None = None,
    batch: Sizes | None = None,
    from_: str | None = None,
    block: bool = False,
    drawn: bool = False,
    json: bool = False,
) -> object:
    """Find an engine's best settings by replaying its rule on a trace, and print the line to paste.

    Args:
        config: the experiment; its trace is recorded first if it does not exist.
        for_: the engine (--for).
        t_draft_ms: milliseconds of a draft forward in that engine, with t_target_ms, instead of measured times; or by
            sequences in a batch, 1:4,8:5.
        t_target_ms: milliseconds of a target forward of one token (what a token takes without speculation); or by
            tokens that it verifies, 1:30,5:33,17:50.
        log: instead of the times, logs of a llama.cpp server with this draft at -lv 4 and without one (more improve the
            fit): spec.log,alone.log.
        batch: sizes of batches to choose a number of tokens for as well, for engines with one per size: 1,4,16.
        from_: the engine's own counters of accepted tokens by position, instead of a trace, for any kind of draft
            (written --from): files, or the shares themselves, 0.84,0.60,0.39.
        block: with --from, a draft is one forward however many tokens it has (DFlash, DSpark, P-EAGLE).
        drawn: also record the trace of drafts that our loop draws, if the engine drafts otherwise, to compare our
            policies on them; a trace that is complete is always used.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("evaluation.report.replay:replay_policy")
def replay(config: Experiment, *, policy: Sequence[str], ratio: float | None = None, json: bool = False) -> object:
    """Replay policies over the recorded trace: counts, rates, tokens/s, gains over the first one.

    Args:
        config: of the experiment whose trace is replayed (`python -m evaluation trace` records it).
        policy: a name (a wrong one prints them all), auto, head:PATH or your own as my_module:Unsure, with parameters:
            entropy:max_sqrt_entropy=0.4, my_module:Unsure:floor=0.2. Several (--policy a --policy b) are compared with
            the first one on the same test prompts, in pairs.
        ratio: t_target / t_draft of other hardware; null: the given or kept times, else the first of decode.ratios.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("evaluation.costs.machine:costs")
def costs(config: Experiment, *, again: bool = False, json: bool = False) -> object:
    """Measure forward times on this machine, and what each kind of stop adds.

    Args:
        config: the experiment; decode.t_draft_s and decode.t_target_s are ignored.
        again: measure once more, and replace the times in DIR/costs.jsonl that evaluations use.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("evaluation.bench.command:bench")
def bench(
    config: Experiment,
    *,
    batch: Sizes | None = None,
    samplings: tuple[Literal["greedy", "sampled", "nucleus", "own"], ...] = ("greedy", "sampled", "nucleus"),
    policies: tuple[str, ...] = (),
    families: tuple[str, ...] = (),
    constants: tuple[int, ...] = (),
    race: RaceRules = RaceRules(),  # noqa: B008  # frozen
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10),
    num_prompts: int = 16,
    num_tokens: int = 64,
    json: bool = False,
) -> object:
    """Time real generations, in turns with transformers' assisted generation.

    Args:
        config: the experiment: pair, heads and times.
        batch: sizes of continuous batches in which `lengths` and `policies` are measured; null: one sequence.
        samplings: any of greedy, sampled (temperature 1), nucleus (0.7, top-p 0.9), own (the config's).
        policies: specs that run instead of each family's best, such as head:PATH,max_rejection_prob=0.4; at least one
            is a fixed length.
        families: the families that run beside the best fixed length; empty: all.
        constants: lengths of transformers' constant schedule; empty: our best fixed one and half of it.
        race: --race.datasets, .run, .ignore_eos, .assistant (see --help.all).
        lengths: for `batch`, the fixed draft lengths.
        num_prompts: generations per arm.
        num_tokens: tokens per generation; EOS is ignored unless `race.ignore_eos` is false.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("papers.hierarchies.command:hierarchy")
def hierarchy(
    config: Experiment,
    *,
    level_heads: tuple[str, str] | None = None,
    max_rejection_prob: float = 0.5,
    json: bool = False,
) -> object:
    """Compare HSDDW's and Chen's variants with plain speculation: where does a third level pay?

    Args:
        config: pair.micro is needed; decode.num_dev and num_test say how many prompts.
        level_heads: exported heads for two further competitors: one trained on (micro, draft), one on (draft, target).
        max_rejection_prob: threshold of both heads, on their calibrated probabilities.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("papers.command:paper_tables")
def tables(
    config: Experiment,
    *,
    paper: Literal["specdec++", "svip", "svip-trees", "hsddw"],
    stops: tuple[str, ...] = ("entropy",),
    eagle: str | None = None,
    repeats: int = 3,
    json: bool = False,
) -> object:
    """Print a paper's tables for this pair.

    Args:
        config: the experiment.
        paper: specdec++, svip, svip-trees, or hsddw (which decodes with three models).
        stops: for svip-trees, policies such as entropy or head:PATH. What a spec leaves open is chosen on dev; one with
            its threshold, as entropy:max_sqrt_entropy=0.5 or head:PATH,max_rejection_prob=0.7, is taken as it is.
        eagle: for hsddw, the directory of an EAGLE draft for the pair's target, a row of Table 1.
        repeats: for svip-trees and hsddw, how often every drafter decodes a test prompt; the median counts.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("papers.theory.command:theory")
def theory(
    config: Experiment,
    *,
    rates: tuple[float, float, float] = (0.6, 0.8, 0.7),
    costs: tuple[float, float] = (0.02, 0.2),
    json: bool = False,
) -> object:
    """Print the closed forms at these rates and costs; write them as CSV, and Chen's Figure 1.

    Args:
        config: decode.dir is where tables and plot go.
        rates: acceptance rates of small under target, of medium (draft) under target, of small (micro) under draft.
        costs: one forward of the small and of the medium model, in target forwards.
        json: print everything as one JSON document on stdout; tables and sentences then go to stderr.
    """


@runs("evaluation.traces.recording:trace")
def trace(config: Experiment) -> object:
    """Record, or resume recording, the trace that evaluate, tune, replay and tables read."""
