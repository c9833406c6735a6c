"""Target model families."""
