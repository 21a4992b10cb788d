"""`POST /v1/chat/completions`: a view on one job, whose client waits for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from litestar import Response, post
from litestar.params import JSONBody

from api_gateway.openai_answers import ChatChunks, chat_completion, head_of
from api_gateway.openai_asks import chat_ask, wants_usage_chunk
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of, tenant_of
from api_gateway.routes.waiting import admit, answer_stream
from api_gateway.schemas.chat import ChatCompletion, ChatRequest
from api_gateway.sse import KEEPALIVE, frame
from infra.contracts import Event, Job, Result, Usage

ROUTE = "POST /v1/chat/completions"


@post("/v1/chat/completions", status_code=200, responses=REFUSALS)
async def create_chat_completion(
    data: JSONBody[ChatRequest], request: AnyRequest
) -> Response[ChatCompletion] | Response[Any]:
    """Answers a conversation. The answer's id holds the job's: `chatcmpl-<job id>`."""
    gateway, has_usage = gateway_of(request), wants_usage_chunk(data)
    [job] = await admit(request, [chat_ask(data)], ROUTE)
    if data.stream:
        chunks = ChatChunks(head_of(job, "chatcmpl"), has_usage)
        return answer_stream(request, [job.id], _frames(request, job, chunks))
    [job] = await gateway.foreground.ends([job.id], tenant_of(request), request.receive)
    usage = job.outcome.usage if job.outcome else Usage()
    return Response(chat_completion(head_of(job, "chatcmpl"), await gateway.book.result(job) or Result(), usage))


async def _frames(request: AnyRequest, job: Job, chunks: ChatChunks) -> AsyncGenerator[list[bytes], None]:
    last: Event | None = None
    async with aclosing(gateway_of(request).foreground.events([job.id])) as batches:
        async for _, events in batches:
            yield [frame(chunk) for event in events for chunk in chunks.of(event)] if events else [KEEPALIVE]
            last = events[-1] if events else last
    yield [frame(chunk) for chunk in chunks.last((last and last.body.usage) or Usage())]
