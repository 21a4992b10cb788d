"""`POST /v1/completions`: a view on one job for each prompt, whose client waits for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from litestar import Response, post
from litestar.params import JSONBody

from api_gateway.openai_answers import CompletionChunks, completion, head_of
from api_gateway.openai_asks import completion_asks, wants_usage_chunk
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of, tenant_of
from api_gateway.routes.waiting import admit, answer_stream
from api_gateway.schemas.completions import Completion, CompletionRequest
from api_gateway.sse import KEEPALIVE, frame
from infra.contracts import Result, Usage

ROUTE = "POST /v1/completions"


@post("/v1/completions", status_code=200, responses=REFUSALS)
async def create_completion(
    data: JSONBody[CompletionRequest], request: AnyRequest
) -> Response[Completion] | Response[Any]:
    """Continues one or several prompts: texts or token ids. The answer's id holds the first job's: `cmpl-<job id>`."""
    gateway, has_usage, n = gateway_of(request), wants_usage_chunk(data), data.n or 1
    jobs = await admit(request, completion_asks(data), ROUTE)
    job_ids = [job.id for job in jobs]
    if data.stream:
        chunks = CompletionChunks(head_of(jobs[0], "cmpl"), n, has_usage)
        return answer_stream(request, job_ids, _frames(request, job_ids, chunks))
    jobs = await gateway.foreground.ends(job_ids, tenant_of(request), request.receive)
    results = [await gateway.book.result(job) or Result() for job in jobs]
    usages = [job.outcome.usage if job.outcome else Usage() for job in jobs]
    return Response(completion(head_of(jobs[0], "cmpl"), results, usages, n))


async def _frames(
    request: AnyRequest, job_ids: list[str], chunks: CompletionChunks
) -> AsyncGenerator[list[bytes], None]:
    usages: list[Usage] = []
    async with aclosing(gateway_of(request).foreground.events(job_ids)) as batches:
        async for index, events in batches:
            yield [frame(chunk) for event in events for chunk in chunks.of(index, event)] if events else [KEEPALIVE]
            usages += [event.body.usage for event in events if event.is_last and event.body.usage is not None]
    yield [frame(chunk) for chunk in chunks.last(usages)]
