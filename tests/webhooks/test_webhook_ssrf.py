"""Where webhooks may go. Every form in which a private address can be written is refused."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.webhooks.ssrf import Allowed, Resolver, TargetDenied, is_public, target_of

NOBODY = Allowed.parse("")

DENIED = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.254",
    "169.254.169.254", "169.254.0.1", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.8", "192.0.0.170",
    "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:169.254.169.254", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1",
    "64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "64:ff9b:1::10.0.0.1", "100::1", "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::",
    "2002:a00:1::1", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd12:3456:789a::1", "fe80::1", "fec0::1",
    "ff02::1", "ff0e::1", "4000::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.0", "126.255.255.255",
          "128.0.0.1", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.169.0.0", "223.255.255.255",
          "2606:4700::1111", "2a00:1450::1", "2001:4860:4860::8888", "2001:200::1", "::ffff:8.8.8.8",
          "64:ff9b::8.8.8.8"]  # fmt: skip


def resolver(*answers: list[str]) -> Resolver:
    """Answers in turn, the last one for ever."""
    rest = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return rest.pop(0) if len(rest) > 1 else rest[0]

    return resolve


@pytest.mark.parametrize("text", DENIED)
def test_denied(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(st.ip_addresses(v=4))
def test_never_wider_than_pythons_table_and_mapped_forms_are_judged_alike(address: ipaddress.IPv4Address) -> None:
    assert address.is_global or not is_public(address)
    for form in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(ipaddress.ip_address(form)) == is_public(address)
    for form in (f"::{address}", f"64:ff9b:1::{address}"):
        assert not is_public(ipaddress.ip_address(form))


@given(st.ip_addresses(v=6).filter(lambda address: address.ipv4_mapped is None))
def test_only_global_unicast_passes(address: ipaddress.IPv6Address) -> None:
    if is_public(address):
        assert address in ipaddress.ip_network("2000::/3") or address in ipaddress.ip_network("64:ff9b::/96")
        assert not address.is_private


@pytest.mark.parametrize("answer", [[address] for address in DENIED])
async def test_a_name_with_a_bad_address_is_refused(answer: list[str]) -> None:
    with pytest.raises(TargetDenied) as caught:
        await target_of("https://hooks.example/x", NOBODY, resolver(answer))
    assert not caught.value.for_good  # the name may be put right


@pytest.mark.parametrize("answer", [["8.8.8.8", "10.0.0.1"], ["2606:4700::1111", "8.8.8.8", "::ffff:127.0.0.1"]])
async def test_one_bad_address_among_good_ones_is_enough(answer: list[str]) -> None:
    with pytest.raises(TargetDenied):
        await target_of("https://hooks.example/x", NOBODY, resolver(answer))


async def test_no_address_and_errors_of_the_name_service_fail_closed() -> None:
    async def broken(host: str, port: int) -> list[str]:
        raise OSError("server failure")

    for resolve in (resolver([]), broken):
        with pytest.raises(OSError):
            await target_of("https://hooks.example/x", NOBODY, resolve)


@pytest.mark.parametrize(
    "url",
    ["ftp://example.com/", "file:///etc/passwd", "gopher://example.com", "//example.com/", "example.com", "", "http://",
     "http:///x", "https://user@example.com/", "https://user:word@example.com/", "http://[::1", "http://exa mple.com/",
     "http://example.com/\r\nx: y", "http://example.com:99999/", "http://.../", "http://" + "a" * 64 + ".com/"],
)  # fmt: skip
async def test_urls_that_are_none_are_refused_for_good(url: str) -> None:
    with pytest.raises(TargetDenied) as caught:
        await target_of(url, NOBODY, resolver(["8.8.8.8"]))
    assert caught.value.for_good


async def test_a_literal_is_refused_for_good() -> None:
    with pytest.raises(TargetDenied) as caught:
        await target_of("http://[::ffff:169.254.169.254]/", NOBODY, resolver(["::ffff:169.254.169.254"]))
    assert caught.value.for_good


async def test_a_good_target_is_taken_apart() -> None:
    target = await target_of("HTTPS://Bücher.Example:8443/a//b?c=d#e", NOBODY, resolver(["8.8.8.8", "8.8.8.8"]))
    assert (target.scheme, target.host, target.port, target.path) == (
        "https",
        "xn--bcher-kva.example",
        8443,
        "/a//b?c=d",
    )
    assert target.authority == "xn--bcher-kva.example:8443"
    assert target.addresses == ("8.8.8.8",)
    assert (await target_of("http://a.example", NOBODY, resolver(["8.8.8.8"]))).authority == "a.example"


@pytest.mark.parametrize(
    ("allowed", "url", "answer", "passes"),
    [("127.0.0.1", "http://127.0.0.1/", "127.0.0.1", True),
     ("127.0.0.0/8,::1", "http://x.example/", "127.9.9.9", True),
     ("127.0.0.0/8", "http://x.example/", "::ffff:127.0.0.1", True),
     ("::1", "http://[::1]/", "::1", True),
     ("hooks.internal", "http://HOOKS.internal./", "10.0.0.9", True),
     ("hooks.internal", "http://other.internal/", "10.0.0.9", False),
     ("10.1.0.0/16", "http://x.example/", "10.2.0.1", False),
     (" , ", "http://x.example/", "10.2.0.1", False)],
)  # fmt: skip
async def test_what_the_operator_allows(allowed: str, url: str, answer: str, passes: bool) -> None:
    if passes:
        assert (await target_of(url, Allowed.parse(allowed), resolver([answer]))).addresses
    else:
        with pytest.raises(TargetDenied):
            await target_of(url, Allowed.parse(allowed), resolver([answer]))


@pytest.mark.parametrize("text", ["10.0.0.1/8", "300.1.1.1", "1:2"])
def test_an_allow_list_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Allowed.parse(text)
