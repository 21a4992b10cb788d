"""One try, against a real endpoint."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.webhooks.listener import Listener, status
from worker.webhooks.delivery import Sender
from worker.webhooks.schedule import Answered, Unanswered
from worker.webhooks.ssrf import Allowed, Resolver

LOOPBACK = Allowed.parse("127.0.0.0/8")
MakeSender = Callable[..., Sender]


@pytest.fixture
async def make_sender() -> AsyncIterator[MakeSender]:
    async with AsyncExitStack() as stack:

        def make(*, allowed: Allowed = LOOPBACK, timeout_seconds: float = 5.0, resolve: Resolver | None = None,
                 tls: ssl.SSLContext | None = None) -> Sender:  # fmt: skip
            sender = Sender(allowed=allowed, timeout_seconds=timeout_seconds, concurrency=4, resolve=resolve, tls=tls)
            stack.push_async_callback(sender.close)
            return sender

        yield make


def fixed(*answers: list[str]) -> Resolver:
    rest = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return rest.pop(0) if len(rest) > 1 else rest[0]

    return resolve


async def test_the_bytes_on_the_wire_are_the_bytes_given(make_sender: MakeSender) -> None:
    body = '{"name":"käse 北京 🧀"}'.encode()
    async with Listener() as listener:
        answer = await make_sender().send(f"{listener.url}/ä?q=1&r=%20", body, {"webhook-id": "evt_1"})
    assert answer == Answered(200)
    (received,) = listener.received
    assert received.method == "POST"
    assert received.path == "/hook/%C3%A4?q=1&r=%20"
    assert received.body == body
    assert received.headers["host"] == f"127.0.0.1:{listener.port}"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["webhook-id"] == "evt_1"


@pytest.mark.parametrize("code", [201, 204, 400, 404, 410, 429, 500, 503])
async def test_any_answer_is_told_as_it_is(make_sender: MakeSender, code: int) -> None:
    async with Listener(status(code)) as listener:
        assert await make_sender().send(listener.url, b"{}", {}) == Answered(code)


async def test_retry_after_in_both_forms(make_sender: MakeSender) -> None:
    later = formatdate(time.time() + 100, usegmt=True)
    answers = [status(503, f"retry-after: {text}") for text in ("17", later, "soon", "Wed, 99 Foo 2020")]
    async with Listener(*answers) as listener:
        sender = make_sender()
        told = [await sender.send(listener.url, b"{}", {}) for _ in answers]
    assert [one.status for one in told if isinstance(one, Answered)] == [503] * 4
    seconds = [one.retry_after_seconds for one in told if isinstance(one, Answered)]
    assert seconds[0] == 17
    assert seconds[1] is not None and 0 < seconds[1] <= 100
    assert seconds[2:] == [None, None]


async def test_redirects_are_not_followed(make_sender: MakeSender) -> None:
    async with Listener() as internal:
        for target in ("http://169.254.169.254/latest/meta-data/", internal.url, "//127.0.0.1/"):
            async with Listener(status(302, f"location: {target}")) as listener:
                assert await make_sender().send(listener.url, b"{}", {}) == Answered(302)
        assert internal.num_connections == 0


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "[::ffff:127.0.0.1]", "[::1]",
     "[::127.0.0.1]", "[64:ff9b::127.0.0.1]"],
)  # fmt: skip
async def test_no_spelling_of_a_private_address_is_dialled(make_sender: MakeSender, host: str) -> None:
    async with Listener() as internal:
        sender = make_sender(allowed=Allowed.parse(""))
        answer = await sender.send(f"http://{host}:{internal.port}/", b"{}", {})
        assert isinstance(answer, Unanswered)
        assert internal.num_connections == 0


async def test_a_name_that_changes_its_mind_gains_nothing(make_sender: MakeSender) -> None:
    """Flip-flop name service: the address judged is the address dialled, because the name is looked up once a try."""
    async with Listener() as internal:
        lookups: list[str] = []

        async def flip_flop(host: str, port: int) -> list[str]:
            lookups.append(host)
            return ["127.0.0.9"] if len(lookups) % 2 else ["127.0.0.1"]  # a good address, then the internal one

        sender = make_sender(allowed=Allowed.parse("127.0.0.9"), resolve=flip_flop)
        url = f"http://rebind.example:{internal.port}/"
        answers = [await sender.send(url, b"{}", {}) for _ in range(4)]
        assert len(lookups) == 4
        assert all(isinstance(answer, Unanswered) for answer in answers)
        assert internal.num_connections == 0


async def test_a_path_that_looks_like_a_host_stays_a_path(make_sender: MakeSender) -> None:
    async with Listener() as internal, Listener() as listener:
        url = f"http://127.0.0.1:{listener.port}//127.0.0.1:{internal.port}/x"
        assert await make_sender().send(url, b"{}", {}) == Answered(200)
        assert internal.num_connections == 0
        assert listener.received[0].path == f"//127.0.0.1:{internal.port}/x"


async def test_proxy_variables_are_ignored(make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Listener() as proxy, Listener() as listener:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await make_sender().send(listener.url, b"{}", {}) == Answered(200)
        assert (proxy.num_connections, listener.num_connections) == (0, 1)


async def test_an_endpoint_that_accepts_and_hangs_ends_with_the_deadline(make_sender: MakeSender) -> None:
    async with Listener(60.0) as listener:
        answer = await make_sender(timeout_seconds=0.3).send(listener.url, b"{}", {})
    assert answer == Unanswered("no answer within 0.3 s")


async def test_a_dead_name_service_ends_with_the_deadline(make_sender: MakeSender) -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    answer = await make_sender(timeout_seconds=0.2, resolve=never).send("http://hooks.example/", b"{}", {})
    assert answer == Unanswered("no answer within 0.2 s")


async def test_an_answer_without_an_end_counts_by_its_status(make_sender: MakeSender) -> None:
    endless = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + b"x" * 200_000
    broken = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
    async with Listener(endless, broken) as listener:
        sender = make_sender()
        assert await sender.send(listener.url, b"{}", {}) == Answered(200)
        assert await sender.send(listener.url, b"{}", {}) == Answered(200)


async def test_nobody_there_and_nonsense_are_no_answers(make_sender: MakeSender) -> None:
    async with Listener(b"SSH-2.0-nonsense\r\n\r\n", b"") as listener:
        for _ in range(2):
            assert isinstance(await make_sender().send(listener.url, b"{}", {}), Unanswered)
    assert isinstance(await make_sender().send(listener.url, b"{}", {}), Unanswered)  # closed meanwhile


async def test_the_next_address_is_tried_where_one_refuses(make_sender: MakeSender) -> None:
    async with Listener() as listener:
        sender = make_sender(resolve=fixed(["127.0.0.9", "127.0.0.1"]))
        assert await sender.send(f"http://hooks.example:{listener.port}/", b"{}", {}) == Answered(200)
        assert listener.received[0].headers["host"] == f"hooks.example:{listener.port}"


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        skip_or_fail("openssl is not on PATH")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


async def test_tls_is_checked_against_the_name_though_the_address_is_dialled(
    make_sender: MakeSender, tmp_path: Path
) -> None:
    key, cert = certificate(tmp_path, "hooks.example")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(cert, key)
    seen: list[str | None] = []
    server_tls.sni_callback = lambda _socket, name, _context: seen.append(name)
    client_tls = ssl.create_default_context(cafile=str(cert))
    async with Listener(tls=server_tls) as listener:
        sender = make_sender(resolve=fixed(["127.0.0.1"]), tls=client_tls)
        assert await sender.send(f"https://hooks.example:{listener.port}/", b"{}", {}) == Answered(200)
        assert seen == ["hooks.example"]
        assert listener.received[0].headers["host"] == f"hooks.example:{listener.port}"
        wrong_name = await sender.send(f"https://other.example:{listener.port}/", b"{}", {})
        assert isinstance(wrong_name, Unanswered) and "certificate" in wrong_name.reason.lower()
        unknown_authority = await make_sender(resolve=fixed(["127.0.0.1"])).send(
            f"https://hooks.example:{listener.port}/", b"{}", {}
        )
        assert isinstance(unknown_authority, Unanswered)
        assert len(listener.received) == 1
