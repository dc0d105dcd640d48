"""The version, in one place that needs no import of the engine."""

__version__ = "0.1.0"
