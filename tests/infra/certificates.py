"""Certificates of an authority of our own, made anew for each test: a server's, a client's."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files. The server's certificate is of `localhost` and 127.0.0.1."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    @property
    def directives(self) -> list[str]:
        """Of a server that speaks TLS to whoever shows a certificate of the authority."""
        return [
            f"tls-cert-file {self.server}",
            f"tls-key-file {self.server_key}",
            f"tls-ca-cert-file {self.authority}",
            "tls-auth-clients yes",
        ]

    @property
    def query(self) -> str:
        """The end of a client's URL."""
        return f"?ssl_ca_certs={self.authority}&ssl_certfile={self.client}&ssl_keyfile={self.client_key}"


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("Test authority", authority_key, "Test authority", authority_key, is_authority=True)
    files = {"authority": folder / "authority.crt"}
    files["authority"].write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    for name in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, "Test authority", authority_key)
        files[name], files[f"{name}_key"] = folder / f"{name}.crt", folder / f"{name}.key"
        files[name].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[f"{name}_key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return Certificates(**files)


def _certificate(name: str, key: Key, issuer: str, issuer_key: Key, *, is_authority: bool = False) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if is_authority:
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = builder.add_extension(usage, critical=True)
    else:
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
