"""The cases of the proof: what vLLM is to serve, in which mode, and what has to come of it.

policies    four rows, every policy: tokens are plain vLLM's, rounds our loop's, counters what the plugin was told;
            `auto`; aborts while
            drafts wait for verification
laws        the target's law at temperature 1, at 0.7 with top-p 0.9, and at 2; there also that a policy which drops
            tokens is caught
tight       prompts that are read in pieces, that share a prefix which is cached, and a cache so small that requests are
            preempted
many        64 requests at once; a thousand, after which the process holds no more memory than after the first 250
bfloat16    tokens may differ from plain vLLM's where two are about as likely; acceptance stays what it is in float32
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.serve.laws import drafted_of, law_of
from benchmarks.serve.loop import TRIO, decoded, requests_of
from lm import Pair, Sampling

LONGEST, NUM_REQUESTS, NUM_COPIES = 12, 36, 4
FALSE_ALARM, MOST_Z, CAUGHT_Z = 1e-4, 4.0, 6.0
MOST_GROWTH_MIB = 16
TIGHT = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
}
POLICIES = (
    "fixed_length:k=0",
    "fixed_length:k=5",
    "heuristic:k=3",
    "entropy:max_sqrt_entropy=0.4",
    "cumulative_token_prob:min_token_prob=0.3",
    "self_verify:initial=1.0",
    "ada_edl:initial_lambda=0.4",
    "learned_prob:max_rejection_prob=0.5",
)
AUTO = "head:tuned,max_rejection_prob=auto"
Results = list[dict[str, Any]]
"""Answers of each engine, by batch."""


class Case(NamedTuple):
    """One case: what the engines are asked, and how their answers are judged."""

    jobs: list[dict[str, Any]]
    """The engines' jobs."""
    judged: Callable[[Results], dict[str, Any]]
    """Judge of the answers; its result has "ok"."""


class Cases:
    """Every case, on one pair with these heads."""

    def __init__(self, pair: Pair, heads: dict[str, str]) -> None:
        self._pair, self._heads = pair, heads
        self._specs = [*POLICIES, *(f"head:{name},max_rejection_prob=0.5" for name in heads if name != "tuned")]

    def policies(self) -> Case:
        requests, auto = self._requests(), requests_of(self._pair, [AUTO, AUTO, "fixed_length:k=3"], NUM_REQUESTS)
        rows = {"max_num_seqs": 4}
        batches = [_batch("all", requests), _batch("auto", auto), _batch("aborted", requests, abort_at=5)]

        def judged(results: Results) -> dict[str, Any]:
            (plain, found), loop = results, self._loop(requests)
            report = (
                _equality(plain["all"], found["all"]) | _counted(found["all"]) | _rounds(requests, found["all"], loop)
            )
            of_auto, aborted = _equality(plain["all"], found["auto"]), _equality(plain["all"], found["aborted"])
            of_auto["draft_lengths"] = _lengths(found["auto"]["answers"], lambda place: auto[place]["policy"] == AUTO)
            aborted["num_lanes"] = found["aborted"]["num_lanes"]
            is_right = report["equal_tokens"] == report["equal_rounds"] == of_auto["equal_tokens"] == NUM_REQUESTS
            survive = (
                aborted["equal_tokens"] == NUM_REQUESTS - aborted["aborted"]
                and aborted["aborted"] > 0
                and aborted["num_lanes"] <= 4
            )
            return {
                "ok": is_right and report["counters_agree"] and survive,
                **report,
                "auto": of_auto,
                "aborted": aborted,
            }

        return Case([self._plain(rows, batches[:1]), self._stopped(rows, batches)], judged)

    def laws(self) -> Case:
        requests = self._requests(NUM_REQUESTS * NUM_COPIES)
        requests = [
            request | {"policy": AUTO if place % 13 == 0 else request["policy"]}
            for place, request in enumerate(requests)
        ]
        dropping = [request | {"policy": "max_prob:min_max_prob=0.0"} for request in requests]
        hot = Sampling(2.0)  # at 1 the trio's target is so sure of most tokens that dropping others changes little
        batches = [
            _batch("temperature_1", requests, temperature=1.0),
            _batch("nucleus", requests, temperature=0.7, top_p=0.9),
            _batch("hot", dropping, temperature=hot.temperature),
            _batch("illegal", dropping, temperature=hot.temperature, is_illegal=True),
        ]

        def judged(results: Results) -> dict[str, Any]:
            laws = {"temperature_1": Sampling(), "nucleus": Sampling(0.7, top_p=0.9), "hot": hot, "illegal": hot}
            answers = {name: results[0][name]["answers"] for name in laws}
            report = {
                name: law_of(self._pair, requests, answers[name], law) | drafted_of(answers[name])
                for name, law in laws.items()
            }
            is_right = all(
                report[name]["ks_p"] > FALSE_ALARM and abs(report[name]["z"]) < MOST_Z
                for name in laws
                if name != "illegal"
            )
            return {"ok": is_right and report["illegal"]["z"] > CAUGHT_Z, **report}

        return Case([self._stopped({"max_num_seqs": 16}, batches)], judged)

    def tight(self) -> Case:
        requests = self._requests(shared=True)
        batches = [_batch("all", requests)]

        def judged(results: Results) -> dict[str, Any]:
            plain, found = results[0]["all"], results[1]["all"]
            report = _equality(plain, found) | _counted(found) | _rounds(requests, found, self._loop(requests))
            sizes = {
                "longest_prompt": max(len(request["prompt_ids"]) for request in requests),
                "tokens_per_step": TIGHT["max_num_batched_tokens"],
            }
            preempted, hits = (found["counters"][name] for name in ("num_preemptions", "prefix_cache_hits"))
            is_tried = preempted > 0 and hits > 0 and sizes["longest_prompt"] > sizes["tokens_per_step"]
            is_right = report["equal_tokens"] == NUM_REQUESTS and report["counters_agree"]
            return {"ok": is_tried and is_right, **report, **sizes, "preemptions": preempted, "prefix_cache_hits": hits}

        return Case([self._plain(TIGHT, batches), self._stopped(TIGHT, batches)], judged)

    def many(self) -> Case:
        requests = requests_of(self._pair, [*self._specs, AUTO], 64)
        short = [request | {"max_tokens": 12} for request in requests_of(self._pair, [*self._specs, AUTO], 250)]
        rows, thousand = {"max_num_seqs": 64}, [f"thousand_{part}" for part in range(4)]
        batches = [_batch("at_once", requests), *(_batch(name, short) for name in thousand)]

        def judged(results: Results) -> dict[str, Any]:
            plain, found = results
            report = _equality(plain["at_once"], found["at_once"])
            parts = [_equality(plain[thousand[0]], found[name])["equal_tokens"] for name in thousand]
            held = [found[name]["rss_mib"] for name in thousand]
            is_flat = held[-1] - held[0] <= MOST_GROWTH_MIB and found[thousand[-1]]["num_lanes"] <= 64
            is_right = report["equal_tokens"] == 64 and parts == [250] * 4
            return {
                "ok": is_flat and is_right,
                "at_once": report,
                "thousand": {"equal_tokens": sum(parts), "rss_mib": held},
            }

        return Case([self._plain(rows, batches[:2]), self._stopped(rows, batches)], judged)

    def bfloat16(self) -> Case:
        requests, arguments = self._requests(), {"max_num_seqs": 8, "dtype": "bfloat16"}
        batches = [_batch("all", requests)]

        def judged(results: Results) -> dict[str, Any]:
            plain, found = results[0]["all"], results[1]["all"]
            report = _equality(plain, found) | _counted(found) | drafted_of(found["answers"])
            report["float32_acceptance_length"] = drafted_of(self._loop(requests))["acceptance_length"]
            is_near = abs(report["acceptance_length"] / report["float32_acceptance_length"] - 1) < 0.1
            return {"ok": is_near and report["counters_agree"] and report["equal_share"] > 0.5, **report}

        return Case([self._plain(arguments, batches), self._stopped(arguments, batches)], judged)

    def _requests(self, count: int = NUM_REQUESTS, *, shared: bool = False) -> list[dict[str, Any]]:
        return requests_of(self._pair, self._specs, count, shared=shared)

    def _loop(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [decoded(self._pair, self._heads, one, LONGEST) for one in requests]

    def _plain(self, arguments: dict[str, Any], batches: list[dict[str, Any]]) -> dict[str, Any]:
        """The answers of vLLM in this mode, without speculation."""
        return self._stopped(arguments, batches) | {"draft": None, "settings": None}

    def _stopped(self, arguments: dict[str, Any], batches: list[dict[str, Any]]) -> dict[str, Any]:
        models = {role: str(TRIO / role) for role in ("target", "draft")}
        settings = {"policy": "fixed_length:k=2", "heads": self._heads}
        return {**models, "longest": LONGEST, "settings": settings, "arguments": arguments, "batches": batches}


def _batch(name: str, requests: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    return {"name": name, "requests": requests, **how}


def _equality(plain: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Requests whose tokens are the same, and the share of tokens before the first that differs."""
    pairs = [
        (one["token_ids"], other["token_ids"]) for one, other in zip(plain["answers"], found["answers"], strict=True)
    ]
    ended = [(one, other) for one, other in pairs if other is not None]
    same = sum(
        next((at for at, (a, b) in enumerate(zip(*each, strict=False)) if a != b), len(each[0])) for each in ended
    )
    return {
        "requests": len(pairs),
        "aborted": len(pairs) - len(ended),
        "equal_tokens": sum(one == other for one, other in ended),
        "equal_share": same / sum(len(one) for one, _ in ended),
    }


def _counted(found: dict[str, Any]) -> dict[str, Any]:
    """Whether vLLM's own counters say what the plugin was told."""
    rounds = [round_ for answer in found["answers"] for round_ in answer["rounds"]]
    told = [
        sum(drafted > 0 for drafted, _ in rounds),
        sum(drafted for drafted, _ in rounds),
        sum(accepted for _, accepted in rounds),
    ]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    counted = [found["counters"][f"spec_decode_{name}"] for name in names]
    return {"counters_agree": told == counted, "counters": dict(zip(names, counted, strict=True))}


def _rounds(requests: list[dict[str, Any]], found: dict[str, Any], loop: list[dict[str, Any]]) -> dict[str, Any]:
    """The requests whose rounds are the loop's, and the policies of those whose rounds are not."""
    pairs = list(zip(found["answers"], loop, strict=True))
    differing = [
        request["policy"]
        for request, (one, other) in zip(requests, pairs, strict=True)
        if one["rounds"] != other["rounds"]
    ]
    return {
        "equal_rounds": len(pairs) - len(differing),
        "rounds": sum(len(one["rounds"]) for one, _ in pairs),
        "rounds_over_the_loops": sum(len(one["rounds"]) for one, _ in pairs)
        / sum(len(other["rounds"]) for _, other in pairs),
        "differing": sorted(set(differing)),
    }


def _lengths(answers: list[dict[str, Any]], is_asked: Callable[[int], bool]) -> list[int]:
    """The different numbers of tokens that rounds of those requests drafted, ascending."""
    return sorted(
        {drafted for place, answer in enumerate(answers) if is_asked(place) for drafted, _ in answer["rounds"]}
    )
