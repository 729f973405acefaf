"""An engine that takes batches one by one, so that several can take turns: `python -m benchmarks.serve.session JOB`.

Each line of the input is a batch, and each line of the output that begins with MARK its result, both as
`benchmarks.serve.engine` has them; beside them "times", the lines of `serve.pace` that the engine has measured so far,
in seconds of its process. The first such line says that the engine is ready.
"""

import json
import sys
from pathlib import Path
from time import process_time
from typing import Any

MARK = "result: "


def main(job_path: str) -> None:
    """Serve until the input ends."""
    from benchmarks.serve.engine import Engine, Written

    written = Written(process_time)
    engine = Engine(json.loads(Path(job_path).read_text()), written)
    _say({})
    for line in sys.stdin:
        result = engine.served(json.loads(line))
        costs = None if written.stops is None else written.stops._lanes._pace._costs
        _say(
            result
            | {"times": None if costs is None else {name: curve.seconds for name, curve in costs._asdict().items()}}
        )


def _say(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
