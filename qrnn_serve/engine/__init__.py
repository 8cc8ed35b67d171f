"""Queue, batches and replicas. Knows no QRNN and no gRPC."""
