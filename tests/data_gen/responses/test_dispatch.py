"""One queue over all shards and several servers, of which some die: the bytes are those of one request at a time."""

import random
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest

from configs.schema import ServerConfig
from data_gen.pipeline.command import make
from data_gen.prompts.prompt import Prompt
from data_gen.responses.exchange import Answers, ShardSpec
from data_gen.responses.server import Servers, _key_for
from tests.data_gen.on_disk import files_of, toy_of, with_data, with_server
from tests.toys.answering import Answering, all_rows, answering, close_half_way, completion, echo, problems, url_of


def asking(config, *servers, **settings):
    urls = tuple(map(url_of, servers)) if len(servers) > 1 else url_of(servers[0])
    return with_data(with_server(config, url=urls, **{"max_retries": 0} | settings), max_error_share=0.0)


@pytest.fixture(scope="module")
def one_at_a_time(toy_pair, prompts_file, tmp_path_factory):
    """The bytes of the run with one request at a time at one server."""
    config = with_data(toy_of(toy_pair, prompts_file, tmp_path_factory.mktemp("slow") / "data"), source="server")
    with answering(echo) as server:
        make(asking(config, server, concurrency=1))
    return files_of(config.data.dir)


def test_no_server_has_more_requests_under_way_than_its_concurrency(served, server, second):
    most, under_way, lock = Counter(), Counter(), threading.Lock()

    def counted(name, body, attempt):
        with lock:
            under_way[name] += 1
            most[name] = max(most[name], under_way[name])
        time.sleep(0.05)
        with lock:
            under_way[name] -= 1
        return echo(body, attempt)

    server.answer, second.answer = partial(counted, "first"), partial(counted, "second")
    make(asking(served, server, second, concurrency=2))
    assert most == {"first": 2, "second": 2}


@pytest.mark.parametrize("death", [(200, close_half_way), (503, {"error": {"message": "out of memory"}})])
def test_the_others_take_over_the_requests_of_a_server_that_dies_and_the_last_death_stops_the_run(
    served, server, second, one_at_a_time, death, capsys
):
    num_answered = iter(range(100))
    second.answer = lambda body, attempt: echo(body, attempt) if next(num_answered) < 3 else death
    config = asking(served, server, second, concurrency=2)
    make(config)
    assert files_of(config.data.dir) == one_at_a_time
    assert "1 other servers take over its requests" in capsys.readouterr().err
    num_answered = iter(range(100))
    server.answer = second.answer = lambda body, attempt: echo(body, attempt) if next(num_answered) < 8 else death
    config = with_data(config, dir=config.data.dir + "-2")
    with pytest.raises(ValueError, match=r"answers 503 for model|does not answer after 0 retries"):
        make(config)
    server.answer = second.answer = echo
    make(config)
    assert files_of(config.data.dir) == one_at_a_time


def test_a_prompt_at_which_servers_fail_is_the_problem_of_its_row(served, server, second, capsys):
    """The prompt that ends in xx makes every server answer 500; all others are answered."""
    boom = (500, {"error": {"message": "boom"}})
    server.answer = second.answer = lambda body, attempt: boom if "xx" in body["prompt"] else echo(body, attempt)
    config = asking(served, server, second, concurrency=2)
    make(with_data(config, max_error_share=1.0))
    failed = problems(config)
    assert len(failed) + len(all_rows(config)) == 12
    assert failed
    assert all("answers 500" in reason for reason in failed.values())
    assert "take over its requests" not in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "expected"), [(None, "Bearer none"), ("OWN_KEY", "Bearer own"), ("NO_KEY", None)])
def test_a_key_is_sent_only_to_a_server_that_it_was_named_for(served, server, monkeypatch, variable, expected):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OWN_KEY", "own")
    keys = set()

    class Keyed(Answering):
        def do_POST(self) -> None:  # noqa: N802
            keys.add(self.headers["Authorization"])
            super().do_POST()

    server.RequestHandlerClass = Keyed
    config = asking(served, server, api_key_variable=variable)
    with pytest.raises(ValueError, match="NO_KEY, but that environment") if expected is None else nullcontext():
        make(config)
    assert keys == ({expected} if expected else set())
    assert _key_for("https://api.openai.com/v1", None) == "secret"


def test_each_server_of_a_list_is_tried_before_the_run(served, server, second):
    for status, failure in ((404, ""), (400, " failed at its first request: .*")):
        second.answer = lambda body, attempt, status=status: (status, {"error": {"message": "no such model"}})
        with pytest.raises(ValueError, match=f"{url_of(second)}{failure} answers {status} for model"):
            make(asking(served, server, second))
    assert {body["max_tokens"] for body in server.bodies} == {1}


def test_the_next_shards_are_asked_for_while_the_last_rows_of_a_shard_are_under_way(served, server, one_at_a_time):
    """The first request is answered only once requests of the second shard (of three prompts each) have come."""
    fourth, lock, num_asked = threading.Event(), threading.Lock(), iter(range(100))

    def answer(body, attempt):
        with lock:
            number = next(num_asked)
        if number == 0:
            assert fourth.wait(20)
        if number == 4:
            fourth.set()
        return echo(body, attempt)

    server.answer = answer
    config = asking(served, server, concurrency=2, timeout_s=30)
    make(config)
    assert files_of(config.data.dir) == one_at_a_time


@pytest.mark.parametrize("mode", ["together", "sequential"])
def test_servers_share_the_requests_and_bytes_do_not_depend_on_when_they_answer(
    served, server, second, one_at_a_time, mode
):
    chance, made = random.Random(5), []

    def late(body, attempt):
        time.sleep(chance.random() / 20)
        return echo(body, attempt)

    server.answer = second.answer = late
    for run in range(2):
        config = asking(with_data(served, mode=mode, dir=f"{served.data.dir}-{run}"), server, second, concurrency=3)
        make(config)
        made.append(files_of(config.data.dir))
    assert made[0] == made[1]
    assert min(len(asked.bodies) for asked in (server, second)) > 4  # each run tries each server twice at most
    if mode == "together":
        assert made[0] == one_at_a_time


def specs(num: int, per_shard: int) -> list[ShardSpec]:
    return [ShardSpec("train", i, tuple(Prompt(f"{i}-{j}", ("hi",)) for j in range(per_shard))) for i in range(num)]


def test_only_the_answers_of_a_few_shards_are_in_memory():
    asked, servers = [], Servers(ServerConfig(concurrency=8), model="m")
    ahead = servers.ahead(specs(50, 4), lambda spec: asked.append(spec.index) or Answers([], []))
    for index, (spec, _) in enumerate(ahead):
        assert spec.index == index
        time.sleep(0.002)
        assert len(asked) <= index + 4  # this shard, the next, and two shards of four for eight requests at once
    assert sorted(asked) == list(range(50))


def test_an_error_of_one_shard_comes_after_the_shards_before_it_and_ends_what_waits(server):
    end = threading.Event()

    def answer(body, attempt):
        number = int(body["prompt"][-1])
        if number == 3:
            return 401, {"error": {"message": "key"}}
        return 200, (lambda handler: end.wait(20)) if number > 3 else completion("hi")[1]

    server.answer, config = answer, ServerConfig(url=url_of(server), concurrency=8, max_retries=0)
    servers = Servers(config, model="m")
    answers = servers.ahead(specs(10, 4), lambda spec: servers.run(servers.ask({"prompt": spec.name})))
    assert [next(answers)[0].index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="answers 401"):
        next(answers)
    with pytest.raises(ValueError, match="the run has ended"):
        servers.run(servers.ask({"prompt": "late 0"}))
    end.set()
