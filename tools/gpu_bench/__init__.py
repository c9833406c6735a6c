"""`tandem bench --device cuda`: the closed loop inside the core, streaming, identity and soak on a GPU."""
