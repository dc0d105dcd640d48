"""Settings that the next device doesn't have become its own choice, and it is said which."""

from __future__ import annotations

from piecework.compilation import CompilationConfig
from piecework.config import CacheConfig
from piecework.devices import make_device
from piecework.runner.fitting import fit_cache, fit_settings

FOR_SIM = CompilationConfig(
    compiler="inductor", decode_graph="full", prefill_graph="piecewise", decode_capture_sizes=(1, 2)
)


def test_what_the_device_has_stays():
    assert fit_settings(FOR_SIM, make_device("sim")) == (FOR_SIM, [])


def test_what_it_lacks_becomes_auto():
    fitted, said = fit_settings(FOR_SIM, make_device("cpu"))
    assert fitted == CompilationConfig(compiler="inductor")
    assert said == ["decode_graph=full", "prefill_graph=piecewise"]
    fitted, said = fit_settings(CompilationConfig(compiler="native"), make_device("sim"))
    assert (fitted.compiler, said) == ("auto", ["compiler=native"])


def test_in_strict_mode_nothing_changes():
    strict = FOR_SIM.with_changes(strict=True)
    assert fit_settings(strict, make_device("cpu")) == (strict, [])


def test_an_int8_cache_becomes_the_precision_of_a_device_without_one():
    int8, auto = CacheConfig(kv_cache_dtype="int8"), CacheConfig()
    assert fit_cache(int8, make_device("cpu"), strict=False) == (int8, [])
    assert fit_cache(int8, make_device("sim"), strict=False) == (auto, ["kv_cache_dtype=int8"])
    assert fit_cache(int8, make_device("sim"), strict=True) == (int8, [])
