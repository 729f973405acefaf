"""A source that keeps the responses which a shard has already, and asks another source for the rest:
`--retry_errors`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_gen.responses.exchange import Problem, Progress, Request, Response, ResponseSource


@dataclass(frozen=True)
class Kept:
    """Answers by row id, and who is asked where there is none."""

    source: ResponseSource
    responses: Mapping[str, Response]

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """The kept response to each request that has one; the source is asked for the others."""
        waiting = [request for request in requests if request.id not in self.responses]
        progress(len(requests) - len(waiting))
        asked = iter(self.source.respond(waiting, seed, progress) if waiting else [])
        return [self.responses.get(request.id) or next(asked) for request in requests]
