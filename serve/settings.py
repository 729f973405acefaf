"""Stopping settings of a server and of its requests, both under the key `acceptance_heads`.

    {"policy": "head:PATH,max_rejection_prob=0.4"}                           server
    {"policy": "fixed_length:k=5", "heads": {"small": "PATH"}}               server, with heads that requests may name
    "entropy:max_sqrt_entropy=0.4"    "head:small,max_rejection_prob=0.3"    request

Policies have the syntax of `decode.policies.registry`; requests with `auto` share one batch rule (`serve.controller`).

* Server settings are checked before the server starts, and an error ends the start with one line.
* Requests are untrusted and cannot name paths. A request whose policy is invalid gets the server's policy, with one
  warning per kind of request.
* A head is checked once against both models, and against the sampling of each kind of request. Other sampling causes
  only a warning, because the output distribution does not depend on the head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache

from decode.policies.base import AfterDraw, Policy, PolicyRun
from decode.policies.batch import batched
from decode.policies.registry import POLICIES, parse_policy, read_spec
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead
from lm import Sampling
from serve import KEY

_MAX_KINDS = 1024  # of requests that are cached, so that no client can fill the memory
_MAX_WARNINGS = 100  # different ones about requests, so that no client can fill the log
# signals of a draft step with which a policy is tried
_UNCERTAIN = AfterDraw(position=0, entropy=1.0, max_prob=0.5, fed_logit=0.0, token_prob=0.5)
_SERVED = "it stops less well there, but the output distribution is unchanged; train a head for this sampling"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Entries under KEY in the server's configuration."""

    policy: str
    """Default policy of a request."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Names -> directories or hub ids of exported heads."""
    allow_foreign_heads: bool = False
    """Serve heads that were trained for other models."""

    @classmethod
    def parsed(cls, value: object) -> "Settings":
        """The settings in a JSON value; ValueError for an unknown key or a wrong type."""
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or "policy" not in value:
            raise ValueError(
                f'{KEY} is {value!r}; use an object with at least a policy, such as {{"policy": "head:PATH"}}'
            )
        if unknown := [key for key in value if key not in known]:
            raise ValueError(f"{KEY} has no key {unknown[0]!r}; use {', '.join(known)}")
        heads = value.get("heads", {})
        is_named = isinstance(heads, Mapping) and all(isinstance(path, str) for path in heads.values())
        for name, is_valid, expected in (
            ("policy", isinstance(value["policy"], str), "a string, such as head:PATH,max_rejection_prob=0.4"),
            ("heads", is_named, "an object of names and the paths of exported heads"),
            ("allow_foreign_heads", isinstance(value.get("allow_foreign_heads", False), bool), "true or false"),
        ):
            if not is_valid:
                raise ValueError(f"{KEY}.{name} is {value[name]!r}; use {expected}")
        return cls(**value)


class Policies:
    """The policies of requests, cached by kind of request."""

    def __init__(
        self,
        settings: Settings,
        *,
        hidden_size: int,
        draft: Callable[[], Mapping[str, object]],
        target: Callable[[], Mapping[str, object]],
        warn: Callable[[str], None],
    ) -> None:
        """Args:
            settings: settings of the server.
            hidden_size: width of the draft's hidden states.
            draft: describes the draft, as `describe_model`; called only if a head records its draft.
            target: describes the target, likewise.
            warn: logs a line; called once for each distinct warning.

        Raises:
            ValueError: an invalid policy, or a head that does not fit.
            FileNotFoundError: no exported head at a path.
        """
        self._settings = settings
        self._log = warn
        self._hidden_size = hidden_size
        self._warnings: set[str] = set()
        self._models = {"draft": draft, "target": target}
        self.heads: dict[str, AcceptanceHead] = {}
        """Every head that a request can use, by its name or path."""
        for name in settings.heads:
            self._load(name)
        self.default = _parse_and_try(settings.policy, self._load)
        self._of_kind = lru_cache(_MAX_KINDS)(self._of)

    def of_request(self, spec: object, sampling: Sampling) -> Policy:
        """The policy of a request, whose value under KEY is `spec` (None: it has none)."""
        return self._of_kind(spec if isinstance(spec, str | None) else repr(spec), sampling)

    def _warn(self, line: str) -> None:
        """Log a line once, up to `_MAX_WARNINGS` different ones."""
        if line in self._warnings or len(self._warnings) > _MAX_WARNINGS:
            return
        is_last = len(self._warnings) == _MAX_WARNINGS
        self._warnings.add(line)
        limit = f"{KEY}: reached {_MAX_WARNINGS} different warnings about requests; further ones are not logged"
        self._log(limit if is_last else line)

    def _of(self, spec: str | None, sampling: Sampling) -> Policy:
        policy = self._requested(spec)
        for head in policy.heads:
            name = next((name for name, known in self.heads.items() if known is head), "of the policy")
            try:
                check_fits(head.provenance, name, sampling=sampling.as_dict(), remedy=_SERVED)
            except ValueError as error:
                self._warn(f"{KEY}: {error}")
        return policy

    def _requested(self, spec: str | None) -> Policy:
        if spec is None:
            return self.default
        try:
            if read_spec(spec)[0] not in POLICIES:  # only the operator may name code to import
                raise ValueError(f"there is no such policy; use one of {', '.join(POLICIES)}")
            return _parse_and_try(spec, self._loaded)
        except (ValueError, FileNotFoundError) as error:
            self._warn(
                f"{KEY}: a request's policy {spec[:200]!r} is invalid, so it gets the server's policy "
                f"{self._settings.policy}: {error}"
            )
            return self.default

    def _load(self, name: str) -> AcceptanceHead:
        """The head of this name or path, checked against the models."""
        if name not in self.heads:
            head = AcceptanceHead.from_pretrained(self._settings.heads.get(name, name))
            if head.hidden_size != self._hidden_size:
                raise ValueError(
                    f"the head {name} reads hidden states of width {head.hidden_size}, but this draft's have width "
                    f"{self._hidden_size}; use a head that was trained for this draft"
                )
            if not self._settings.allow_foreign_heads:
                trained = {"draft": head.provenance.draft, "target": head.provenance.target}
                models = {role: self._models[role]() for role, is_named in trained.items() if is_named}
                remedy = f"use a head that was trained for these models, or set {KEY}.allow_foreign_heads to true"
                check_fits(head.provenance, name, draft=models.get("draft"), target=models.get("target"), remedy=remedy)
            self.heads[name] = head
        return self.heads[name]

    def _loaded(self, name: str) -> AcceptanceHead:
        """The head that a request names, which must be one of the server's."""
        if name not in self.heads:
            raise ValueError(f"the server has no head {name!r}; use one of {', '.join(self._settings.heads) or 'none'}")
        return self.heads[name]


def _parse_and_try(spec: str, load_head: Callable[[str], AcceptanceHead]) -> Policy:
    """The policy, after two trial rounds, so that an invalid parameter fails here and not within the engine's batch."""
    policy = batched(parse_policy(spec, load_head=load_head), batch_size=1)
    if "confidence_logit" in policy.signals:
        raise ValueError(
            f"policy {spec!r} needs the confidence head of a DSpark draft, but this server has a separate draft model; "
            "use another policy"
        )
    run = PolicyRun(policy)
    try:
        for num_accepted in (1, 0):
            run.begin(2)
            while run.is_going:
                run.take(_UNCERTAIN._replace(position=len(run.steps)))
            run.end(len(run.steps), min(num_accepted, len(run.steps)))
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"policy {spec!r} failed in a trial round: {error}; correct its parameters") from error
    return policy
