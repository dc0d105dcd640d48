"""The KV cache grows and shrinks while requests run: tokens stay, nothing is dropped, memory really goes."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from piecework.engine.offline import run_requests
from piecework.errors import ConfigError, EngineDeadError, PieceworkError, RequestError
from piecework.sampling import SamplingParams

STREAMS = 16
PATIENCE = 60  # seconds in which a request ends that takes one, also on a machine with much else to do
PAGE = 4
LEAST = 33  # pages for the longest context, and the dummy
SMALL = {"page_size": PAGE, "max_model_len": 128, "max_num_seqs": STREAMS}


def resident(service) -> int:
    """Bytes of the KV cache's addresses that have memory, from the kernel's list of mappings."""
    starts = {t.data_ptr() for t in service.runner.cache.tensors().values()}
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(None, 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = any(low <= start < high for start in starts)
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def make_requests():
    rng = random.Random(3)
    prompts, params = [], []
    for i in range(3 * STREAMS):
        shared = [7] * (2 * PAGE) if i % 4 == 0 else []
        prompts.append(shared + [rng.randrange(320) for _ in range(rng.choice([1, 4, 17, 40]))])
        params.append(SamplingParams(temperature=0.0, max_tokens=rng.randint(12, 40), ignore_eos=True))
    return prompts, params


@pytest.fixture(scope="module")
def alone(folder):
    from piecework.config import EngineConfig
    from piecework.engine.service import Service

    prompts, params = make_requests()
    service = Service(
        EngineConfig.from_flat({"model": str(folder), "dtype": "float32", "threads": 1, **SMALL})
    )
    tokens = [[] for _ in prompts]
    for number, delta in run_requests(service, prompts, params, parallel=1):
        tokens[number] += delta.token_ids
    service.close()
    return tokens


class Load:
    """16 streams, some of which cancel requests of their own, until `stop`."""

    def __init__(self, service, alone) -> None:
        self.service, self.alone = service, alone
        self.prompts, self.params = make_requests()
        self.stopping = threading.Event()
        self.wrong: list[str] = []
        self.complete = self.cancelled = 0
        self._ended = threading.Condition()
        self._threads = [
            threading.Thread(target=self._stream, args=(k,), daemon=True) for k in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, ended: int) -> None:
        """Return once so many requests have ended since the start; as many as there are streams run then."""
        with self._ended:
            while self.complete + self.cancelled < ended:
                assert self._ended.wait(PATIENCE) and not self.wrong, f"none ends any more: {self.wrong}"

    def stop(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a stream never ended"

    def _stream(self, k: int) -> None:
        rng = random.Random(k)
        while not self.stopping.is_set():
            number = rng.randrange(len(self.prompts))
            cancel = rng.randint(1, 8) if rng.random() < 0.3 else None
            tokens, reason = self._one(number, cancel)
            with self._ended:
                self._ended.notify_all()
                self.complete += reason == "length"
                self.cancelled += reason == "abort"
                wanted = self.alone[number][: len(tokens) if reason == "abort" else None]
                if tokens != wanted or reason not in ("length", "abort"):
                    self.wrong.append(f"request {number}: {reason}, {tokens}")
                    self.stopping.set()

    def _one(self, number: int, cancel: int | None):
        ended, tokens, reasons = threading.Event(), [], []

        def listener(delta):
            tokens.extend(delta.token_ids)
            if delta.finish_reason is not None:
                reasons.append(delta.finish_reason)
                ended.set()
            elif cancel is not None and len(tokens) >= cancel:
                self.service.abort(delta.request_id)

        self.service.submit(self.prompts[number], self.params[number], listener=listener)
        if not ended.wait(PATIENCE):
            return tokens, "never ended"
        assert len(reasons) == 1
        return tokens, reasons[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=pytest.mark.slow)])
def test_ten_changes_under_load_change_no_token(make_service, alone, device):
    """On sim decode steps are replays of captured graphs, which know addresses."""
    debug = {"enable_debug_mode": True}
    service = make_service(
        device=device, num_pages=140, max_num_pages=400, compilation_config=debug, profile=True, **SMALL
    )
    addresses = {name: t.data_ptr() for name, t in service.runner.cache.tensors().items()}
    load = Load(service, alone)
    moved = preempted = 0
    for number, pages in enumerate((400, 60, 200, LEAST, 140, 50, 300, 40, 399, 64), start=1):
        load.wait_for(4 * number)
        size = service.resize_kv(pages)
        assert size.pages == pages == service.runner.cache.num_pages
        moved += size.moved_pages
        preempted += size.preempted
    load.stop()
    service.close()
    assert load.wrong == []
    assert load.complete > 0 and load.cancelled > 0 and moved > 0 and preempted > 0
    assert {name: t.data_ptr() for name, t in service.runner.cache.tensors().items()} == addresses
    stats = service.stats()
    assert stats.kv_pages_total == 63 and stats.running == stats.waiting == stats.kv_pages_used == 0
    assert set(stats.finished) <= {"length", "abort"} and stats.preemptions_total >= preempted
    assert service.profile.snapshot()["bytes"]["kv.compact"]["total"] > 0
    assert (service.graph_counters()["body"]["replays"] > 0) == (device == "sim")


def test_memory_goes_with_a_shrink_and_comes_back_zero(make_service):
    service = make_service(num_pages=4000, max_num_pages=6000, **{**SMALL, "max_num_seqs": 128})
    cache = service.runner.cache
    for tensor in cache.tensors().values():
        tensor[: cache.num_pages].fill_(1.0)
    full, bytes_ = resident(service), cache.nbytes
    assert full >= 0.95 * bytes_
    size = service.resize_kv(1000)
    assert size.bytes == cache.nbytes == bytes_ // 4
    assert resident(service) <= full - 0.95 * (bytes_ - size.bytes)
    assert service.resize_kv(6000).max_pages == 6000
    for tensor in cache.tensors().values():
        assert tensor[1:1000].eq(1).all() and not tensor[1000:].any()
    assert service.kv_size().min_pages == LEAST and service.kv_bytes == 6 * size.bytes


def test_what_cannot_be_is_refused_and_changes_nothing(make_service):
    service = make_service(num_pages=100, max_num_pages=10**9, **SMALL)
    for pages, message in (
        (LEAST - 1, f"pages={LEAST - 1} is not allowed: at least {LEAST}"),
        (0, "at least"),
        (10**9 + 1, f"at most {10**9}"),
        (10**9, "bytes more"),
        (40.0, r"pages=40.0 is not allowed: an integer"),
        (True, "an integer"),
        ("50", "pages='50' is not allowed: an integer"),
        (None, "an integer"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            service.resize_kv(pages)
        assert caught.value.param == "pages"
    assert service.runner.cache.num_pages == 100 and service.kv_size().pages == 100
    service.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        service.resize_kv(50)


def test_growth_that_the_start_does_not_allow(make_service):
    with pytest.raises(ConfigError, match="max_num_pages=50 is not allowed: at least num_pages=100"):
        make_service(num_pages=100, max_num_pages=50, **SMALL)


def test_a_listener_that_asks_is_refused_and_does_not_stop_the_engine(make_service):
    service = make_service(device="cpu,sim", num_pages=100, **SMALL)
    ended, said = threading.Event(), []

    def listener(delta):
        for ask in (service.kv_size, lambda: service.resize_kv(50), lambda: service.move_to("sim")):
            with pytest.raises(PieceworkError, match="ask from another thread") as caught:
                ask()
            said.append(caught.value)
        if delta.finish_reason is not None:
            ended.set()

    service.submit([1, 2], SamplingParams(max_tokens=2, ignore_eos=True), listener=listener)
    assert ended.wait(20) and len(said) == 6
    assert service.resize_kv(50).pages == 50 and service.device_name == "cpu"


@pytest.mark.parametrize("what", ["copy_pages", "resize"])
def test_a_shrink_that_fails_on_the_device_changes_no_token_and_no_size(
    make_service, alone, monkeypatch, what
):
    debug = {"enable_debug_mode": True}
    service = make_service(num_pages=140, max_num_pages=400, compilation_config=debug, **SMALL)
    load = Load(service, alone)

    def fails(*_):
        raise RuntimeError("no memory for the copy")

    for number in (1, 2, 3):
        load.wait_for(4 * number)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
            patch.setattr(service.runner.cache, what, fails)
            service.resize_kv(40)
        size = service.kv_size()
        assert (size.pages, size.pages - 1) == (140, service.stats().kv_pages_total)
    assert service.resize_kv(40).pages == 40
    load.stop()
    service.close()
    assert load.wrong == [] and load.complete > 0 and service.stats().kv_pages_used == 0
