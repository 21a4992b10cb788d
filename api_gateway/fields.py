"""Fields of requests that need more than a type: times, tiers, metadata, webhooks. Pure; refusals name their field."""

from __future__ import annotations

import math
import re
from datetime import datetime
from urllib.parse import urlsplit

from infra.contracts import Tier, Webhook
from infra.errors import BadRequest

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_URL = 2048
MAX_SECONDS = 30 * 86400
MAX_PRIORITY = 2**31 - 1
MAX_IDEMPOTENCY_KEY = 255
WEBHOOK_EVENTS = ("job.started", "job.succeeded", "job.failed", "job.cancelled", "job.expired")
RUN_EVENTS = ("run.completed", "run.failed")

SERVICE_TIERS: dict[str, Tier] = {
    "auto": Tier.STANDARD,
    "default": Tier.STANDARD,
    "flex": Tier.BULK,
    "priority": Tier.INTERACTIVE,
}
SERVICE_TIER_OF: dict[Tier, str] = {Tier.STANDARD: "default", Tier.BULK: "flex", Tier.INTERACTIVE: "priority"}


def service_tier(name: str | None) -> Tier:
    """OpenAI's name of a tier, as ours."""
    tier = SERVICE_TIERS.get(name or "auto")
    if tier is None:
        raise BadRequest(
            f"service_tier: {name!r} is not one; use {', '.join(SERVICE_TIERS)}, or leave it out", param="service_tier"
        )
    return tier


def seconds_ms(value: float | None, name: str) -> int | None:
    """A duration in seconds, as whole milliseconds."""
    if value is None:
        return None
    if not 0 < value <= MAX_SECONDS:  # also refuses NaN
        raise BadRequest(f"{name}: {value} is not between 0 and {MAX_SECONDS} seconds", param=name)
    return max(1, round(value * 1000))


def deadline_ms(value: float | str | None, *, now_ms: int, name: str = "deadline") -> int | None:
    """A point in time, Unix seconds or RFC 3339 with its offset, as Unix milliseconds."""
    if value is None:
        return None
    if isinstance(value, str):
        return _rfc3339_ms(value, name)
    if not math.isfinite(value) or value * 1000 > now_ms + 10 * 365 * 86_400_000:
        raise BadRequest(f"{name}: {value} is not a Unix time in seconds of the next ten years", param=name)
    return round(value * 1000)


def _rfc3339_ms(text: str, name: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadRequest(
            f"{name}: {text[:80]!r} is no time; write Unix seconds, or RFC 3339 with an offset: 2026-01-31T12:00:00Z",
            param=name,
        )
    return round(moment.timestamp() * 1000)


def priority(value: int | None) -> int:
    if value is None:
        return 0
    if abs(value) > MAX_PRIORITY:
        raise BadRequest(f"priority: {value} is not between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
    return value


def metadata(pairs: dict[str, str] | None, name: str = "metadata") -> dict[str, str]:
    if not pairs:
        return {}
    if len(pairs) > MAX_METADATA_PAIRS:
        raise BadRequest(f"{name}: {len(pairs)} pairs are too many; send at most {MAX_METADATA_PAIRS}", param=name)
    for key, value in pairs.items():
        if not 1 <= len(key) <= MAX_METADATA_KEY:
            raise BadRequest(f"{name}: key {key[:80]!r} is not 1 to {MAX_METADATA_KEY} characters long", param=name)
        if len(value) > MAX_METADATA_VALUE:
            raise BadRequest(
                f"{name}.{key}: {len(value)} characters are too many; send at most {MAX_METADATA_VALUE}",
                param=f"{name}.{key}",
            )
    return pairs


def webhook(target: Webhook | None, events: tuple[str, ...] = WEBHOOK_EVENTS) -> Webhook | None:
    """Checks the form of a webhook. Whether its address may be reached is decided when it is called."""
    if target is None:
        return None
    url = target.url
    problem = _url_problem(url)
    if problem:
        raise BadRequest(f"webhook.url: {url[:80]!r} {problem}", param="webhook.url")
    for event in target.events:
        if event not in events:
            raise BadRequest(
                f"webhook.events: {event[:80]!r} is not an event; choose from {', '.join(events)}",
                param="webhook.events",
            )
    return target


def _url_problem(url: str) -> str | None:
    if len(url) > MAX_URL:
        return f"is over {MAX_URL} characters"
    if any(character <= " " or character == "\x7f" for character in url):
        return "has spaces or control characters; percent-encode them"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return "is not an address of the form https://host/path"
    if parts.username is not None or parts.password is not None:
        return "carries a user name or a password; put a secret into the path, or verify the signature instead"
    return None


def idempotency_key(header: str | None) -> str | None:
    """The key of an `Idempotency-Key` header, quoted or bare."""
    if header is None:
        return None
    key = header.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY or not key.isprintable():
        raise BadRequest(
            f"Idempotency-Key: send 1 to {MAX_IDEMPOTENCY_KEY} printable characters, such as a UUID",
            param="Idempotency-Key",
        )
    return key


_PREFER_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})(?=$|[,;\s])", re.IGNORECASE)


def prefer_wait_seconds(header: str | None) -> float | None:
    """Seconds of a `Prefer: wait=n` header (RFC 7240); None where it asks for no waiting."""
    found = _PREFER_WAIT.search(header or "")
    return float(found[1]) if found else None
