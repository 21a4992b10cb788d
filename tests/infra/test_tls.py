"""TLS with a real server: our authority, our certificate, the server's name; and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.chaos.clusters import clustered
from infra.embedded import EmbeddedServer
from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.jobs import RedisJobs
from infra.ports import free_port
from tests.conftest import skip_or_fail
from tests.infra.certificates import Certificates, make_certificates
from tests.infra.jobs_for_tests import ALIAS, claimed, submitted, success
from worker.runs.app import make_app


def binary_with_tls() -> Path:
    """A server program that was built with TLS; the bundled one is not."""
    found = shutil.which("redis-server")
    if found is None:
        skip_or_fail(
            "no redis-server on PATH, and the bundled server has no TLS; on Debian: apt-get install redis-server"
        )
    return Path(str(found))


@dataclass
class Secure:
    certificates: Certificates
    password: str
    port: int

    def url(self, query: str | None = None, *, host: str = "127.0.0.1") -> str:
        query = self.certificates.query if query is None else query
        return f"rediss://:{self.password}@{host}:{self.port}/0{query}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    certificates, port = make_certificates(folder / "certificates"), free_port()
    directives = ["bind 127.0.0.1 127.0.0.2", f"tls-port {port}", *certificates.directives]
    with EmbeddedServer(folder / "server", binary=binary_with_tls(), directives=directives) as url:
        yield Secure(certificates, urlsplit(url).password or "", port)


async def test_a_job_lives_over_tls(secure: Secure) -> None:
    for host in ("127.0.0.1", "localhost"):
        jobs = await RedisJobs.connect(secure.url(host=host))
        lane = await jobs.open_lane(ALIAS)
        job_id = await submitted(jobs, lane)
        await jobs.wait_for_work([lane], timeout=0.1)  # the doorbells have connections of their own
        await jobs.wait_for_events([lane], timeout=0.1)
        claim = await claimed(jobs, lane)
        assert claim.job.id == job_id
        assert await jobs.commit(claim.hold, success())
        await jobs.close()


@pytest.mark.parametrize("fault", ["no authority", "no certificate", "another authority", "no TLS"])
async def test_what_does_not_prove_itself_is_refused(secure: Secure, tmp_path: Path, fault: str) -> None:
    certificates = secure.certificates
    client = f"ssl_certfile={certificates.client}&ssl_keyfile={certificates.client_key}"
    url = {
        "no authority": secure.url(f"?{client}"),
        "no certificate": secure.url(f"?ssl_ca_certs={certificates.authority}"),
        "another authority": secure.url(f"?{client}&ssl_ca_certs={make_certificates(tmp_path).authority}"),
        "no TLS": secure.url("").replace("rediss://", "redis://"),
    }[fault]
    with pytest.raises((StoreUnavailable, StoreUnsuitable)) as refused:
        await RedisJobs.connect(url)
    assert secure.password not in str(refused.value)


async def test_the_name_is_checked_unless_told_otherwise(secure: Secure) -> None:
    with pytest.raises(StoreUnavailable, match="IP address mismatch"):
        await RedisJobs.connect(secure.url(host="127.0.0.2"))
    unchecked = f"{secure.certificates.query}&ssl_check_hostname=false"
    jobs = await RedisJobs.connect(secure.url(unchecked, host="127.0.0.2"))
    await jobs.close()


async def test_celery_sends_its_steps_over_tls(secure: Secure) -> None:
    app = make_app(secure.url())
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, timeout=5)
        assert connection.connected


async def test_a_cluster_over_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with clustered(tmp_path / "servers", binary_with_tls(), tls=certificates.directives) as cluster:
        jobs = await RedisJobs.connect(f"{cluster.tls_url}{certificates.query}")
        for alias in ("a", "b", "c"):
            lane = await jobs.open_lane(alias)
            await submitted(jobs, lane)
            assert await jobs.commit((await claimed(jobs, lane)).hold, success())
        await jobs.close()
