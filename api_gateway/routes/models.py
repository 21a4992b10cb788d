"""`/v1/models`: what is served, from the workers' cards; they stay when no worker runs."""

from __future__ import annotations

from litestar import get
from litestar.params import FromPath

from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of
from api_gateway.schemas.models import ModelList, ModelView
from infra.contracts import ModelCard


@get("/v1/models", responses=REFUSALS)
async def list_models(request: AnyRequest) -> ModelList:
    """The models that jobs can be submitted for."""
    cards = await gateway_of(request).cards.all()
    return ModelList(data=[_view(card) for _, card in sorted(cards.items())])


@get("/v1/models/{model:path}", responses=REFUSALS)
async def get_model(model: FromPath[str], request: AnyRequest) -> ModelView:
    """One model. Its name may have slashes."""
    return _view(await gateway_of(request).cards.get(model.removeprefix("/")))


def _view(card: ModelCard) -> ModelView:
    return ModelView(
        id=card.alias,
        created=card.created_ms // 1000,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        has_chat_template=card.chat_template is not None,
        numerics_profile=card.profile,
        prefill_tokens_per_s=card.prefill_tokens_per_s,
        decode_tokens_per_s=card.decode_tokens_per_s,
    )
