"""A model on a device that may give wrong numbers, beside a reference on one that doesn't."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from failsafe_rig import Rig, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.errors import ConfigError, PieceworkError
from piecework.failsafe.audit import AuditPolicy, nrmse
from piecework.failsafe.audited import audited
from piecework.failsafe.element import create

X = torch.arange(12.0).view(3, 4)
GRAPH = trace(lambda x: x * 2 + 1, X)


class Glitches(Rig):
    """Devices that turn the last row of their results in the runs `wrong`, counted from 0 on `sim:0`."""

    def __init__(self, wrong=(), faults=()):
        super().__init__(3, faults)
        self.wrong, self.runs = set(wrong), 0
        launch = self.devices["sim:0"].launch

        def wrong_now(piece, inputs, outputs=None):
            results = launch(piece, inputs, outputs)
            if self.runs in self.wrong:
                results[0][-1] = results[0][-1].roll(1)
            self.runs += 1
            return results

        self.devices["sim:0"].launch = wrong_now

    def audited(self, devices=("sim:0",), mutated=(), **policy):
        model = create(list(devices), self.factory(GRAPH, mutated=mutated))
        return audited(model, self.factory(GRAPH)("sim:2"), "sim:2", AuditPolicy(**policy))


def run(request, times=1):
    for _ in range(times):
        request.run()
    return request.output(0)


def test_while_results_are_good_nothing_changes_and_only_some_runs_are_audited():
    rig = Glitches()
    model = rig.audited(every=3)
    request = model.create_request()
    request.set_input(0, X)
    torch.testing.assert_close(run(request, 7), X * 2 + 1)
    assert rig.events.count("run:sim:0") == 7 and rig.events.count("run:sim:2") == 3  # 0, 3 and 6
    assert rig.events.count("create:sim:2") == 1
    report = model.report
    assert (report.good, report.missed, report.last, report.greatest) == (3, 0, 0.0, 0.0)
    assert model.execution_devices == ("sim:0",)


def test_a_glitch_on_the_third_call_moves_to_the_reference_for_good(caplog):
    rig = Glitches(wrong=[2])
    model = rig.audited(every=1)
    request, mine = model.create_request(), torch.empty(3, 4)
    request.set_input(0, X)
    request.set_output(0, mine)
    run(request, 2)
    assert not model.switched
    request.run()  # whose results are right already
    torch.testing.assert_close(mine, X * 2 + 1)
    assert model.switched and model.execution_devices == ("sim:2",)
    assert request.output(0) is mine
    before = len(rig.events)
    request.set_input(0, X + 1)
    run(request, 2)
    torch.testing.assert_close(mine, (X + 1) * 2 + 1)
    fresh = model.create_request()
    fresh.set_input(0, X)
    torch.testing.assert_close(run(fresh), X * 2 + 1)
    assert rig.events[before:] == ["run:sim:2", "run:sim:2", "create:sim:2", "run:sim:2"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "sim:0 failed its audit" in warning and "sim:2 goes on" in warning
    assert (model.report.good, model.report.missed) == (2, 1)


def test_a_sibling_that_has_not_missed_moves_too():
    rig = Glitches(wrong=[0])
    model = rig.audited(every=1)
    one, other = model.create_request(), model.create_request()
    for request in (one, other):
        request.set_input(0, X)
    mine = torch.empty(3, 4)
    other.set_output(0, mine)
    one.run()
    other.run()
    torch.testing.assert_close(mine, X * 2 + 1)
    assert rig.events.count("run:sim:0") == 1


def test_the_policy_warn_goes_on_and_says_it_once(caplog):
    rig = Glitches(wrong=range(5))
    model = rig.audited(every=1, switch=False)
    request = model.create_request()
    request.set_input(0, X)
    run(request, 3)
    assert not model.switched and model.report.missed == 3
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert len(model.audit.notes) == 3


def test_it_audits_whatever_device_a_failover_has_moved_to():
    rig = Glitches(faults=["run:sim:0"])
    model = rig.audited(["sim:0", "sim:1"], every=1)
    request = model.create_request()
    request.set_input(0, X)
    torch.testing.assert_close(run(request, 2), X * 2 + 1)
    assert rig.events.count("run:sim:1") == rig.events.count("run:sim:2") == 2
    assert model.execution_devices == ("sim:1",) and model.report.good == 2


def test_a_model_that_writes_its_inputs_is_not_audited():
    with pytest.raises(ConfigError, match=r"mutated_inputs=\[0\]"):
        Glitches().audited(mutated=[0])
    request = Glitches().audited(every=1).create_request()
    x = X.clone()
    request.set_input(0, x)
    request.set_output(0, x)
    with pytest.raises(PieceworkError, match="writes its inputs"):
        request.run()


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 5), width=st.integers(2, 40), seed=st.integers(0, 99), scale=st.floats(0.01, 100))
def test_the_error_is_that_of_the_worst_row_and_does_not_depend_on_the_scale(rows, width, seed, scale):
    torch.manual_seed(seed)
    good = torch.randn(rows, width)
    wrong = good.clone()
    wrong[-1] += 0.1 * (good[-1].max() - good[-1].min())
    assert nrmse(good, good) == 0.0
    assert nrmse(wrong * scale, good * scale) == pytest.approx(0.1, rel=1e-3)
    assert nrmse(good * scale, wrong * scale) == pytest.approx(0.1, rel=1e-3)


def test_what_is_no_number_fails():
    good = torch.randn(2, 5)
    for value in (math.nan, math.inf, -math.inf):
        bad = good.clone()
        bad[1, 3] = value
        assert math.isnan(nrmse(bad, good)) and math.isnan(nrmse(good, bad)) and math.isnan(nrmse(bad, bad))
    assert nrmse(good, good[:1]) == math.inf
    assert nrmse(torch.ones(2, 1), torch.full((2, 1), 2.0)) == 0.5  # a range of nothing
