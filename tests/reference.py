"""The reference: the same weights in `transformers`, in float32, and what "equal tokens" means.

Greedy tokens are equal when each one is the reference's best after the same prefix. Where the two best
logits of the reference are closer than `NEAR_TIE`, either may come; the comparison of that output stops
there, and the flip is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 2e-3


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a folder or a .gguf file with transformers' own loaders."""
    from transformers import AutoModelForCausalLM

    if path.suffix == ".gguf":
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval().requires_grad_(False)


@dataclass
class Comparison:
    """Counts of a comparison; `wrong` describes the tokens that the reference would not have chosen."""

    compared: int = 0
    flips: int = 0
    wrong: list[str] = field(default_factory=list)


@torch.inference_mode()
def compare_greedy(
    reference: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Comparison:
    """Check greedy `outputs` [any length] of `prompts` against the reference, one forward pass each."""
    found = Comparison()
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = torch.tensor([[*prompt, *output]])
        logits = reference(ids[:, :-1]).logits[0, len(prompt) - 1 :].float()
        for step, token in enumerate(output):
            best = logits[step].topk(2)
            if token != int(best.indices[0]):
                if float(best.values[0] - best.values[1]) < NEAR_TIE and token == int(best.indices[1]):
                    found.flips += 1
                else:
                    gap = float(best.values[0] - logits[step, token])
                    found.wrong.append(f"prompt {number} step {step}: {token} is {gap:.4f} below the best")
                break
            found.compared += 1
    return found


def nrmse(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square error over the larger value range."""
    spread = max(float(t.max() - t.min()) for t in (got, expected))
    return float((got.float() - expected.float()).square().mean().sqrt()) / spread
