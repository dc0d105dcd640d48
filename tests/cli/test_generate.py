"""`piecework generate` on a tiny model: its lines of JSON, its text, and the reference's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_run import Run
from tiny import save_tiny

KEYS = {"prompt", "text", "token_ids", "finish_reason", "usage", "timing", "device"}


def reference(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    """Greedy tokens of `transformers`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(out[0, len(prompt_ids) :].tolist())


def encode(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_json_lines_have_the_documented_form_and_the_reference_tokens(run: Run, tiny: Path) -> None:
    flags = ["--max-tokens", "12", "--temperature", "0", "--dtype", "float32", "--ignore-eos", "--json"]
    done = run("generate", "--model", str(tiny), "--prompt", "the one", "--prompt", "in a", *flags)
    assert done.code == 0, done.err
    assert [line["prompt"] for line in done.lines] == ["the one", "in a"]
    for line in done.lines:
        assert set(line) == KEYS
        assert set(line["timing"]) == {"ttft_ms", "tpot_ms", "decode_tok_s", "prefill_tok_s"}
        assert all(value > 0 for value in line["timing"].values())
        ids = encode(tiny, line["prompt"])
        assert line["token_ids"] == reference(tiny, ids, 12)
        assert line["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 12, "cached_tokens": 0}
        assert (line["finish_reason"], line["device"]) == ("length", "cpu")


def test_aliases_give_the_same(run: Run, tiny: Path) -> None:
    first = run("generate", "--model", str(tiny), "--max-tokens", "5", "--max-model-len", "64", "--json", "a")
    second = run(
        "generate", "a", "--model-dir", str(tiny), "--max-new-tokens", "5", "--max-seq-len", "64", "--json"
    )
    assert first.code == second.code == 0
    assert first.lines[0]["token_ids"] == second.lines[0]["token_ids"]


def test_a_single_prompt_is_streamed_as_text(run: Run, tiny: Path) -> None:
    flags = ["--model", str(tiny), "--max-tokens", "6", "--ignore-eos"]
    text = run("generate", "the", *flags, "--json").lines[0]["text"]
    done = run("generate", "the", *flags)
    assert done.out == text + "\n"
    assert "6 tokens" in done.err and "tok/s" in done.err and "ended by length" in done.err


def test_several_prompts_are_labelled_in_order(run: Run, tiny: Path) -> None:
    done = run("generate", "--model", str(tiny), "--max-tokens", "3", "one", "two", "--n", "2")
    heads = [line for line in done.out.splitlines() if line.startswith("===")]
    assert heads == [
        "=== prompt 1: one",
        "=== prompt 1, sample 2: one",
        "=== prompt 2: two",
        "=== prompt 2, sample 2: two",
    ]


def test_samples_differ_and_repeat_with_their_seed(run: Run, tiny: Path) -> None:
    flags = ["--model", str(tiny), "--max-tokens", "8", "--temperature", "1", "--n", "3", "--json", "the"]
    first = run("generate", "--seed", "7", *flags).lines
    again = run("generate", "--seed", "7", *flags).lines
    other = run("generate", "--seed", "8", *flags).lines
    assert [line.get("index", 0) for line in first] == [0, 1, 2]
    tokens = [line["token_ids"] for line in first]
    assert tokens == [line["token_ids"] for line in again]
    assert tokens != [line["token_ids"] for line in other]
    assert len({tuple(ids) for ids in tokens}) == 3


def test_chat_goes_through_the_template(run: Run, tiny: Path) -> None:
    flags = ["--model", str(tiny), "--max-tokens", "4", "--json"]
    chat = run("generate", "hi", "--chat", "--system", "be", *flags).lines[0]
    template = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = encode(tiny, template)
    assert chat["prompt"] == "hi"
    assert chat["usage"]["prompt_tokens"] == len(ids)
    given = run("generate", *flags, stdin=json.dumps({"prompt_token_ids": ids}) + "\n").lines[0]
    assert given["token_ids"] == chat["token_ids"]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    talked = run("generate", *flags, stdin=json.dumps({"messages": messages})).lines[0]
    assert (talked["prompt"], talked["token_ids"]) == (messages, chat["token_ids"])


def test_standard_input_has_one_prompt_a_line(run: Run, tiny: Path) -> None:
    done = run("generate", "--model", str(tiny), "--max-tokens", "2", "--json", stdin="one\n\ntwo\n")
    assert [line["prompt"] for line in done.lines] == ["one", "two"]


def test_logprobs_are_reported(run: Run, tiny: Path) -> None:
    flags = ["--max-tokens", "2", "--logprobs", "2", "--prompt-logprobs", "1", "--json"]
    line = run("generate", "--model", str(tiny), *flags, "the one").lines[0]
    assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]
    best = line["logprobs"][0]["top"]
    assert len(best) == 2 and best[0]["logprob"] >= best[1]["logprob"]
    assert best[0]["token_id"] == line["token_ids"][0]  # greedy takes the likeliest
    assert line["prompt_logprobs"][0] is None
    assert len(line["prompt_logprobs"]) == line["usage"]["prompt_tokens"]


def test_the_default_length_fits_the_context(run: Run, tiny: Path) -> None:
    done = run("generate", "--model", str(tiny), "--max-model-len", "32", "--ignore-eos", "--json", "the")
    assert sum(done.lines[0]["usage"].values()) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "8", "a prompt that is longer than that"], "prompt 1: prompt has"),
        (["--max-model-len", "32", "--max-tokens", "40", "a"], "max_tokens=40 is not allowed"),
        (["--stop-token-ids", "99999", "a"], "stop_token_ids has the token id 99999"),
        ([""], "prompt is empty"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    run: Run, tiny: Path, arguments: list[str], message: str
) -> None:
    done = run("generate", "--model", str(tiny), "--json", *arguments)
    assert done.code == 2
    assert message in done.err and done.out == ""


def test_a_model_without_a_tokenizer_takes_ids_only(run: Run, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bare", "llama")
    refused = run("generate", "--model", str(folder), "hi")
    assert refused.code == 2 and "has no tokenizer" in refused.err
    flags = ["--model", str(folder), "--max-tokens", "4", "--ignore-eos", "--json"]
    line = run("generate", *flags, stdin='{"prompt_token_ids": [5, 6, 7]}').lines[0]
    assert line["token_ids"] == reference(folder, [5, 6, 7], 4)


def test_the_models_own_sampling_is_kept(run: Run, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "sampled", "llama", tokenizer=True)
    flags = ["--model", str(folder), "--max-tokens", "16", "--ignore-eos", "--json", "the"]
    greedy = [run("generate", "--seed", str(seed), *flags).lines[0]["token_ids"] for seed in (1, 2)]
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.9, "top_k": 40}')
    sampled = [run("generate", "--seed", str(seed), *flags).lines[0]["token_ids"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1]
    assert run("generate", "--temperature", "0", *flags).lines[0]["token_ids"] == greedy[0]
