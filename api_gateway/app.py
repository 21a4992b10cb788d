"""The ASGI application: routes around one `Gateway`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.openapi.config import OpenAPIConfig

from api_gateway.auth import Operators, only_callers, only_operators
from api_gateway.bodies import StrictBody
from api_gateway.docs_page import DocsPage
from api_gateway.errors import ANSWERS
from api_gateway.gateway import Gateway
from api_gateway.headers import LeanRequest
from api_gateway.observing import observing
from api_gateway.request_ids import add_request_id
from api_gateway.routes import FOR_ANYONE, FOR_CALLERS, FOR_OPERATORS
from infra.blobs import Blobs
from infra.runs import RunStore
from infra.settings import GatewaySettings
from infra.store import JobStore
from infra.telemetry import Telemetry

DESCRIPTION = (
    "Queue-driven LLM inference. A job is one unit of work with a durable record and a resumable event stream; "
    "the OpenAI routes are views on jobs. Unknown fields are refused."
)


def create_app(
    store: JobStore,
    blobs: Blobs,
    settings: GatewaySettings | None = None,
    *,
    runs: RunStore | None = None,
    telemetry: Telemetry | None = None,
) -> Litestar:
    """The application over a store. It starts and stops its own tasks; the stores are closed by whoever opened them."""
    gateway = Gateway.of(store, blobs, settings or GatewaySettings(), runs=runs, telemetry=telemetry)

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncGenerator[None, None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    callers = Router(
        "/",
        route_handlers=list(FOR_CALLERS),
        middleware=[only_callers(gateway.keyring)],
        dto=StrictBody,
        return_dto=None,
    )
    operators = Router(
        "/",
        route_handlers=list(FOR_OPERATORS),
        middleware=[only_operators(Operators.from_settings(gateway.settings.admin_keys))],
    )
    return Litestar(
        route_handlers=[callers, operators, *FOR_ANYONE],
        lifespan=[lifespan],
        state=State({"gateway": gateway}),
        middleware=[observing(gateway.telemetry, gateway.metrics)],
        request_class=LeanRequest,
        before_send=[add_request_id],
        exception_handlers=ANSWERS,
        request_max_body_size=gateway.settings.max_body_bytes,
        openapi_config=OpenAPIConfig(
            "Millstream",
            "1",
            description=DESCRIPTION,
            path="/docs",
            render_plugins=[DocsPage(path="/")],
            use_handler_docstrings=True,
        ),
        logging_config=None,
    )
