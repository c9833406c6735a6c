"""The two services. Neither imports the other."""
