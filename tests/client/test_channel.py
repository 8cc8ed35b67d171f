"""Addresses, channel settings and credentials."""

from __future__ import annotations

import subprocess

import grpc
import pytest

from qrnn_client import TLS, Client, InputError, UnavailableError
from qrnn_client._channel import CHANNEL_OPTIONS, channel_target
from qrnn_client.testing import FakeServer
from qrnn_protos.v1 import limits


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("localhost:9000", "dns:///localhost:9000"),
        ("scorer", "dns:///scorer:8001"),
        (" 10.0.0.5:8001 ", "dns:///10.0.0.5:8001"),
        ("[::1]:9000", "dns:///[::1]:9000"),
        ("[::1]", "dns:///[::1]:8001"),
        ("10.0.0.5:1,10.0.0.6", "ipv4:10.0.0.5:1,10.0.0.6:8001"),
        ("[::1]:1, [::2]:2", "ipv6:[::1]:1,[::2]:2"),
        ("dns:///scorers.internal:8001", "dns:///scorers.internal:8001"),
        ("unix:/run/qrnn.sock", "unix:/run/qrnn.sock"),
    ],
)
def test_target_in_every_form(given, expected):
    """Names, addresses, lists of addresses and gRPC's own names are understood."""
    assert channel_target(given) == expected


@pytest.mark.parametrize(
    "target",
    [
        *("", "host:", ":8001", "host:http", "host:0", "host:70000", "http://host:8001", "::1"),
        *("a:1,b:2", "10.0.0.5:1,[::1]:1", "10.0.0.5:1,"),
    ],
)
def test_target_that_is_none(target):
    """An address that cannot be meant is refused when the client is made."""
    with pytest.raises(InputError, match="target"):
        Client(target)


def test_channel_limits_are_the_shared_ones():
    """Both directions take the largest message, and pings are rarer than the server allows."""
    options = dict(CHANNEL_OPTIONS)

    assert options["grpc.max_send_message_length"] == limits.MAX_MESSAGE_BYTES
    assert options["grpc.max_receive_message_length"] == limits.MAX_MESSAGE_BYTES
    assert options["grpc.keepalive_time_ms"] == 1000 * limits.KEEPALIVE_PING_S
    assert options["grpc.keepalive_time_ms"] > 1000 * limits.KEEPALIVE_MIN_PING_INTERVAL_S


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and a server's and a client's certificate from it."""
    folder = tmp_path_factory.mktemp("certificates")
    days = ("-days", "2", "-nodes", "-newkey", "rsa:2048")
    openssl(folder, "req", "-x509", *days, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name in ("server", "client"):
        request = ("req", "-new", *days[2:], "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(folder, *request, "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=DNS:scorer.test\n")
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
        out = ("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem")
        openssl(folder, *sign, *out)
    return folder


@pytest.fixture
def tls_server(certificates, model):
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials(
        [pair], (certificates / "ca.pem").read_bytes(), require_client_auth=True
    )
    with FakeServer(model, credentials=credentials) as server:
        yield server


def test_tls_in_both_directions(certificates, tls_server, make_rows, assert_scored):
    """With the authority and its own certificate, a client scores over an encrypted connection."""
    tls = TLS(
        root_certificates=certificates / "ca.pem",
        private_key=certificates / "client.key",
        certificate=certificates / "client.pem",
        server_name="scorer.test",
    )
    rows = make_rows(2, 3)

    with Client(tls_server.target, tls=tls) as client:
        assert_scored(client.predict("sums", rows).outputs, rows)


@pytest.mark.parametrize("trusting", [False, True], ids=["unknown-authority", "no-certificate"])
def test_tls_that_is_refused_says_where_to_look(certificates, tls_server, quick_retry, trusting):
    """A server that is not trusted, or that does not trust the client, is told in the error."""
    root = certificates / ("ca.pem" if trusting else "client.pem")
    tls = TLS(root_certificates=root, server_name="scorer.test")

    with (
        Client(tls_server.target, tls=tls, retry=quick_retry, timeout_s=5) as client,
        pytest.raises(UnavailableError, match=rf"{tls_server.target}.*TLS"),
    ):
        client.models()


def test_tls_files_that_cannot_be_read(tmp_path):
    """A missing file is named, and half a key pair is refused."""
    with pytest.raises(InputError, match=r"root_certificates: cannot read .*none\.pem"):
        Client("host:1", tls=TLS(root_certificates=tmp_path / "none.pem"))
    with pytest.raises(InputError, match="go together"):
        TLS(private_key="client.key")
