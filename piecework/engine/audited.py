"""A runner whose steps are audited: every so often one is computed on the reference, too."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from piecework.config import EngineConfig
from piecework.engine.reference import Reference, TooLongError
from piecework.failsafe.audit import Audit, AuditPolicy, nrmse
from piecework.profile import Profile
from piecework.runner.batch import BatchItem, ItemResult
from piecework.workers.serving.runner import Named, StepRunner

log = logging.getLogger("piecework.failsafe")


class AuditedRunner:
    """Runs steps on `runner`, for the engine; see StepRunner.

    Of the steps that draw tokens the first is audited and each `every`-th from there, all rows that draw, the
    worst of which counts; any other step is once it gives numbers that are none. The reference computes from
    token ids, in its own cache: what is wrong in the runner's cache is seen in the numbers that come of it.
    """

    def __init__(self, runner: StepRunner, reference: Reference, audit: Audit) -> None:
        self._runner = runner
        self._reference = reference
        self._audit = audit

    @property
    def profile(self) -> Profile:
        """Where stages are timed."""
        return self._runner.profile

    @property
    def cache(self) -> Any:
        """The runner's KV cache."""
        return self._runner.cache

    @property
    def device(self) -> Named:
        """Where steps run."""
        return self._runner.device

    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step.

        Raises AuditMissError where the results are wrong and the reference is to go on: nobody gets them.
        """
        return self.examine(items)[0]

    def examine(self, items: Sequence[BatchItem]) -> tuple[list[ItemResult], Tensor | None]:
        """Run one step and return the logits, too, where it was audited; see `execute`."""
        drawing = [item for item in items if item.sampling is not None]
        if not drawing or not self._audit.due():
            results = self._runner.execute(items)
            if any(result.error is not None for result in results):
                self._doubt(items, results)
            return results, None
        try:
            results, logits = self._runner.examine(items)
        except BaseException:
            self._audit.again()  # nothing was looked at, so the next step is due
            raise
        assert logits is not None, "something was drawn"
        with self.profile.time("audit"):
            expected = self._expected(drawing)
        if expected is not None:
            miss = self._audit.judge(self.device.name, nrmse(logits, expected))
            if miss is not None and self._audit.policy.switch:
                raise miss
        return results, logits

    def _doubt(self, items: Sequence[BatchItem], results: Sequence[ItemResult]) -> None:
        """Audit rows without a finite number: where the reference has some, it is not the model's fault."""
        pairs = zip(items, results, strict=True)
        bad = [item for item, result in pairs if result.error is not None and item.sampling is not None]
        expected = None if self._audit.ended is not None or not bad else self._expected(bad)
        if expected is not None and bool(expected.isfinite().all()):
            miss = self._audit.judge(self.device.name, math.nan)
            if miss is not None and self._audit.policy.switch:
                raise miss

    def _expected(self, drawing: Sequence[BatchItem]) -> Tensor | None:
        """The reference's logits [R, V]; None where it can't tell."""
        try:
            return self._reference.logits([_tokens(item) for item in drawing])
        except TooLongError as error:
            log.info("a step is not audited: %s", error)
        except Exception as error:
            why = f"the reference {self._reference.device} failed, nothing is audited any more: {error}"
            self._audit.end(why)
            log.warning("%s", why)
        self._audit.skip()
        return None


def make_audit(config: EngineConfig) -> Audit | None:
    """Return the audit that the settings ask for, if they do."""
    settings = config.audit
    if settings.audit_device is None:
        return None
    policy = AuditPolicy(settings.audit_every, settings.audit_threshold, settings.audit_policy == "switch")
    return Audit(policy, settings.audit_device)


def _tokens(item: BatchItem) -> list[int]:
    """All tokens of a sequence up to the one whose successor is drawn."""
    assert item.sampling is not None, "only what is drawn is audited"
    return [*item.sampling.prompt_ids, *item.sampling.output_ids][: item.span.stop]
