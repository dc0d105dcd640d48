"""Tiny random models in the Hugging Face format, made with `transformers`, for tests of every layer.

    from tiny import save_tiny
    folder = save_tiny(tmp_path, "qwen3", tokenizer=True)

Every name is one architecture with the features that are easy to get wrong switched on: grouped
heads, heads whose size is not hidden_size / num_heads, windows shorter than the test prompts,
scaled rotary frequencies, and for the mixture of experts a mix of dense and sparse layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}
NAMES = tuple(_SPECIAL)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

PIECEWISE = {
    "compiler": "eager",
    "decode_graph": "piecewise",
    "prefill_graph": "piecewise",
    "decode_capture_sizes": [1, 2, 4],
    "prefill_capture_sizes": [4, 16, 48],
}
"""Settings of compilation for few and small captures."""


def tiny_config(name: str, **overrides: Any) -> Any:
    """A `transformers` config of the tiny model `name` (one of `NAMES`); `overrides` are its fields."""
    import transformers

    prefix, special = _SPECIAL[name]
    fields = {**_COMMON, **special, **overrides}
    config = getattr(transformers, f"{prefix}Config")(**fields)
    config.architectures = [f"{prefix}ForCausalLM"]
    return config


def tiny_model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The `transformers` model in float32, every weight random: biases not zero, norms not one."""
    import transformers

    config = tiny_config(name, **overrides)
    model = getattr(transformers, config.architectures[0])(config).eval().requires_grad_(False)
    randomize(model, seed)
    return model


def randomize(model: Any, seed: int) -> None:
    """Give every parameter of a `transformers` model seeded random values of a size that matters."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for key, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if key.endswith("norm.weight"):
            weight.copy_(1 + 0.3 * noise)
        elif weight.ndim == 1:
            weight.copy_(0.3 * noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)


def save_tiny(
    path: str | Path,
    name: str,
    *,
    seed: int = 0,
    tokenizer: bool = False,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write the tiny model `name` as a Hugging Face folder (config.json, model.safetensors); returns it.

    With `tokenizer` a byte-level tokenizer with a chat template is written beside it, whose ids
    fit into the default vocabulary of 320.
    """
    import torch

    folder = Path(path)
    model = tiny_model(name, seed=seed, **overrides)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: 5 special tokens, 256 bytes, a few merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<|unk|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    merges = [("h", "e"), ("t", "he"), ("i", "n"), ("Ġ", "the"), ("Ġ", "a"), ("e", "r"), ("o", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "unk_token": "<|unk|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
