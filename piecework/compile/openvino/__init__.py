"""Pieces by OpenVINO: a piece's graph becomes a model of it on a named device. The package is optional."""
