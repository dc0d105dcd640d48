"""Pieces by OpenVINO: a piece's graph becomes a model of it on a named device."""

from piecework.compile.openvino.compiler import OpenVinoCompiler as OpenVinoCompiler
