"""The version of the package; stated only here."""

__version__ = "0.1.0"
