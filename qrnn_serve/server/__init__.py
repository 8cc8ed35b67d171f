"""The gRPC server: decode, validate, submit, encode; health, limits, shutdown."""
