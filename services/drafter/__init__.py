"""The drafter: turns the target's captured hidden states into draft blocks."""
