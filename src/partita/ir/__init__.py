"""The nouns: frozen, value-equal, JSON-able descriptions that every other layer reads or produces.

Standard library only.  A noun never holds a torch object, a callable or a file handle, so a plan written on one
machine reads the same on any other.
"""
