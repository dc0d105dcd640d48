"""The head in int8, alone and as the table that is the embedding too: numbers, bytes, and greedy tokens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from int8_checkpoints import int8_rows, loaded, logits
from reference import nrmse
from tiny import save_tiny

from piecework import LLM
from piecework.errors import ConfigError
from piecework.layers.embedding import Embedding
from piecework.layers.int8 import Int8Embedding, W8A8Linear, W8Linear
from piecework.models.config import ModelConfig
from piecework.quantization.choose import choose_reader
from piecework.quantization.sizes import float_outline, weight_bytes
from piecework.weights.load import open_checkpoint
from piecework.weights.source import Source

SCHEMES = ("w8", "w8a8-dynamic")


@pytest.fixture(params=[False, True], ids=["own", "tied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return save_tiny(tmp_path, "llama", tie_word_embeddings=request.param)


@pytest.mark.parametrize("body", SCHEMES)
@pytest.mark.parametrize("head", SCHEMES)
def test_the_head_is_a_product_with_int8_rows(folder: Path, body: str, head: str) -> None:
    plain, model = loaded(folder, body), loaded(folder, body, lm_head=head)
    if model.lm_head is None:
        assert isinstance(model.model.embed_tokens, Int8Embedding)
        int8, table = model.model.embed_tokens, plain.model.embed_tokens.weight
        ids = torch.tensor([3, 0, 319])
        assert torch.equal(int8(ids), int8.weight[ids] * int8.scale[ids, None])
    else:
        assert type(model.lm_head) is (W8Linear if head == "w8" else W8A8Linear)
        assert isinstance(model.model.embed_tokens, Embedding)
        int8, table = model.lm_head, plain.lm_head.weight
    rows, scales = int8_rows(table)
    assert torch.equal(int8.weight, rows) and torch.equal(int8.scale, scales[:, 0])
    x = torch.randn(5, 64)
    wanted = x if head == "w8" else (lambda q: q[0] * q[1])(torch.ops.piecework.dynamic_quantize(x))
    torch.testing.assert_close(model.head(x), wanted @ (rows * scales).T, rtol=1e-5, atol=1e-5)
    assert 0 < nrmse(logits(model), logits(plain)) < 2e-2


@pytest.mark.parametrize("head", ["auto", *SCHEMES])
def test_its_bytes_are_known_before(folder: Path, head: str) -> None:
    with closing(open_checkpoint(Source("folder", folder))) as checkpoint:
        outline = float_outline(ModelConfig.from_dict(checkpoint.config), torch.bfloat16)
        said = weight_bytes(outline, checkpoint, choose_reader(checkpoint, "w8a8-dynamic", head))
    model = loaded(folder, "w8a8-dynamic", torch.bfloat16, head)
    assert said == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("head", SCHEMES)
def test_greedy_tokens_are_those_of_the_layers(folder: Path, head: str) -> None:
    settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": 2**24}
    with LLM(str(folder), quantization="w8a8-dynamic", lm_head=head, **settings) as llm:
        prompt = [7, 8, 9, 10, 11, 12]
        (result,) = llm.generate([prompt], temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    model = loaded(folder, "w8a8-dynamic", lm_head=head)
    ids = [*prompt, *result.token_ids]
    with torch.inference_mode():
        rows = model.head(model(torch.tensor(ids), torch.arange(len(ids))))[len(prompt) - 1 : -1]
    for row, token, entry in zip(rows.log_softmax(-1), result.token_ids, result.logprobs, strict=True):
        # An input that lies between two steps may be rounded the other way.
        assert row.max() - row[token] < 2e-2 and abs(float(row[token]) - entry.logprob) < 2e-2


def test_a_head_is_quantised_as_it_is_read_or_not_at_all(folder: Path) -> None:
    remedy = r"auto or float where .* quantization=w8a8-dynamic or w8 beside it \(--quantization\)"
    for asked in ("auto", "none"):
        with pytest.raises(ConfigError, match=rf"lm_head='w8' is not allowed: {remedy}"):
            loaded(folder, asked, lm_head="w8")
    assert type(loaded(folder, "w8", lm_head="float").model.embed_tokens) is Embedding
