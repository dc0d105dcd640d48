"""Numbers that are none end the requests that meet them, and nobody after them."""

from __future__ import annotations

import pytest

from piecework.engine.offline import run_requests
from piecework.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6)
PROMPTS = [[5 + n, *range(9, 12 + 5 * n)] for n in range(4)]  # of other lengths: tables are filled up


def run(service, params=GREEDY):
    found = {}
    for number, delta in run_requests(service, PROMPTS, params):
        found.setdefault(number, []).extend(delta.token_ids)
        if delta.finish_reason not in (None, "length"):
            found[number] = delta.finish_reason
    return [found[number] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_pages_that_were_spoiled_spoil_nothing_when_others_get_them(make_service, prefix_caching):
    settings = {"num_pages": 20, "page_size": 4, "max_model_len": 64, "prefix_caching": prefix_caching}
    clean = run(make_service(device="cpu", **settings))
    fault = "point=run,step=3,kind=nan,where=cache"  # in every page, the free ones too
    service = make_service(device="sim", inject_fault=fault, **settings)
    run(service)
    for _ in range(8):  # each round cleans the pages of those that met some
        if run(service) == clean:
            break
    else:
        pytest.fail("the pages stay spoiled")
    assert run(service) == run(service) == clean


def test_prompt_log_probabilities_that_are_none_end_their_request_alone(make_service, monkeypatch):
    from piecework.runner import runner
    from piecework.runner.sampler import NonFiniteLogitsError

    service, scored = make_service(device="cpu"), GREEDY.with_changes(prompt_logprobs=1)
    clean = run(service)

    def fails(*_):
        raise NonFiniteLogitsError([0])

    with monkeypatch.context() as patch:
        patch.setattr(runner, "prompt_logprobs", fails)
        params = [GREEDY, scored, GREEDY, GREEDY]
        assert run(service, params) == [clean[0], "error", clean[2], clean[3]]
        assert run(service, scored) == ["error"] * 4
    assert run(service) == clean
