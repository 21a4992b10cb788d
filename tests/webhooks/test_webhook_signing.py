"""Signatures, checked by the verifiers that receivers use."""

from __future__ import annotations

import base64
import time

import openai
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from worker.webhooks import signing

BODY = '{"id":"evt_1","object":"event","type":"job.succeeded","data":{"name":"käse 北京 🧀"}}'.encode()


def test_standardwebhooks_verifies_the_exact_bytes() -> None:
    secret = signing.new_secret()
    headers = signing.headers("evt_1", int(time.time()), BODY, [secret])
    assert Webhook(secret).verify(BODY, headers)["data"]["name"] == "käse 北京 🧀"
    for tampered in (BODY.replace(b"succeeded", b"failed"), BODY + b" "):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(tampered, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(signing.new_secret()).verify(BODY, headers)


def test_openai_unwraps() -> None:
    secret = signing.new_secret()
    headers = signing.headers("evt_1", int(time.time()), BODY, [secret])
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    assert client.webhooks.unwrap(BODY, headers).id == "evt_1"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(BODY, headers, secret=signing.new_secret())


def test_known_answer() -> None:
    """Computed with `openssl dgst -sha256 -mac HMAC` over `msg_1.1614265330.{"test": 2432232314}`."""
    secret = "whsec_" + base64.b64encode(bytes(range(24))).decode()
    headers = signing.headers("msg_1", 1614265330, b'{"test": 2432232314}', [secret])
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-signature"] == "v1,daJC9zjteVUEcGf6sESvuljSVDEsnQ3shawBrSwYgzU="


def test_every_secret_signs_while_one_rotates() -> None:
    old, new = signing.new_secret(), signing.new_secret()
    headers = signing.headers("evt_1", int(time.time()), BODY, [old, new])
    assert len(headers["webhook-signature"].split(" ")) == 2
    for secret in (old, new):
        Webhook(secret).verify(BODY, headers)


@pytest.mark.parametrize("secret", ["", "hunter2", "whsec_", "whsec_%%%", "whsec_c2hvcnQ=", "whsec_" + "A" * 400])
def test_bad_secrets_are_refused_without_repeating_them(secret: str) -> None:
    with pytest.raises(ValueError) as caught:
        signing.key_of(secret)
    assert not secret.removeprefix("whsec_") or secret not in str(caught.value)


@pytest.mark.parametrize("webhook_id", ["", "a.b", "a b", "ä", "x" * 129])
def test_ids_that_would_make_the_signed_text_ambiguous_are_refused(webhook_id: str) -> None:
    with pytest.raises(ValueError):
        signing.headers(webhook_id, 1, BODY, [signing.new_secret()])
