"""A package, so that no installed package of this name hides it."""
