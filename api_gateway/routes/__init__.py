"""The routes, one file for each resource."""

from __future__ import annotations

from api_gateway.routes.chat import create_chat_completion
from api_gateway.routes.completions import create_completion
from api_gateway.routes.events import job_events
from api_gateway.routes.health import healthz, metrics, readyz
from api_gateway.routes.internal import pause_lane, resume_lane, scale
from api_gateway.routes.jobs import (
    cancel_job,
    create_job,
    create_jobs,
    delete_job,
    get_job,
    get_timeline,
    list_jobs,
)
from api_gateway.routes.models import get_model, list_models
from api_gateway.routes.runs import cancel_run, create_summarize_run, get_output, get_report, get_run
from api_gateway.routes.schema import home, openapi_document

# Routes for known callers, for operators, and for anyone who can reach this gateway.
FOR_CALLERS = (
    create_job, create_jobs, get_job, list_jobs, cancel_job, delete_job, get_timeline, job_events,
    create_summarize_run, get_run, cancel_run, get_report, get_output,
    create_chat_completion, create_completion, list_models, get_model,
)  # fmt: skip
FOR_OPERATORS = (pause_lane, resume_lane)
FOR_ANYONE = (healthz, readyz, metrics, scale, openapi_document, home)

__all__ = ["FOR_ANYONE", "FOR_CALLERS", "FOR_OPERATORS"]
