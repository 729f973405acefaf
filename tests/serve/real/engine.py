"""The part that runs where vLLM is: `python -m tests.serve.real.engine JOB RESULT`, both JSON.

JOB      {"target", "draft" (null: no speculation), "longest", "num_rows", "settings" (null: no plugin),
          "temperature" (0 where it is missing), "requests": [{"prompt_ids", "max_tokens", "policy"}]}
RESULT   [{"token_ids", "rounds": [[tokens verified, tokens accepted], …]}], in the order of the requests

The engine runs in this process, so that what the plugin is told of each round can be written down.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from serve import KEY

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def main(job_path: str, result_path: str) -> None:
    """Serve the job's requests."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_path).read_text())
    rounds: dict[str, list[list[int]]] = defaultdict(list)
    if job["settings"] is not None:
        _write_down(rounds)
    engine = LLM(**_arguments(job))
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in job["requests"]]
    params = [
        SamplingParams(
            temperature=job.get("temperature", 0.0),
            max_tokens=each["max_tokens"],
            extra_args={KEY: each["policy"]} if job["settings"] else None,
        )
        for each in job["requests"]
    ]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    results = [{"token_ids": list(output.outputs[0].token_ids), "rounds": _of_request(rounds, output.request_id)} for output in outputs]
    Path(result_path).write_text(json.dumps(results))


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Of `LLM`: float32 and eager, so that tokens can be compared one by one."""
    arguments = {"model": job["target"], "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": job["num_rows"]}
    if job["draft"] is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": job["draft"],
            "num_speculative_tokens": job["longest"],
            "draft_sample_method": "probabilistic",
        }
    return arguments | ({} if job["settings"] is None else {"additional_config": {KEY: job["settings"]}})


def _write_down(rounds: dict[str, list[list[int]]]) -> None:
    """Keep what every request's rounds came to."""
    from serve.engine.stops import Stops

    verified = Stops.verified

    def kept(self: Stops, *step: Any) -> None:
        verified(self, *step)
        for row in self._rows:
            rounds[row.request].append([len(row.verified), row.num_accepted])

    Stops.verified = kept  # type: ignore[method-assign]


def _of_request(rounds: dict[str, list[list[int]]], request_id: str) -> list[list[int]]:
    """Without the step that reads the prompt, which verifies nothing; inside the engine an id may have an ending of its own."""
    found = [each for name, each in rounds.items() if name == request_id or name.startswith(f"{request_id}-")]
    return found[0][1:] if found else []


if __name__ == "__main__":
    main(*sys.argv[1:])
