"""Passes over traced graphs: the manager, the two kinds of passes, and what they are checked by."""

from piecework.graph.passes.base import AT_LEAST_ONE, EACH_LAYER, GraphPass, Match, Outcome, Pass, PassContext
from piecework.graph.passes.bounds import BITWISE, Bound, tolerance
from piecework.graph.passes.canonicalise import canonicalise
from piecework.graph.passes.editor import Editor
from piecework.graph.passes.errors import PassError, PatternError, VerificationError
from piecework.graph.passes.manager import PassManager
from piecework.graph.passes.registry import available, make_manager
from piecework.graph.passes.report import PassReport, Report, Rewrite
from piecework.graph.passes.rewrite import PatternPass
from piecework.graph.passes.sets import FusionPlan
from piecework.graph.passes.structure import LayerInputs, Structure

__all__ = [
    "AT_LEAST_ONE",
    "BITWISE",
    "EACH_LAYER",
    "Bound",
    "Editor",
    "FusionPlan",
    "GraphPass",
    "LayerInputs",
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
    "Structure",
    "VerificationError",
    "available",
    "canonicalise",
    "make_manager",
    "tolerance",
]
