"""Commands that plan, make and inspect data and heads: their flags and help. `configs.measuring` has the others.

Each takes the path of a YAML instead of a Config.
"""

from typing import Literal

from configs.running import Experiment, runs


@runs("evaluation.costs.init:init")
def init(
    *,
    target: str,
    draft: str,
    prompts: str,
    column: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    out: str = "experiment.yaml",
    allow_large_draft: bool = False,
    force: bool = False,
) -> object:
    """Write the YAML of a new experiment, with its estimated time and size in comments.

    Args:
        target: the large model, a directory or a hub id.
        draft: the small model, with the same tokenizer.
        prompts: a file (JSONL, JSON, CSV, TSV, Parquet), a known set, or org/name on the hub; 10 different prompts.
        column: the field that holds the prompt, if its name is not recognised.
        temperature: of the sampling that heads are trained for; 0 is greedy. null, as for top_p and top_k: as in the
            target's generation_config.json, else 1.
        top_p: nucleus of the sampling; 1: all tokens.
        top_k: sample from the k most probable tokens; 0: from all.
        out: output file; data and heads go into folders of its name.
        allow_large_draft: accept a draft that is not smaller than the target.
        force: replace an existing file.
    """


@runs("evaluation.costs.init:plan")
def plan(config: Experiment, *, sample: int = 32) -> object:
    """Estimate rows, tokens, forward passes, disk space and time of a run before running it.

    Args:
        config: the experiment.
        sample: number of prompts to make and time, at most half a minute; 0 loads no model.
    """


@runs("data_gen.pipeline.command:make")
def make_data(
    config: Experiment,
    *,
    retry_errors: bool = False,
    stages: Literal["all", "respond", "draft", "target"] = "all",
    rank: int | None = None,
    world_size: int | None = None,
) -> object:
    """Make or resume the data: rows, labels, manifest, errors.jsonl.

    Args:
        config: the experiment.
        retry_errors: try the prompts that ended in an error again; shards without errors stay as they are.
        stages: with data.mode sequential, run only this stage, which needs one model.
        rank: this process makes shards rank, rank + world_size, …; by default taken from torchrun or srun.
        world_size: number of processes that make the data together.
    """


@runs("data_gen.stats:stats")
def stats(config: Experiment, *, split: str = "train", plots: bool = True) -> object:
    """Print a summary of one split, and draw SVIP's plots of it.

    Args:
        split: train, dev or test.
        plots: also draw DIR/stats/SPLIT.png.
    """


@runs("heads.training.command:train")
def train(config: Experiment, *, resume: bool = True) -> object:
    """Train every head of a config, measure them on dev and test, and write tables, plots and metrics.

    Args:
        config: the experiment, or the path of its YAML; the run is written to heads.dir.
        resume: continue from the last checkpoint in heads.dir, if there is one of the same config; false: start over.
    """


@runs("heads.command:export")
def export(
    config: Experiment,
    *,
    head: str = "all",
    metric: str = "calibrated_kl",
    out: str | None = None,
    checkpoint: str | None = None,
    force: bool = False,
    format: Literal["head", "dspark", "sts"] = "head",
) -> object:
    """Write the heads of a checkpoint, a DSpark draft with a head in it, or its temperatures.

    Args:
        config: the experiment; heads.dir holds the checkpoint.
        head: name of one head, `best` (by the metric on dev, one for each kind of inputs) or `all`.
        metric: metric that selects `best`: calibrated_kl, raw_kl, auroc, calibrated_brier, …
        out: output folder, or file of format sts; null: exported, dspark or sts.json in heads.dir.
        checkpoint: a Lightning checkpoint; null: heads.dir/last.ckpt.
        force: also export heads that do not beat a logistic of logit q(y) (prefix heads: of logit max q) on dev.
        format: head: one directory per head. dspark: a copy of pair.draft with a linear prefix head as its confidence
            head. sts: temperatures fitted on dev, for SGLang's --speculative-dspark-confidence-sts-path.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: a checkpoint of another run, no such head or metric, heads of an inner layer, worse than their
            signal, or not linear.
    """


@runs("heads.command:import_")
def import_head(
    config: Experiment,
    *,
    source: str,
    out: str,
    reject_weight: float | None = None,
    mixing_ratio: float | None = 0.15,
) -> object:
    """Convert a released SpecDec++ head or a DSpark draft's confidence head to the format of `export`.

    Args:
        config: the experiment; its pair names the head's draft and target, and the Sampling to use the head with.
        source: a directory with config.json and model.safetensors, or a hub id; or a DSpark draft for pair.target.
        out: output directory of the head.
        reject_weight: w_rej / w_acc that the head was trained with; for a SpecDec++ head only.
        mixing_ratio: mixing ratio of the training data.
    """


@runs("heads.command:push")
def push(*, path: str, repo: str, private: bool = False, license: str | None = None) -> object:
    """Upload an exported head and its model card to the hub, or data and a dataset card.

    Args:
        path: directory of the head, or data.dir, of which rows, labels and manifest are uploaded.
        repo: owner/name of the repository; created if it does not exist. For data also a folder: /path or ./path.
        private: create a new repository as private.
        license: identifier of the license, such as apache-2.0; null: that of the head's config.json, else of the
            draft's model card (data: the target's).

    Raises:
        ValueError: the hub cannot be reached, or refuses the upload; or a shard of the data is damaged.
    """


@runs("heads.command:inspect")
def inspect(*, path: str, json: bool = False) -> object:
    """Print a head's shape, metrics, recommended threshold and training data.

    Args:
        path: directory of the head, or its hub id.
        json: print every fact, with hashes and tensor shapes, as one JSON document instead.
    """


@runs("decode.generate.command:generate")
def generate(
    config: Experiment,
    *,
    prompt: str,
    policy: str | None = None,
    tree: Literal["eagle2", "cape"] | None = None,
    max_new_tokens: int | None = None,
    json: bool = False,
    rejected: bool = True,
    svg: str | None = None,
) -> object:
    """Generate from one prompt, with accepted, rejected, residual and bonus tokens in colour.

    Args:
        config: the experiment; `data.template` wraps the prompt, `decode.seed` seeds the draws.
        prompt: the user's message.
        policy: when to stop drafting: a name (a wrong one prints them all), auto, head:PATH or a custom module:Class,
            with parameters: entropy:max_sqrt_entropy=0.4. null: the verdict of evaluate or tune
            (decode.dir/verdict.json), else the best head of heads.dir, else cumulative_token_prob.
        tree: draft trees of EAGLE-2 or CaPE; policies then count levels. null: chains.
        max_new_tokens: null: decode.max_new_tokens.
        json: print one JSON document with every round instead of the coloured text.
        rejected: show rejected drafts too.
        svg: also write the coloured text to this file as a picture.
    """


@runs("data_gen.pipeline.inspect:check")
def check(config: Experiment) -> object:
    """Compare every shard in data.dir with its checksum and list those that are damaged; nothing is changed."""


@runs("data_gen.official:import_")
def import_data(config: Experiment, *, file: str, split: str = "train") -> object:
    """Import the official SpecDec++ JSON as one split of rows and labels. Run it once per split, then train.

    Args:
        file: the JSON, such as data/alpaca_data/train.json of the official code.
        split: train, dev or test. Training needs train and dev, and test unless data.num_test is 0.
    """


@runs("data_gen.pipeline.inspect:responses")
def responses(config: Experiment, *, out: str) -> object:
    """Write the responses in data.dir as JSONL for `data.source: file`; an existing file is extended.

    Args:
        config: the experiment that made the rows.
        out: the path of the JSONL file.

    Raises:
        ValueError: `out` holds another response to a row's prompt, or a shard is damaged.
    """
