"""The child's side: loads the model, keeps weights and KV cache, runs the steps that it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecework.collector import imports_stay
from piecework.errors import DeviceError
from piecework.workers.process.host import Context
from piecework.workers.process.messages import decode, encode

if TYPE_CHECKING:
    from piecework.runner.ranks import Ranks
    from piecework.workers.serving.ranks import OtherRanks


class ServingHost:
    """Made from ServingOptions. `programs` are the runner's, which may be those of one rank of several."""

    def __init__(self, context: Context) -> None:
        with imports_stay():
            from piecework.config import EngineConfig
            from piecework.failsafe.errors import is_device_error
            from piecework.profile import Profile
            from piecework.runner.failover import load_on
            from piecework.workers.serving import steps
            from piecework.workers.serving.ahead import Chain
            from piecework.workers.serving.ranks import OtherRanks, end_process, join_ranks
            from piecework.workers.serving.runner import Shape

        options = decode(steps.ServingOptions, context.options)
        config = EngineConfig.from_flat(options.settings)
        self._profile = Profile(config.profile)
        self._ranks: Ranks | None = None
        self._others: OtherRanks | None = None
        device = options.device
        if config.worker.tensor_parallel_size > 1:
            if options.store is None:
                self._others = OtherRanks(context, options, config)
            config, device, self._ranks = join_ranks(config, options, self._others)
        settled, ranks = options.settled, self._ranks
        loaded = load_on(config, self._profile, device, settled, with_tokenizer=False, ranks=ranks)
        others = self._others.wait() if self._others is not None else ()
        self._runner = loaded.runner
        self.programs = loaded.runner.programs
        self._reader, self._chain = steps.StepReader(), Chain()
        self._steps, self._is_device_error, self._end_process = steps, is_device_error, end_process
        counters = loaded.runner.counters()
        self.info = encode(steps.ServingInfo(Shape.of(loaded), self._times(), counters, others))

    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        """Answer `step` or `counters`."""
        if method == "step":
            if self._others is not None:
                self._others.send(method, body)
            return self._run(body)
        if method == "counters":
            return encode(self._runner.counters())
        raise ValueError(f"a worker that serves has no method {method}")

    def close(self) -> None:
        """End the other ranks, and give graphs back to the device."""
        if self._others is not None:
            self._others.shut_down()
        self._runner.close()
        if self._others is not None:
            self._others.close()

    def _run(self, body: bytes) -> bytes:
        step = decode(self._steps.Step, body)
        self._profile.enabled = step.profiled
        try:
            items = self._chain.fill(self._reader.read(step), ahead=step.ahead)
            results, logits = self._runner.examine(items)
            self._chain.ran(results)
        except Exception as error:  # other processes don't know all classes that mean that a device failed
            if self._others is not None:
                self._others.wait_for_cause()
            if self._ranks is not None:  # the others wait for its part of a sum
                self._end_process(f"rank {self._ranks.shard.rank} failed: {type(error).__name__}: {error}")
            if isinstance(error, DeviceError) or not self._is_device_error(error, "run"):
                raise
            raise DeviceError(self._runner.device.name, "run", str(error)) from error
        rows = b""
        if step.examined and logits is not None:
            rows = logits.float().cpu().contiguous().numpy().tobytes()
        return encode(self._steps.StepResult(results, self._times() if step.profiled else {}, rows))

    def _times(self) -> dict[str, float]:
        """Seconds by stage since the last time."""
        timers = self._profile.snapshot()["timers"]
        self._profile.reset()
        return {name: timer["total_ms"] / 1e3 for name, timer in timers.items()}
