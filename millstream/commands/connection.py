"""How client commands find their gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from millstream.errors import CommandError, UsageError

if TYPE_CHECKING:
    from millstream.client.client import Client


@dataclass(frozen=True, kw_only=True)
class Connection:
    url: Annotated[str, Parameter(env_var="MILLSTREAM_URL", help="the gateway")] = "http://127.0.0.1:8080"
    api_key: Annotated[
        str | None, Parameter(env_var="MILLSTREAM_API_KEY", help="where the gateway asks for one", show_default=False)
    ] = None

    def open(self) -> Client:
        from millstream.client.client import Client

        return Client(self.url, api_key=self.api_key)

    @staticmethod
    def only_model(client: Client) -> str:
        """The one model that is served. Raises where there is none, or more than one to choose from."""
        match client.models():
            case [model]:
                return model
            case []:
                raise CommandError(f"{client.url} serves no model yet; start a worker: millstream worker")
            case models:
                raise UsageError(f"{client.url} serves several models; name one with --model: {', '.join(models)}")


ConnectionFlags = Annotated[Connection, Parameter(name="*", group="Connection")]
