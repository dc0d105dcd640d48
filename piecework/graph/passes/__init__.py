"""Passes over traced graphs: the manager, the two kinds of passes, and what they are checked by."""

from piecework.graph.passes.base import EACH_LAYER, GraphPass, Match, Outcome, Pass, PassContext
from piecework.graph.passes.bounds import BITWISE, Bound, tolerance
from piecework.graph.passes.canonicalise import canonicalise
from piecework.graph.passes.editor import Editor
from piecework.graph.passes.errors import PassError, PatternError, VerificationError
from piecework.graph.passes.manager import PassManager
from piecework.graph.passes.registry import available, make_manager
from piecework.graph.passes.report import PassReport, Report, Rewrite
from piecework.graph.passes.rewrite import PatternPass

__all__ = [
    "BITWISE",
    "EACH_LAYER",
    "Bound",
    "Editor",
    "GraphPass",
    "Match",
    "Outcome",
    "Pass",
    "PassContext",
    "PassError",
    "PassManager",
    "PassReport",
    "PatternError",
    "PatternPass",
    "Report",
    "Rewrite",
    "VerificationError",
    "available",
    "canonicalise",
    "make_manager",
    "tolerance",
]
