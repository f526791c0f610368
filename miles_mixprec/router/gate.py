"""Which weight versions may serve a request.

    newest     version >= the newest published of the engine's view
    bounded    version >= newest - lag
    min        version >= what the request itself asks for (`X-Mixprec-Min-Version`), else anything
    any        anything

The request's own minimum also raises the floor of `newest` and `bounded`. Versions are those that engines really
serve: the lower of what the sidecar claims and what the engine answers, so neither can lie its way through.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class View:
    """What has been published of a view: the newest version and the run that it belongs to."""

    version: int = 0
    run: str | None = None
    former: list[str | None] = field(default_factory=list)  # runs before it


def floor(policy: str, lag: int, newest: int, asked: int) -> int:
    """The lowest acceptable version under `policy`, one of config.GATE_POLICIES."""
    if policy == "newest":
        return max(newest, asked)
    if policy == "bounded":
        return max(newest - lag, asked)
    return asked if policy == "min" else 0


def effective(claimed: int | None, answered: int | None) -> int:
    """The version to believe, from the sidecar's claim and the engine's answer (None: not heard).

    An engine of which nobody said anything holds version 0, the model it was started with.
    """
    known = [version for version in (claimed, answered) if version is not None]
    return min(known, default=0)


def parse(text: object) -> int | None:
    """A weight version from SGLang's decimal string; None for its "default" and anything else that is no number."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 16 else None
