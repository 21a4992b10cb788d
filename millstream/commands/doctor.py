"""`millstream doctor`"""

from __future__ import annotations

from infra.settings import GatewaySettings, StoreSettings, WorkerSettings
from millstream.flags import takes_settings


@takes_settings
def doctor(store: StoreSettings, gateway: GatewaySettings, worker: WorkerSettings) -> int:
    """Checks Python, torch, server, model, disk, memory, compiler and port with the settings given, and says how to
    mend what is missing. Exit code 1 if something cannot work.
    """
    from millstream.doctor.checks import Level, findings

    num_problems = 0
    for finding in findings(store, gateway, worker):
        print(f"{finding.level:<8} {finding.name:<9} {finding.detail}", flush=True)
        if finding.remedy is not None:
            print(f"{'':<8} {'':<9} -> {finding.remedy}", flush=True)
        num_problems += finding.level is Level.PROBLEM
    if num_problems:
        print(f"{num_problems} of these must be mended")
    return 1 if num_problems else 0
