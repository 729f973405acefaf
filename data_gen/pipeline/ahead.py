"""Requests the responses of the next shards in advance, so that servers are not idle while a shard is finished,
labelled and written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Answers


def answers_ahead(
    specs: Iterable[ShardSpec], ask: Callable[[ShardSpec], Answers], *, num_at_once: int, close: Callable[[], None]
) -> Iterator[tuple[ShardSpec, Answers]]:
    """Each shard with its answers, in order; only a few shards are in memory.

    Args:
        specs: the shards.
        ask: requests the responses of one shard; called in several threads at once.
        num_at_once: number of requests to keep in flight; beyond the first two open shards (one yielded, one that is
            finishing), shards are opened until they hold this many conversations.
        close: cancels the requests that `ask` waits for, if the caller stops early.
    """
    open_shards: deque[tuple[ShardSpec, Future[Answers]]] = deque()
    waiting = iter(specs)
    pool = ThreadPoolExecutor(num_at_once + 2)  # a shard has at least one conversation
    is_over = False
    try:
        while True:
            while sum(len(spec.prompts) for spec, _ in list(open_shards)[2:]) < num_at_once:
                spec = next(waiting, None)
                if spec is None:
                    break
                open_shards.append((spec, pool.submit(ask, spec)))
            if not open_shards:
                break
            spec, answers = open_shards[0]
            yield spec, answers.result()
            open_shards.popleft()
        is_over = True
    finally:
        if not is_over:
            close()
        pool.shutdown(wait=is_over, cancel_futures=True)
