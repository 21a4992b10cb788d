"""`millstream pipelines`"""

from __future__ import annotations

from infra.settings import PipelineSettings, QueueSettings, StoreSettings
from millstream.flags import takes_settings
from millstream.stack.address import joining


@takes_settings
def pipelines(store: StoreSettings, queue: QueueSettings, settings: PipelineSettings) -> int:
    """Runs the steps of runs: splits documents, feeds their jobs through the queue, joins the summaries."""
    from worker.runs.pipelines import run

    return run(joining(store), settings, queue=queue)
