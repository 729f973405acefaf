"""python -m evaluation trace: record once, replay everything (law 4.10)."""

from configs.schema import Config
from decode.experiment import Experiment
from evaluation.traces.recording import trace_folder


def trace(config: Config) -> None:
    """Record, or resume recording, the trace that evaluate, tune, replay and tables read."""
    folder = trace_folder(Experiment(config))
    folder.complete()
    for dataset in folder.shards:
        for split, part in vars(folder.load(dataset)).items():
            print(
                f"{folder.directory / dataset}: {split} {len(part.rows):,} responses, {part.num_positions:,} tokens, "
                f"{1 - part.is_first_accepted.mean():.3f} rejected, {len(part.token) - part.num_positions:,} tokens "
                "in branches"
            )
    print("next: acceptance-heads evaluate --config …, which replays every policy on it")
