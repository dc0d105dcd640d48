"""A step of the engine as a graph of tasks on one worker, recorded per batch size of decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.devices import make_device
from piecework.graph.program import Program
from piecework.kvcache import DUMMY_PAGE, LayerShape
from piecework.profile import Profile
from piecework.runner.batch import BatchInputs, BatchItem, ItemResult, build_inputs
from piecework.runner.programs import Programs, layer_shapes
from piecework.runner.runner import draw
from piecework.runner.sampler import prompt_logprobs
from piecework.workers.tasks.arguments import Allocate, TaskArgs, Value
from piecework.workers.tasks.functions import Function
from piecework.workers.tasks.plans import Plan
from piecework.workers.tasks.program import INDEX, body_function, head_function
from piecework.workers.tasks.worker import Worker

_PLANS = 32  # plans that are kept; each holds the memory of its batch


@dataclass(frozen=True)
class StepFunctions:
    """A model's body and head as task functions; they are registered before the worker starts."""

    body: Function
    head: Function

    @classmethod
    def of(cls, programs: Programs) -> StepFunctions:
        """Declare them."""
        body = body_function(programs.body, programs.model.attention_specs, programs.device)
        return cls(body, head_function(programs.head))


@dataclass(frozen=True)
class Pages:
    """The size of a KV cache that lives in a worker."""

    num_pages: int
    page_size: int


class _Bucket:
    """Host tensors of all batches of one size: what goes in, and the logits that come out."""

    def __init__(self, like: dict[str, Tensor], logits: Tensor) -> None:
        self.inputs = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self.logits = logits
        self.plan: Plan | None = None

    def load(self, values: dict[str, Tensor]) -> None:
        """Take a batch."""
        for name, tensor in values.items():
            self.inputs[name].copy_(tensor)


class TaskRunner:
    """Executes batches, as Runner does, by tasks on one child of a worker.

    Weights go up once and the KV cache stays in the child; ids, positions and page tables go in each step,
    and the rows of logits that are needed come out. A decode step is recorded at the first use of its
    (batch size, page table width), and is one message from then on.
    """

    def __init__(
        self,
        worker: Worker,
        child: int,
        programs: Programs,
        functions: StepFunctions,
        pages: Pages,
        *,
        plans: bool = True,
        profile: Profile | None = None,
    ) -> None:
        """Allocate the KV cache in the child; `plans` False runs every step as a graph."""
        self.profile = profile or Profile()
        self.cache = pages
        self.steps_planned = self.steps_as_graph = 0
        self._worker, self._child = worker, child
        self._functions = functions
        self._plans = plans
        self._buckets: dict[tuple[int, ...], _Bucket] = {}
        self._host = make_device("cpu")
        self._body, self._head = programs.body, programs.head
        config = programs.model.config
        self._hidden, self._vocab, self._dtype = config.hidden_size, config.vocab_size, programs.model.dtype
        self._kv = self._make_cache(layer_shapes(programs.model))

    @torch.inference_mode(False)
    def execute(self, items: Sequence[BatchItem]) -> list[ItemResult]:
        """Run one step; the result has an entry per item, in the same order."""
        inputs = build_inputs(items, self.cache.page_size, self._host)
        drawing = [i for i, item in enumerate(items) if item.sampling is not None]
        rows = [inputs.starts[i + 1] - 1 for i in drawing]
        for start, item in zip(inputs.starts, items, strict=False):
            rows += range(start, start + len(item.prompt_targets))
        logits = self._logits(inputs, rows)
        results = [ItemResult()] * len(items)
        states = [state for item in items if (state := item.sampling) is not None]
        if drawing:
            for i, result in zip(drawing, draw(logits[: len(drawing)], states), strict=True):
                results[i] = result
        at = len(drawing)
        for i, item in enumerate(items):
            if item.prompt_targets:
                scored = logits[at : at + len(item.prompt_targets)]
                at += len(item.prompt_targets)
                found = prompt_logprobs(scored, list(item.prompt_targets), item.prompt_top)
                results[i] = results[i]._replace(prompt_logprobs=found)
        return results

    def _logits(self, inputs: BatchInputs, rows: Sequence[int]) -> Tensor:
        values = self._values(inputs, rows)
        longest = inputs.metadata.max_query_length
        key = (longest, *(size for tensor in values.values() for size in tensor.shape))
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = _Bucket(values, torch.empty(len(rows), self._vocab, dtype=self._dtype))
            if self._plans and longest == 1:
                self._keep(key, bucket)
        bucket.load(values)
        if bucket.plan is not None and bucket.plan.why_stale() is None:
            self.steps_planned += 1
            bucket.plan.run()
            return bucket.logits
        self.steps_as_graph += 1
        if key not in self._buckets:
            with self._worker.orchestrate():
                self._submit(bucket, longest)
            return bucket.logits
        with self._worker.record(list(bucket.inputs.values())) as recording:
            self._submit(bucket, longest)
        bucket.plan = recording.plan
        return bucket.logits

    def _submit(self, bucket: _Bucket, longest: int) -> None:
        worker = self._worker
        given: dict[str, Value] = {
            name: worker.defer(t, name=name) for name, t in bucket.inputs.items() if name != "rows"
        }
        tokens = bucket.inputs["input_ids"].shape[0]
        hidden = Allocate((tokens, self._hidden), self._dtype)
        args = TaskArgs(
            {**self._weights(self._body), **given, **self._kv, "hidden": hidden, "longest": longest}
        )
        made = worker.submit_next_level(self._functions.body, args, self._child)["hidden"]
        if bucket.logits.shape[0] == 0:
            return
        logits = worker.defer(bucket.logits, upload=False, name="logits")
        rows = worker.defer(bucket.inputs["rows"], name="rows")
        args = TaskArgs({**self._weights(self._head), "hidden": made, "rows": rows, "logits": logits})
        worker.submit_next_level(self._functions.head, args, self._child)
        worker.copy_from(logits, bucket.logits, self._child)

    def _weights(self, program: Program) -> dict[str, Value]:
        defer = self._worker.defer
        return {f"weight:{name}": defer(tensor, name=name) for name, tensor in program.weights.items()}

    def _values(self, inputs: BatchInputs, rows: Sequence[int]) -> dict[str, Tensor]:
        found = {"input_ids": inputs.input_ids, "positions": inputs.positions}
        if "num_valid_rows" in self._body.inputs:
            found["num_valid_rows"] = torch.tensor([inputs.input_ids.shape[0]])
        found |= {name: getattr(inputs.metadata, name) for name in INDEX}
        found["page_table"] = _widened(found["page_table"])
        if rows:
            found["rows"] = torch.tensor(rows)
        return found

    def _keep(self, key: tuple[int, ...], bucket: _Bucket) -> None:
        while len(self._buckets) >= _PLANS:
            oldest = self._buckets.pop(next(iter(self._buckets)))
            if oldest.plan is not None:
                oldest.plan.drop()
        self._buckets[key] = bucket

    def _make_cache(self, layers: Sequence[LayerShape]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for kind in ("keys", "values"):
            for number, layer in enumerate(layers):
                shape = (self.cache.num_pages, layer.num_kv_heads, self.cache.page_size, layer.head_dim)
                handle = self._worker.malloc(shape, self._dtype, self._child)
                self._worker.copy_to(handle, torch.zeros(shape, dtype=self._dtype))
                found[f"{kind}.{number}"] = handle
        return found


def _widened(table: Tensor) -> Tensor:
    """Pad a page table [S, P] to the next power of two, so that few widths are recorded."""
    width = 1 << (table.shape[1] - 1).bit_length()
    wide = torch.full((table.shape[0], width), DUMMY_PAGE, dtype=table.dtype)
    wide[:, : table.shape[1]] = table
    return wide
