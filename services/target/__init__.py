"""The target: prefill, verify, sampling, and the stream to the caller."""
