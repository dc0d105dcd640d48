"""One engine each, run in the engine's own virtual environment; no runner imports another."""
