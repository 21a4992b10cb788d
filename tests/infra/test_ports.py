"""Ports for servers: free, and out of the way of outgoing connections."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infra import ports
from infra.ports import FIRST, LAST, free_port
from tests.conftest import skip_or_fail


def test_a_server_can_listen_there() -> None:
    for _ in range(20):
        port = free_port()
        assert FIRST <= port < LAST
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_outgoing_connections_get_others() -> None:
    kept = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not kept.exists():
        skip_or_fail("this system does not say which ports it gives to outgoing connections")
    assert int(kept.read_text().split()[0]) >= LAST


def test_a_port_in_use_is_passed_over_and_none_left_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(ports, "FIRST", port)
    monkeypatch.setattr(ports, "LAST", port + 1)
    assert free_port() == port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="no free port"):
        free_port()


def test_an_address_of_another_machine_is_said_at_once() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
