"""What a server is told about stopping, and what a request may say for itself.

    {"policy": "head:PATH,max_rejection_prob=0.4"}                                the server, under the key
        `acceptance_heads`
    {"policy": "fixed_length:k=5", "heads": {"small": "PATH"}}                    heads beside the policy's that
        requests may name
    "entropy:max_sqrt_entropy=0.4"    "head:small,max_rejection_prob=0.3"         a request, under the same key

Policies are written as `decode.policies.registry` has them. What the server is told is checked before it starts, and
refused with one line. What a request asks for may come from anyone: it can name no path, and where it cannot be had,
the server's policy takes its place, with one warning for all requests of that kind. `auto` is the batch's rule, which
all requests that have it share (`serve.pace`). A head is checked against the two models once, and against the sampling
of each kind of request: a request whose sampling is another is served, since the law of its output does not depend on
the head, and warned of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from decode.policies.base import AfterDraw, Policy
from decode.policies.batch import batched
from decode.policies.registry import POLICIES, parse_policy, read_spec
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead
from lm import Sampling
from serve import KEY
from serve.lanes import Lane

_MOST_KINDS = 1024
"""Kinds of requests that are remembered, so that no client can fill the memory."""
_MAX_WARNINGS = 100
"""Distinct warnings that are logged about requests, so that no client can fill the log."""
_UNCERTAIN = AfterDraw(
    position=0, entropy=1.0, max_prob=0.5, fed_logit=0.0, prefix_logit=0.0, token_prob=0.5, drawn_logit=0.0
)
"""Signals of a step for which a policy is tried."""
_SERVED = "it stops less well there; the output's law holds"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Entries under KEY in the server's configuration."""

    policy: str
    """Policy of every request that asks for no other."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Names -> directories or hub ids of exported heads."""
    allow_foreign_heads: bool = False
    """Serve heads that were trained for other models."""

    @classmethod
    def parsed(cls, value: object) -> "Settings":
        """The settings that this JSON value stands for.

        Raises:
            ValueError: anything but an object of these keys.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or "policy" not in value:
            raise ValueError(
                f'{KEY} is {value!r}; it is an object with at least a policy, such as {{"policy": "head:PATH"}}'
            )
        if unknown := [key for key in value if key not in known]:
            raise ValueError(f"{KEY} has no key {unknown[0]!r}; it has {', '.join(known)}")
        heads = value.get("heads", {})
        is_named = isinstance(heads, Mapping) and all(isinstance(path, str) for path in heads.values())
        for name, is_right, kind in (
            ("policy", isinstance(value["policy"], str), "a string, such as head:PATH,max_rejection_prob=0.4"),
            ("heads", is_named, "an object of names and the paths of exported heads"),
            ("allow_foreign_heads", isinstance(value.get("allow_foreign_heads", False), bool), "true or false"),
        ):
            if not is_right:
                raise ValueError(f"{KEY}.{name} is {value[name]!r}; it is {kind}")
        return cls(**value)


class Policies:
    """The policy of every request, made once for each kind of request."""

    def __init__(
        self,
        settings: Settings,
        *,
        hidden_size: int,
        draft: Callable[[], Mapping[str, Any]],
        target: Callable[[], Mapping[str, Any]],
        warn: Callable[[str], None],
    ) -> None:
        """Args:
            settings: the settings of the server.
            hidden_size: the width of the draft's hidden states.
            draft: a function that describes the draft, as `describe_model` does; called only if a head says what it was
                trained for.
            target: a function that describes the target.
            warn: a function that logs one line, once for each distinct warning.

        Raises:
            ValueError: a policy that does not parse, a head that does not fit.
            FileNotFoundError: no exported head at a path.
        """
        self._settings, self._log, self._hidden_size = settings, warn, hidden_size
        self._warnings: set[str] = set()
        self._models = {"draft": draft, "target": target}
        self._heads: dict[str, AcceptanceHead] = {}
        for name in settings.heads:
            self._load(name)
        self.default = _made(settings.policy, self._load)
        self._of_kind = lru_cache(_MOST_KINDS)(self._of)

    @property
    def heads(self) -> list[AcceptanceHead]:
        """Every head that any request can have."""
        return list(self._heads.values())

    def of_request(self, asked: object, sampling: Sampling) -> Policy:
        """The policy of a request.

        Args:
            asked: what the request says under KEY; None: nothing.
            sampling: how the request's tokens are sampled.
        """
        return self._of_kind(asked if isinstance(asked, str | None) else repr(asked), sampling)

    def _warn(self, line: str) -> None:
        """Log a line that was not logged before, up to `_MAX_WARNINGS` of them."""
        if line in self._warnings or len(self._warnings) > _MAX_WARNINGS:
            return
        is_last = len(self._warnings) == _MAX_WARNINGS
        self._warnings.add(line)
        self._log(f"{KEY}: {_MAX_WARNINGS} different warnings about requests; no more are logged" if is_last else line)

    def _of(self, asked: str | None, sampling: Sampling) -> Policy:
        policy = self._asked(asked)
        for head in policy.heads:
            try:
                check_fits(head, self._name(head), sampling=sampling.as_dict(), remedy=_SERVED)
            except ValueError as error:
                self._warn(f"{KEY}: {error}")
        return policy

    def _asked(self, asked: str | None) -> Policy:
        if asked is None:
            return self.default
        try:
            if read_spec(asked)[0] not in POLICIES:  # the server imports what its operator names, never a request's
                raise ValueError(f"there is no such policy; one of {', '.join(POLICIES)}")
            return _made(asked, self._loaded)
        except (ValueError, FileNotFoundError) as error:
            self._warn(
                f"{KEY}: a request asks for {asked[:200]!r} and gets the server's policy, {self._settings.policy}: "
                f"{error}"
            )
            return self.default

    def _load(self, name: str) -> AcceptanceHead:
        """The head of that name or at that path, checked against the models."""
        if name not in self._heads:
            head = AcceptanceHead.from_pretrained(self._settings.heads.get(name, name))
            if head.hidden_size != self._hidden_size:
                raise ValueError(
                    f"the head {name} reads hidden states of width {head.hidden_size} and this draft's are "
                    f"{self._hidden_size} wide; a head serves only the draft that it was trained on"
                )
            if not self._settings.allow_foreign_heads:
                trained = {"draft": head.provenance.draft, "target": head.provenance.target}
                models = {role: self._models[role]() for role, is_named in trained.items() if is_named}
                remedy = f"use a head that was trained for these models, or set {KEY}.allow_foreign_heads to true"
                check_fits(head, name, draft=models.get("draft"), target=models.get("target"), remedy=remedy)
            self._heads[name] = head
        return self._heads[name]

    def _loaded(self, name: str) -> AcceptanceHead:
        """The head that a request asks for, which must be one that the server has named."""
        if name not in self._heads:
            raise ValueError(f"the server has no head of that name; it has {', '.join(self._settings.heads) or 'none'}")
        return self._heads[name]

    def _name(self, head: AcceptanceHead) -> str:
        return next((name for name, known in self._heads.items() if known is head), "of the policy")


def _made(spec: str, load_head: Callable[[str], AcceptanceHead]) -> Policy:
    """The policy, after two rounds of it: no parameter that makes no sense may first show in the middle of the engine's
    batch.
    """
    policy = batched(parse_policy(spec, load_head=load_head), batch_size=1)
    if "confidence_logit" in policy.signals:
        raise ValueError(
            f"policy {spec!r} asks a DSpark draft for its own confidence, and here the draft is a model of its own; "
            "name another policy"
        )
    lane = Lane(policy)
    try:
        for num_accepted in (1, 0):
            lane.begin(2, frozenset())
            for position in range(2):
                if lane.is_going:
                    lane.take(0, _UNCERTAIN._replace(position=position))
            lane.end(lane.tokens, min(num_accepted, len(lane.tokens)))
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"policy {spec!r} cannot run: {error}") from error
    return policy
