"""`labels: server`: the distributions and labels that a server's log-probabilities give are those of the target in this
process, or none.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import SamplingConfig
from data_gen.pipeline.command import make
from data_gen.pipeline.inspect import responses
from data_gen.pipeline.plan import plan
from data_gen.pipeline.worker import Job
from data_gen.responses.exchange import Distributions, RefusedError
from data_gen.responses.top_logprobs import distributions_of, num_logprobs_of
from data_gen.store.manifest import read_manifest
from lm import Sampling
from tests.cases import first_fast
from tests.data_gen.on_disk import files_of, with_data, with_server
from tests.toys.answering import all_rows, completion, problems

_OF_FLOATS = ("acceptance_prob", "target_prob", "acceptance_rate", "log_q", "entropy")


@dataclass
class ServedModel:
    """What vLLM answers. Log-probabilities are over all ids of a padded vocabulary; tokens are the tokenizer's."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 500

    def __call__(self, body: dict[str, Any], attempt: int) -> tuple[int, dict]:
        num = body.get("logprobs") or 0
        if num > self.max_logprobs:
            return 400, {"error": {"message": f"logprobs of {num}, which is greater than max allowed"}}
        top_k = body["top_k"] if body["top_k"] > 0 else None
        sampling = Sampling(temperature=body["temperature"], top_k=top_k, top_p=body.get("top_p", 1.0))
        generator = torch.Generator().manual_seed(body["seed"])
        ids, told, prompt = list[int](), list[dict[int, float]](), body["prompt"]
        while len(ids) < body["max_tokens"] and ids[-1:] != [1]:
            logits = self._logits([*prompt, *ids])[-1]
            probs = sampling.probs(logits[: len(self.tokenizer)])
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
            told.append(self._top(logits, num, ids[-1], sampling))
        logprobs = {"top_logprobs": [{f"token_id:{name}": value for name, value in place.items()} for place in told]}
        more: dict[str, Any] = {"token_ids": ids, "logprobs": logprobs if num else None}
        if body.get("prompt_logprobs"):
            rows = self._logits(prompt)
            tops = [
                self._top(row, body["prompt_logprobs"], token, sampling)
                for row, token in zip(rows, prompt[1:], strict=False)
            ]
            named = [{str(name): {"logprob": value} for name, value in top.items()} for top in tops]
            more["prompt_logprobs"] = [None, *named]
        reason = "stop" if ids[-1] == 1 else "length"
        return completion(self.tokenizer.decode(ids, skip_special_tokens=True), reason, **more)

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()

    def _top(self, logits: Tensor, num: int, token: int, sampling: Sampling) -> dict[int, float]:
        """The drawn token, and the likeliest."""
        values = {
            "raw_logprobs": logits.log_softmax(-1),
            "raw_logits": logits,
            "processed_logprobs": sampling.probs(logits).log(),
            "tempered": (logits / (sampling.temperature or 1)).log_softmax(-1),
        }[self.logprobs_mode].clamp(min=-9999.0)
        likeliest = values.topk(min(num, len(values)))
        return {token: float(values[token])} | dict(
            zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        )


@pytest.fixture
def told(served, server, models, tokenizer):
    """The toy run with responses and labels from a server that answers as vLLM does, by the toy target."""
    server.answer = ServedModel(models["target"], tokenizer)
    return with_data(with_server(served, kind="vllm"), labels="server", mode="together", max_error_share=0.0)


def sampled(config, **sampling):
    return replace(config, pair=replace(config.pair, sampling=SamplingConfig(**sampling)))


def labels_of(config) -> dict[str, dict[str, torch.Tensor]]:
    folder = Path(config.data.dir)
    return {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}


def assert_same_labels(config, other):
    """The same shards with the same tokens and coins, and the same float32 numbers to 1e-5."""
    labels, others = labels_of(config), labels_of(other)
    assert labels.keys() == others.keys() != set()
    for name, tensors in labels.items():
        assert tensors.keys() == others[name].keys()
        for key in tensors:
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if key in _OF_FLOATS else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(tensors[key], others[name][key], **tolerance)


def relabelled(config, tmp_path, **changes):
    """The same responses, from a file, under other settings and in another folder."""
    path = tmp_path / "responses.jsonl"
    responses(config, out=str(path))
    again = with_data(config, source="file", responses=str(path), **{"dir": str(tmp_path / "again")} | changes)
    make(again)
    return again


SAMPLINGS = [{"temperature": 1.4, "top_k": 20, "top_p": 0.8}, {"temperature": 0.0}]
SAMPLINGS += [{"temperature": 0.5, "top_k": 12}, {"top_k": 50}]


@pytest.mark.parametrize("sampling", first_fast(SAMPLINGS), ids=str)
def test_labels_told_with_the_response_are_those_of_the_target_here(told, tmp_path, sampling):
    config = sampled(told, **sampling)
    make(config)
    here = relabelled(config, tmp_path, labels="target")
    assert_same_labels(config, here)
    rows, others = all_rows(config), all_rows(here)
    assert {row["cross_entropy"] for row in rows.values()} == {None}
    assert not problems(config)
    for name, row in rows.items():
        for column in ("log_p", "log_q", "acceptance_prob", "acceptance_rate", "entropy"):
            values = (torch.tensor(row[column]), torch.tensor(others[name][column]))
            torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


def test_labels_of_responses_that_are_there_already_are_those_that_came_with_them(told, tmp_path, server):
    config = sampled(told, temperature=0.7, top_k=20)
    make(config)
    server.bodies.clear()
    again = relabelled(config, tmp_path)
    assert_same_labels(config, again)
    read = [body for body in server.bodies if "prompt_logprobs" in body]
    assert len(read) == len(all_rows(config)) == 12
    assert all(body["max_tokens"] == 1 for body in server.bodies)


def tops_of(choice) -> list[dict[str, float]]:
    return choice["logprobs"]["top_logprobs"]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (
            lambda choice: tops_of(choice).append(tops_of(choice).pop(0)),
            r"at position \d lack token|has probability 0 under pair\.sampling",
        ),
        (
            lambda choice: choice["token_ids"].append(choice["token_ids"].pop(0)),
            "differs from its decoded token ids|lack token",
        ),
        (lambda choice: tops_of(choice)[0].update({"token_id:-5": -3.0}), "of token id -5 at position 0"),
        (lambda choice: tops_of(choice)[0].update({f"token_id:{10**30}": -3.0}), "of token id 10{30} at position 0"),
        (
            lambda choice: tops_of(choice)[0].update({f"token_id:{choice['token_ids'][0]}": -50.0}),
            r"at position 0 does not follow .* token has probability 0 under pair\.sampling",
        ),
        (lambda choice: choice["logprobs"].update(top_logprobs=[]), "log-probabilities at 0 of 1 positions"),
        (
            lambda choice: choice.update(logprobs={"top_logprobs": [{"a": -1.0}]}),
            r"data\.labels: server needs log-probabilities by token id",
        ),
    ],
    ids=["shifted", "rotated", "negative", "huge", "sampled from all", "none", "by text"],
)
def test_labels_of_a_misaligned_server_are_refused(told, server, lie, reason):
    honest = server.answer

    def answer(body, attempt):
        status, reply = honest(body, attempt)
        lie(reply["choices"][0])
        return status, reply

    server.answer = answer
    with pytest.raises(ValueError, match=reason) as error:
        make(sampled(told, top_k=2))
    assert "\n" not in str(error.value)


def test_one_stage_after_the_other_gives_the_bytes_of_one_run_and_needs_the_draft_alone(told):
    config = sampled(told, top_k=20)
    one = with_data(config, mode="sequential", dir=config.data.dir + "-one")
    staged = with_data(config, mode="sequential", dir=config.data.dir + "-staged")
    make(config)
    make(one)
    make(staged, stages="respond")
    path, *_ = sorted((Path(staged.data.dir) / "stages" / "respond").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])  # distributions that a broken disk lost are asked for again
    make(staged, stages="respond")
    make(staged, stages="draft")
    with pytest.raises(ValueError, match=r"--stages is target, but with data\.labels: server"):
        make(staged, stages="target")
    assert files_of(config.data.dir) == files_of(one.data.dir) == files_of(staged.data.dir)
    assert not (Path(staged.data.dir) / "stages").exists()
    jobs = [Job(pair=config.pair, data=config.data, stage="together")]
    jobs += [Job(pair=config.pair, data=one.data, stage=stage) for stage in ("respond", "draft")]
    assert {name for job in jobs for name in job.models} == {"draft"}


def test_a_place_whose_law_does_not_follow_is_an_error_of_its_row_and_a_retry_keeps_the_others(told, server):
    config = with_data(sampled(told, top_k=20), max_error_share=1.0)
    good, marked = server.answer, []

    def flat(body, attempt):
        status, reply = good(body, attempt)
        logprobs = reply["choices"][0]["logprobs"]
        if len(body["prompt"]) > 25 and body["max_tokens"] > 1 and logprobs:
            marked.append(body["prompt"])
            tokens = {*range(10, 60), reply["choices"][0]["token_ids"][-1]}
            logprobs["top_logprobs"][-1] = {f"token_id:{token}": -4.0 for token in tokens}
        return status, reply

    server.answer = flat
    make(config)
    reasons = problems(config)
    assert len(reasons) == len(marked) > 0
    why = "does not follow from the log-probabilities: others may be as likely as number 20"
    assert all(why in reason for reason in reasons.values())
    server.answer = good
    make(config, retry_errors=True)
    whole = with_data(config, dir=config.data.dir + "-whole")
    make(whole)
    assert not problems(config)
    assert_same_labels(config, whole)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"logprobs_mode": "tempered"}, "depend on the temperature; start the server with --logprobs-mode raw_logpr"),
        ({"logprobs_mode": "processed_logprobs"}, "truncated distributions; start the server with --logprobs-mode raw"),
        ({"logprobs_mode": "raw_logits"}, "sum to more than 1; start the server with --logprobs-mode raw"),
        ({"max_logprobs": 20}, "at its first request: .*greater than max allowed.*--max-logprobs 80"),
    ],
)
def test_a_server_that_tells_other_numbers_is_refused_before_anything_is_loaded(told, server, settings, complaint):
    server.answer = ServedModel(server.answer.model, server.answer.tokenizer, **settings)
    config = sampled(told, temperature=0.5, top_k=50)
    with pytest.raises(ValueError, match=complaint):
        make(config)
    assert not (Path(config.data.dir) / "rows").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"source": "transformers"}, "data.labels is server, but data.source is transformers"),
        ({"kind": "openai"}, "data.labels is server, but data.server.kind is openai"),
        ({"top_k": None}, "tokens count that a server omits"),
    ],
)
def test_settings_under_which_no_server_can_tell_are_refused_at_once(told, server, changes, complaint):
    config = with_server(sampled(told, top_k=changes.get("top_k", 50)), kind=changes.get("kind", "vllm"))
    config = with_data(config, source=changes.get("source", "server"))
    for command in (make, partial(plan, sample=0)):
        with pytest.raises(ValueError, match=complaint):
            command(config)
    assert not server.bodies


def test_the_manifest_says_who_labels_and_plan_reckons_without_the_target(told, capsys):
    config = sampled(told, top_k=50)
    make(config)
    assert read_manifest(config.data.dir)["labels"] == "server"
    with pytest.raises(ValueError, match="differs in labels: 'server' there, None in this run"):
        make(with_data(config, labels="target"))
    capsys.readouterr()
    totals = plan(with_data(config, dir=config.data.dir + "-planned"), sample=4)
    assert totals["target_sequence_forwards"] == 0
    assert "labels " in capsys.readouterr().out


NUM_IDS, NUM_PADDED = 300, 316


def logits_of(num_places: int = 40, *, width: int = NUM_IDS, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_places, width, generator=torch.Generator().manual_seed(seed)) * 3


def tops(logits: torch.Tensor, num: int) -> list[dict[int, float]]:
    """What a server tells of each place: the likeliest, and a token that was drawn besides."""
    log_probs = logits.double().log_softmax(-1)
    likeliest = log_probs.topk(min(num, log_probs.shape[-1]))
    return [
        {7: float(row[7])} | dict(zip(ids.tolist(), values.tolist(), strict=True))
        for row, ids, values in zip(log_probs, likeliest.indices, likeliest.values, strict=True)
    ]


def dense(distributions) -> torch.Tensor:
    return torch.zeros(len(distributions.ids), NUM_IDS).scatter_add_(-1, distributions.ids.long(), distributions.probs)


def read(positions: list[dict[int, float]], sampling: Sampling, num: int) -> Distributions:
    return distributions_of(positions, sampling, num_logprobs=num, num_ids=NUM_IDS)


READ_SAMPLINGS = [Sampling(temperature=0), Sampling(top_k=50), Sampling(temperature=0.6, top_k=50)]
READ_SAMPLINGS += [Sampling(temperature=1.7, top_k=20), Sampling(temperature=0.8, top_k=30, top_p=0.9)]


@pytest.mark.parametrize("sampling", READ_SAMPLINGS, ids=str)
@pytest.mark.parametrize("width", [NUM_IDS, NUM_PADDED])
def test_the_law_is_that_of_all_logits(sampling, width):
    logits = logits_of(width=width)
    distributions = read(tops(logits, 64), sampling, 64)
    torch.testing.assert_close(dense(distributions), sampling.probs(logits[:, :NUM_IDS]), rtol=1e-5, atol=1e-7)


def test_of_equals_greedy_takes_the_least_as_argmax_does():
    logits = logits_of(1)
    logits[:, [3, 9, 200]] = 50.0
    distributions = read(tops(logits, 15), Sampling(temperature=0), 15)
    assert (distributions.ids.tolist(), distributions.probs.tolist()) == ([[3]], [[1.0]])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_equals_around_the_kth_place_are_kept_together_or_the_law_is_refused(temperature):
    """bfloat16 has many equals. Every place is either the law of all logits or an error, and both occur."""
    logits, sampling = logits_of(400).bfloat16().float(), Sampling(temperature=temperature, top_k=50)
    num_determined = 0
    for place in range(len(logits)):
        try:
            distributions = read(tops(logits[place : place + 1], 52), sampling, 52)
        except RefusedError:
            assert (logits[place] >= logits[place].topk(52).values[-1]).sum() >= 52
            assert logits[place].topk(52).values[-1] == logits[place].topk(50).values[-1]
            continue
        num_determined += 1
        torch.testing.assert_close(dense(distributions), sampling.probs(logits[place, None]), rtol=1e-5, atol=1e-7)
    assert 0 < num_determined < 400


def test_padded_ids_among_the_likeliest_are_made_up_for_or_the_law_is_refused():
    logits = logits_of(3, width=NUM_PADDED)
    logits[:, NUM_IDS : NUM_IDS + 10] = 30.0
    sampling = Sampling(top_k=50)
    distributions = read(tops(logits, 64), sampling, 64)
    torch.testing.assert_close(dense(distributions), sampling.probs(logits[:, :NUM_IDS]), rtol=1e-5, atol=1e-7)
    with pytest.raises(RefusedError, match=r"others may be as likely as number 50; raise data\.server"):
        read(tops(logits, 59), sampling, 59)


@pytest.mark.parametrize(
    ("sampling", "positions", "reason"),
    [
        (
            Sampling(top_k=5),
            tops(logits_of(2), 64)[:1] + tops(logits_of(2), 20)[1:],
            "at position 1 .* fewer than 64",
        ),
        (Sampling(top_k=5), [dict(enumerate(logits_of(1)[0].topk(64).values.tolist()))], "sum to more than 1"),
        (Sampling(top_k=5), [{id: -9999.0 if id > 4 else -1.61 for id in range(64)}], "truncated distributions"),
        (Sampling(top_k=5), [dict.fromkeys(range(64), float("nan"))], "no token has any"),
    ],
)
def test_what_does_not_determine_the_law_is_refused_with_the_place(sampling, positions, reason):
    with pytest.raises(RefusedError, match=reason):
        read(positions, sampling, 64)


@pytest.mark.parametrize(
    ("sampling", "num", "complaint"),
    [
        (Sampling(), None, "tokens count that a server omits; set pair.sampling.top_k"),
        (Sampling(top_p=0.9), None, "that a server omits"),
        (Sampling(top_k=50), 50, r"data.server.num_logprobs is 50 .*; set it to more than 50 \(null: 80\)"),
    ],
)
def test_a_sampling_that_no_number_determines_is_refused_and_another_asks_for_few(sampling, num, complaint):
    with pytest.raises(ValueError, match=complaint):
        num_logprobs_of(sampling, num)
    assert num_logprobs_of(Sampling(top_k=50), None) == 80
    assert num_logprobs_of(Sampling(temperature=0), None) == 80
    assert num_logprobs_of(Sampling(top_k=50), 51) == 51
