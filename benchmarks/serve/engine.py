"""The program for the environment with vLLM, one engine: `python -m benchmarks.serve.engine JOB`, a JSON file.

JOB      {"target", "draft" (null: no speculation), "longest", "settings" (null: no plugin), "arguments" (more of
         `LLM`'s)}
batch    {"name", "requests": [{"prompt_ids", "max_tokens", "policy"}], and optionally "temperature" (0), "top_p" (1),
         "concurrency" (all at once), "ignore_eos" (false), "abort_at": a step at which every third request is aborted,
         "is_illegal": drop drafted tokens of probability below 0.5, under policies that read token_prob}
result   {"answers", "counters", "seconds", "cpu_seconds", "rss_mib", "num_lanes", "times"}
answers  {"token_ids" (null: aborted), "rounds": [[tokens verified, tokens accepted], ...]} of each request

Each line of stdin is a batch, and each line of stdout that begins with MARK its result; before the first batch an empty
one says that the engine is ready. "counters" are vLLM's, "num_lanes" the plugin's requests at the end, "times" the
costs that it has measured so far. The engine runs in this process, so that the plugin's rounds can be recorded.
"""

import json
import os
import sys
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from decode.policies.base import AfterDraw
from serve import KEY

COUNTERS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "num_preemptions",
    "prefix_cache_hits",
)
MARK = "result: "
_EVEN = 0.5
_PAGES_PER_MIB = 2**20 // os.sysconf("SC_PAGE_SIZE")


def session(job_path: str) -> None:
    """Serve a batch per line of stdin."""
    engine = RecordedEngine(json.loads(Path(job_path).read_text(encoding="utf-8")))
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(engine.served(json.loads(line))), flush=True)


class RecordedEngine:
    """An `LLM` of vLLM with a record of every request's rounds as the plugin gets them, timed in CPU seconds."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        from serve.engine.stops import Stops

        self._has_settings = job["settings"] is not None
        self._rounds: dict[str, list[list[int]]] = defaultdict(list)
        self._stops: Stops | None = None
        verified = Stops.verified

        def recorded(stops: Stops, sampled: Any, requests: Any, batch: Any, is_discarded: Any) -> None:
            verified(stops, sampled, requests, batch, is_discarded)
            self._stops = stops
            stops.lanes._controller._clock = process_time
            for row, is_prompt in zip(stops._rows, is_discarded.tolist(), strict=False):  # the mask can be longer
                if not is_prompt:
                    self._rounds[row.request].append([len(row.verified), row.num_accepted])

        Stops.verified = recorded  # type: ignore[method-assign]
        self._llm = LLM(**_arguments(job))

    def served(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Serve a batch; returns its result."""
        self._rounds.clear()
        before = self._counters()
        start_s = perf_counter()
        cpu_start_s = process_time()
        with _illegal() if batch.get("is_illegal") else nullcontext():
            finished = self._finished(batch)
        elapsed = {"seconds": perf_counter() - start_s, "cpu_seconds": process_time() - cpu_start_s}
        names = [f"{batch['name']}/{index}" for index in range(len(batch["requests"]))]
        after = self._counters()
        stops = self._stops
        costs = None if stops is None else stops.lanes._controller._costs
        answers = [{"token_ids": finished.get(name), "rounds": self._rounds_of(name)} for name in names]
        counters = {name: after[name] - before[name] for name in COUNTERS}
        return {
            **elapsed,
            "answers": answers,
            "counters": counters,
            "rss_mib": int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) // _PAGES_PER_MIB,
            "num_lanes": 0 if stops is None else len(stops.lanes._alive),
            "times": None if costs is None else {name: curve.seconds for name, curve in costs._asdict().items()},
        }

    def _finished(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        """Tokens of the requests that finished, by request id."""
        engine = self._llm.llm_engine
        finished = dict[str, list[int]]()
        num_steps = 0
        waiting = deque(enumerate(batch["requests"]))
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < batch.get("concurrency", len(batch["requests"])):
                index, request = waiting.popleft()
                engine.add_request(
                    f"{batch['name']}/{index}",
                    {"prompt_token_ids": request["prompt_ids"]},
                    self._params(batch, request),
                )
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            num_steps += 1
            if num_steps == batch.get("abort_at"):
                engine.abort_request([f"{batch['name']}/{index}" for index in range(0, len(batch["requests"]), 3)])
        return finished

    def _rounds_of(self, request_id: str) -> list[list[int]]:
        """Rounds of a request, without the last step of its prompt; the engine may append a suffix to the id."""
        matches = [
            rounds for name, rounds in self._rounds.items() if name == request_id or name.startswith(f"{request_id}-")
        ]
        return matches[0][1:] if matches else []

    def _params(self, batch: dict[str, Any], request: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=batch.get("temperature", 0.0),
            top_p=batch.get("top_p", 1.0),
            max_tokens=request["max_tokens"],
            ignore_eos=batch.get("ignore_eos", False),
            extra_args={KEY: request["policy"]} if self._has_settings else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _counters(self) -> dict[str, int]:
        counts = dict.fromkeys(COUNTERS, 0)
        for metric in self._llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if name in counts:
                counts[name] += metric.value
        return counts


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM`: float32 and eager, so that tokens are reproducible."""
    arguments = {
        "model": job["target"],
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "disable_log_stats": False,
    }
    if job["draft"] is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": job["draft"],
            "num_speculative_tokens": job["longest"],
            "draft_sample_method": "probabilistic",
        }
    return (
        arguments
        | job["arguments"]
        | ({} if job["settings"] is None else {"additional_config": {KEY: job["settings"]}})
    )


@contextmanager
def _illegal() -> Any:
    """Violate law 4.3, as no policy can: read a drafted token, stop, and drop it."""
    from serve.lanes import Lane

    take = Lane.take

    def dropped(lane: Lane, token: int, drawn: AfterDraw) -> None:
        take(lane, token, drawn)
        if lane.tokens and drawn.token_prob < _EVEN:
            lane.run.stop("policy")
            lane.tokens.pop()
            lane.run.steps.pop()

    Lane.take = dropped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lane.take = take  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    session(*sys.argv[1:])
