"""Standard Webhooks 1.0 signatures: `v1,` base64 of HMAC-SHA256 over `id.timestamp.body`. Pure.

Source: the Standard Webhooks specification 1.0.0, "Signature scheme" and "Symmetric" key format.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

PREFIX = "whsec_"
MIN_KEY_BYTES, MAX_KEY_BYTES = 24, 64

_ID = re.compile(r"[!-~]{1,128}")


def new_secret() -> str:
    """A secret as a receiver writes it down: `whsec_` and the base64 of 32 random bytes."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """The key inside a secret. Raises ValueError saying what is wrong; the secret itself is not repeated."""
    if not secret.startswith(PREFIX):
        raise ValueError(f"a webhook secret starts with {PREFIX}")
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a webhook secret is {PREFIX} and base64: {error}") from error
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a webhook secret holds {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(key)}")
    return key


def headers(webhook_id: str, timestamp_seconds: int, body: bytes, secret_list: Sequence[str]) -> dict[str, str]:
    """The three headers of one try. `body` must be the very bytes that are sent.

    Several secrets give several signatures, so that receivers keep verifying while a secret rotates.
    """
    if not _ID.fullmatch(webhook_id) or "." in webhook_id:
        raise ValueError("a webhook id is printable ASCII without dots")
    signed = f"{webhook_id}.{timestamp_seconds}.".encode() + body
    signatures = (hmac.new(key_of(secret), signed, hashlib.sha256).digest() for secret in secret_list)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_seconds),
        "webhook-signature": " ".join("v1," + base64.b64encode(signature).decode() for signature in signatures),
    }
