"""The `tandem` command: composition of the services and of what surrounds them, no serving logic."""
