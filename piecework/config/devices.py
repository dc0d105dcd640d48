"""Settings of devices, of audits, and of the processes that run steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piecework.config.fields import LONGEST_WAIT, check, setting
from piecework.config.processors import check_threads
from piecework.config.rings import ring_limits
from piecework.errors import ConfigError

_BY_DEPTH = "one number or four with commas between them, for the depths of scopes (docs/worker-tasks.md)"


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs."""

    device: str = setting(
        "cpu",
        "the device that runs the model, or several, `cuda,cpu`: the next takes over from one that fails",
    )
    failover: str = setting(
        "full",
        "when another of several devices takes over: off is never, compile while starting, full always",
        choices=("off", "compile", "full"),
    )
    standby: str = setting(
        "cold",
        "warm makes the next device ready in the background, with weights and KV cache of its own, so that "
        "a failover costs only what is copied or computed again",
        choices=("cold", "warm"),
    )
    max_failover_seconds: float | None = setting(
        None,
        "longest pause of a request whose device fails; past it, it ends with an error (default: any)",
        high=LONGEST_WAIT,
    )
    isolate: bool = setting(
        False, "run each device but the last in a process of its own, whose death or silence is a failure"
    )
    inject_fault: str | None = setting(
        None, "plan a failure, to try failover: point=run,device=0,step=7,kind=error (docs/failover.md)"
    )
    place: str | None = setting(
        None, "put pieces of the model on other devices by hand: 0:cpu,last:openvino:NPU (docs/failover.md)"
    )
    threads: int | None = setting(
        None,
        "CPU threads of each process, as many as processors at most (default: torch's, one a core; "
        "of more than two `serve` leaves one)",
    )

    def __post_init__(self) -> None:
        check(self)
        check_threads(self.threads)
        names = self.devices
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError("device", self.device, "a device, or several with commas between, each once")
        if len(names) > 1 and self.failover == "full":
            return
        for name, idle in (("standby", "cold"), ("max_failover_seconds", None), ("isolate", False)):
            if getattr(self, name) != idle:
                allowed = f"{idle}, since no device takes over: that needs several and failover=full"
                raise ConfigError(name, getattr(self, name), allowed)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in the order in which they are tried."""
        return tuple(name.strip() for name in self.device.split(","))

    @property
    def several(self) -> bool:
        """Whether one device takes over from another."""
        return len(self.devices) > 1

    @property
    def first(self) -> str:
        """The device that is tried first."""
        return self.devices[0]

    def alone(self, name: str) -> DeviceConfig:
        """Return the settings of one device, from which no other takes over."""
        return replace(self, device=name, standby="cold", max_failover_seconds=None, isolate=False)


@dataclass(frozen=True)
class AuditConfig:
    """Whether the device's numbers are compared with those of another one."""

    audit_device: str | None = setting(
        None, "a reference: audit steps by running them on this device too (docs/failover.md)"
    )
    audit_every: int = setting(16, "audit the first step that gives tokens, and each so manieth after it")
    audit_threshold: float = setting(
        0.05, "largest error that passes: root mean square over the range of the logits, of the worst row"
    )
    audit_policy: str = setting(
        "switch",
        "what a miss does: switch goes on with the reference for good, warn only says so",
        choices=("switch", "warn"),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.audit_device is not None and ("," in self.audit_device or not self.audit_device.strip()):
            raise ConfigError("audit_device", self.audit_device, "one device")


@dataclass(frozen=True)
class WorkerConfig:
    """Which process runs the steps."""

    workers: str = setting(
        "auto",
        "inline runs the model in this process, process in a child of it, which may die without it; "
        "auto is process for cuda and npu, else inline",
        choices=("auto", "inline", "process"),
    )
    data_parallel_size: int = setting(
        1,
        "children with the whole model each; a request goes to the one with the fewest tokens to compute",
        flags=("--dp-size", "--dp", "-dp"),
    )
    tensor_parallel_size: int = setting(
        1,
        "processes that share the weights of each layer between them, one device each",
        flags=("--tp-size", "-tp"),
    )
    start_timeout: float = setting(
        300.0,
        "seconds that a child gets to start and load the model",
        flags=("--worker-start-timeout",),
        high=LONGEST_WAIT,
    )
    compile_timeout: float = setting(
        600.0, "seconds that it gets beside that, to trace and compile it", high=LONGEST_WAIT
    )
    step_timeout: float | None = setting(
        None,
        "seconds without an answer until a child counts as hung (default: 10, or 20 times the median of "
        "such steps where that is more)",
        flags=("--worker-step-timeout",),
        high=LONGEST_WAIT,
    )
    ring_heap: str | int | list = setting(  # type: ignore[type-arg]  # noqa: RUF009
        "4GiB", "most bytes that the tasks of a step may put out, " + _BY_DEPTH
    )
    ring_task_window: str | int | list = setting(  # type: ignore[type-arg]  # noqa: RUF009
        "1048576", "most tasks of a step, " + _BY_DEPTH
    )
    ring_dep_pool: str | int | list = setting(  # type: ignore[type-arg]  # noqa: RUF009
        "1048576", "most edges between the tasks of a step, " + _BY_DEPTH
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("ring_heap", "ring_task_window", "ring_dep_pool"):
            ring_limits(name, getattr(self, name))
        for name in ("start_timeout", "compile_timeout", "step_timeout"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(name, getattr(self, name), "a number of seconds above 0")
        if self.tensor_parallel_size > 1 and self.workers == "inline":
            raise ConfigError(
                "tensor_parallel_size",
                self.tensor_parallel_size,
                "1 with workers=inline: a rank is a process",
            )
        if self.tensor_parallel_size > 1 and self.data_parallel_size > 1:
            allowed = f"1 where data_parallel_size={self.data_parallel_size}"
            raise ConfigError("tensor_parallel_size", self.tensor_parallel_size, allowed)
        if self.data_parallel_size > 1 and self.workers == "inline":
            allowed = f"process or auto: data_parallel_size={self.data_parallel_size} is so many processes"
            raise ConfigError("workers", self.workers, allowed)
