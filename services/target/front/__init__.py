"""The edge of the target: gRPC in, token deltas out. No torch."""
