"""How to reach a server: address, channel settings, credentials. Opens nothing itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from qrnn_client._errors import InputError
from qrnn_protos.v1.limits import DEFAULT_PORT, KEEPALIVE_PING_S, MAX_MESSAGE_BYTES
from qrnn_protos.v1.prediction_pb2 import DESCRIPTOR

ChannelOptions = Sequence[tuple[str, str | int]]

_SERVICE = DESCRIPTOR.services_by_name["PredictionService"].full_name
PREDICT = f"/{_SERVICE}/Predict"
LIST_MODELS = f"/{_SERVICE}/ListModels"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

# Every address of the target gets its share of the calls, and a dead one gets none.
_SERVICE_CONFIG = '{"loadBalancingConfig": [{"round_robin": {}}]}'

CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", _SERVICE_CONFIG),
    # A dead host is noticed while a call is under way; idle channels stay silent.
    ("grpc.keepalive_time_ms", KEEPALIVE_PING_S * 1000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A long predict sends no data while it runs, and still wants to know that its server lives.
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC waits up to two minutes between connection attempts; a restarted server is found sooner.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """Encrypt the connection and check the server's certificate.

    Attributes:
        root_certificates: PEM file of the authorities to trust; None for those that gRPC ships.
        private_key: PEM file of this client's key, when the server asks clients who they are.
        certificate: PEM file of this client's certificate; goes with `private_key`.
        server_name: Name that the server's certificate bears, where it is not the target's.
    """

    root_certificates: str | Path | None = None
    private_key: str | Path | None = None
    certificate: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate is None):
            raise InputError("TLS: private_key and certificate go together, only one was given")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InputError: A file cannot be read.
        """
        return grpc.ssl_channel_credentials(
            root_certificates=_read("root_certificates", self.root_certificates),
            private_key=_read("private_key", self.private_key),
            certificate_chain=_read("certificate", self.certificate),
        )

    @property
    def channel_options(self) -> ChannelOptions:
        """Settings that the channel needs beside the credentials."""
        if self.server_name is None:
            return ()
        return (("grpc.ssl_target_name_override", self.server_name),)


def channel_target(target: str) -> str:
    """Return `target` as gRPC takes it.

    Args:
        target: HOST:PORT; HOST alone for the default port; several IP:PORT with commas between, or
            a name with several addresses, to share calls among servers; or any gRPC name such as
            "dns:///host:8001" or "unix:/path".

    Raises:
        InputError: It is none of these.
    """
    target = target.strip()
    if not target:
        raise InputError("target: expected HOST:PORT, got an empty string")
    if target.startswith(("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:", "vsock:")):
        return target
    addresses = [_with_port(part.strip()) for part in target.split(",")]
    if len(addresses) == 1:
        return f"dns:///{addresses[0]}"
    families = {_family(address) for address in addresses}
    if len(families) > 1:
        raise InputError(f"target: IPv4 and IPv6 addresses cannot be mixed, got {target!r}")
    return f"{families.pop()}:{','.join(addresses)}"


def _with_port(address: str) -> str:
    if "://" in address or not address:
        raise InputError(f"target: expected HOST:PORT, got {address!r}")
    if address.count(":") > 1 and not address.startswith("["):
        raise InputError(f"target: expected an IPv6 address in brackets, got {address!r}")
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"{address}:{DEFAULT_PORT}"
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise InputError(f"target: expected HOST:PORT with a port from 1 to 65535, got {address!r}")
    return address


def _family(address: str) -> str:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        raise InputError(
            f"target: several servers are named by their IP addresses, got {host!r}; "
            "or use one name that has an address for each"
        ) from None


def _read(field: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"TLS.{field}: cannot read {path}: {error.strerror}") from error
