"""The step loop of the target and what it is made of."""
