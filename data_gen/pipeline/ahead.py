"""The responses of shards in the order of the shards, of which the next are asked for already: servers are not idle
while the last rows of a shard are under way, or while it is labelled and written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Answers


def asked_ahead(
    specs: Iterable[ShardSpec], ask: Callable[[ShardSpec], Answers], *, num_at_once: int, close: Callable[[], None]
) -> Iterator[tuple[ShardSpec, Answers]]:
    """Each shard with its answers, in order; only those of a few shards are in memory, whatever the number of shards.

    Args:
        specs: the shards.
        ask: asks for the responses of one shard; it is called in several threads at once.
        num_at_once: requests that are to be under way at once; conversations of as many shards are open beside the one
            that was handed out and the one that comes to its end.
        close: ends what `ask` waits for, where the shards are not gone through to their end.
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
