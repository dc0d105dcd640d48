"""The child's side: loads the model, keeps weights and KV cache, runs the steps that it is sent."""

from __future__ import annotations

from piecework.collector import imports_stay
from piecework.errors import DeviceError
from piecework.workers.process.host import Context
from piecework.workers.process.messages import decode, encode


class ServingHost:
    """Made from ServingOptions. `programs` are the runner's."""

    def __init__(self, context: Context) -> None:
        with imports_stay():
            from piecework.config import EngineConfig
            from piecework.failsafe.errors import is_device_error
            from piecework.profile import Profile
            from piecework.runner.failover import load_on
            from piecework.workers.serving import steps
            from piecework.workers.serving.runner import Shape

        options = decode(steps.ServingOptions, context.options)
        config = EngineConfig.from_flat(options.settings)
        self._profile = Profile(config.profile)
        loaded = load_on(config, self._profile, options.device, options.settled, with_tokenizer=False)
        self._runner = loaded.runner
        self.programs = loaded.runner.programs
        self._reader = steps.StepReader()
        self._steps, self._is_device_error = steps, is_device_error
        self.info = encode(steps.ServingInfo(Shape.of(loaded), self._times(), loaded.runner.counters()))

    def handle(self, method: str, body: bytes, fds: tuple[int, ...]) -> bytes:
        """Answer `step` or `counters`."""
        if method == "step":
            return self._run(body)
        if method == "counters":
            return encode(self._runner.counters())
        raise ValueError(f"a worker that serves has no method {method}")

    def close(self) -> None:
        """Give graphs back to the device."""
        self._runner.close()

    def _run(self, body: bytes) -> bytes:
        step = decode(self._steps.Step, body)
        self._profile.enabled = step.profiled
        try:
            results, logits = self._runner.examine(self._reader.read(step))
        except Exception as error:  # other processes don't know all classes that mean that a device failed
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
