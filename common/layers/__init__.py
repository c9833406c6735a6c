"""Building blocks of both models: functions over plain tensors, no state of their own."""
