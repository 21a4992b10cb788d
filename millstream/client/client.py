"""The Python client: `from millstream import Client`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from api_gateway.schemas.jobs import JobList, JobView
from api_gateway.schemas.runs import RunOut
from millstream.client.caller import Caller
from millstream.client.job import JobHandle
from millstream.client.run import RunHandle

DEFAULT_URL = "http://127.0.0.1:8080"

Tier = Literal["interactive", "standard", "bulk"]
Style = Literal["abstract", "bullets", "headline"]


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class Client:
    """A gateway's client. Calls are retried where that is safe; errors are `ClientError`s.

    url: None for MILLSTREAM_URL, or http://127.0.0.1:8080
    api_key: None for MILLSTREAM_API_KEY, or none
    timeout_seconds: for an answer that does not wait for a job
    """

    def __init__(self, url: str | None = None, *, api_key: str | None = None, timeout_seconds: float = 30.0) -> None:
        self._caller = Caller(
            url or os.environ.get("MILLSTREAM_URL") or DEFAULT_URL,
            api_key=api_key or os.environ.get("MILLSTREAM_API_KEY"),
            timeout_seconds=timeout_seconds,
        )

    @property
    def url(self) -> str:
        return self._caller.url

    def submit(
        self,
        input: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        model: str,
        params: Mapping[str, Any] | None = None,
        tier: Tier = "standard",
        priority: int = 0,
        deadline: float | str | None = None,
        queue_ttl: float | None = None,
        attempt_timeout: float | None = None,
        webhook: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> JobHandle:
        """Submits a job: a text or token ids to continue, or chat messages to answer.

        Sent with an idempotency key (drawn if not given), so that a repeated call is the same job.
        """
        body = {
            "model": model,
            "input": input,
            "params": params or {},
            "tier": tier,
            "priority": priority,
            "deadline": deadline,
            "queue_ttl": queue_ttl,
            "attempt_timeout": attempt_timeout,
            "webhook": webhook,
            "metadata": metadata or {},
        }
        key = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self.job(self._caller.call("POST", "/v1/jobs", JobView, body=body, headers=key).id)

    def job(self, job_id: str) -> JobHandle:
        """A handle to a job known by its id; nothing is asked yet."""
        return JobHandle(job_id, self._caller)

    def jobs(self, *, status: str | None = None, model: str | None = None, page_size: int = 100) -> Iterator[JobView]:
        """Our jobs, newest first, read page by page as they are taken."""
        after: str | None = None
        while True:
            query = {"status": status, "model": model, "after": after, "limit": page_size}
            page = self._caller.call("GET", "/v1/jobs", JobList, query=query)
            yield from page.data
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    def summarize(
        self,
        documents: Iterable[str | Mapping[str, Any]],
        *,
        model: str,
        style: Style = "abstract",
        template: str | None = None,
        target_tokens: int = 128,
        chunk_tokens: int | None = None,
        overlap_tokens: int = 0,
        fan_in: int = 8,
        language: str | None = None,
        tier: Tier = "bulk",
        priority: int = 0,
        deadline: float | str | None = None,
        webhook: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> RunHandle:
        """Starts a run that summarizes documents: texts, or mappings with `text` or `uri`, and `id` and `name`.

        A bad document gets an error of its own. Sent with an idempotency key, as `submit` is.
        """
        body = {
            "documents": [{"text": one} if isinstance(one, str) else one for one in documents],
            "model": model,
            "style": style,
            "template": template,
            "target_tokens": target_tokens,
            "chunk_tokens": chunk_tokens,
            "overlap_tokens": overlap_tokens,
            "fan_in": fan_in,
            "language": language,
            "tier": tier,
            "priority": priority,
            "deadline": deadline,
            "webhook": webhook,
            "metadata": metadata or {},
        }
        key = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self.run(self._caller.call("POST", "/v1/runs/summarize", RunOut, body=body, headers=key).id)

    def run(self, run_id: str) -> RunHandle:
        """A handle to a run known by its id; nothing is asked yet."""
        return RunHandle(run_id, self._caller)

    def models(self) -> list[str]:
        """Names of the models that are served."""
        return [card.id for card in self._caller.call("GET", "/v1/models", _ModelList).data]

    def close(self) -> None:
        self._caller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
