"""python -m decode trace: record once, replay everything (law 4.10)."""

from configs.schema import Config
from decode.experiment import Experiment
from decode.traces.recording import recording_of


def trace(config: Config) -> None:
    """Record, or resume recording, the trace that evaluate, tune, replay and tables read."""
    recording = recording_of(Experiment(config))
    recording.complete()
    for dataset in recording.shards:
        for split, part in recording.load(dataset)._asdict().items():
            print(
                f"{recording.directory / dataset}: {split} {len(part.rows):,} responses, {part.num_positions:,} tokens, "
                f"{part.is_rejected.mean():.3f} rejected, {len(part.token) - part.num_positions:,} tokens in branches"
            )
