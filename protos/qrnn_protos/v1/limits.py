"""Facts of the wire that both sides must agree on."""

DEFAULT_PORT = 8001

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message either side takes or sends. gRPC's own default of 4 MiB holds 41 timesteps of 64
rows of 400 features."""

KEEPALIVE_PING_S = 60
"""A client with a call under way pings this often."""

KEEPALIVE_MIN_PING_INTERVAL_S = 10
"""The server accepts pings this often before it calls them too many and closes the connection."""
