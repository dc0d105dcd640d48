"""What can go wrong with a pass; every message begins with the pass's name."""

from __future__ import annotations

from piecework.errors import PieceworkError


class PassError(PieceworkError):
    """A pass that failed or missed its expectation. `name` is the pass, `reason` says why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"pass {name}: {reason}")


class PatternError(PassError):
    """A pattern or replacement function that is not one; found before any graph is touched."""


class VerificationError(PassError):
    """A rewrite that changed numbers. `error` is what was measured, `allowed` what the pass declares."""

    def __init__(self, name: str, reason: str, error: float, allowed: float) -> None:
        self.error = error
        self.allowed = allowed
        super().__init__(name, reason)
