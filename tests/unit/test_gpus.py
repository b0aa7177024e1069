"""docs/pages/gpus.md: its tables are those that the code computes, and the arithmetic is what the page says."""

import pytest
from places import ROOT

from tools import gpus
from voxtral_serve.check import memory
from voxtral_serve.check.device import Device
from voxtral_serve.check.options import read_options
from voxtral_serve.check.report import Report

L4, H200 = gpus.GPUS[0], gpus.GPUS[-1]


def test_the_tables_are_not_stale() -> None:
    text = gpus.PAGE.read_text()
    assert gpus.updated(text, gpus.TABLES) == text, "run `python -m tools.gpus`"


def test_a_page_without_a_place_for_each_table_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one place for each of parts, memory"):
        gpus.updated("no tables", gpus.TABLES)


def test_what_a_part_of_the_memory_is() -> None:
    fast = gpus.fast()
    assert fast.token == 2 * 2 * 26 * 8 * 128
    assert fast.needs.weights == gpus.text_bytes() + gpus.encoder_bytes()
    ring = 2 * 2 * 32 * 32 * 64 * 784  # 749 frames, and those of a pass of 8 rows of 4, in whole rows
    assert fast.session == ring + 2048 * 2 * 3072
    assert fast.needs.audio_rows == (64 * 1024 + 2048 + 17 * 2048) * 2 * 3072
    assert (gpus.tokens_at(8), gpus.tokens_at(3600)) == (39 + 100, 8192)


def test_the_room_on_an_l4_is_that_of_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` counts no activations and graphs."""
    monkeypatch.setattr(memory, "first_device", lambda _: Device(L4.name, int(L4.memory), int(L4.memory)))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    report = Report()
    options = read_options(report, ROOT / "profiles/fast.yaml", gpus.GPU_BLOCK)
    assert options is not None
    fast = gpus.fast()
    memory.check_memory(report, options, gpus.full_size(), fast.plan, str)
    assert report.problems == []
    found = next(line for line in report.lines if line.startswith("  room for"))
    blocks = (gpus.room(L4, fast) + gpus.rest_bytes()) // fast.needs.kv.block_bytes
    assert f"at most {blocks / fast.needs.kv.blocks:.2f} sequences of 9,216 tokens" in found


def test_the_largest_number_of_sessions_is_the_last_that_fits() -> None:
    fast = gpus.fast()
    for age in gpus.AGES_S.values():
        most = gpus.sessions_by_memory(L4, fast, age)
        each = fast.session + gpus.tokens_at(age) * fast.token
        # With as many rings as fast.yaml has, the rest of the memory is for KV caches.
        left = gpus.room(L4, fast) + fast.plan.sessions * fast.session - most * each
        assert 0 <= left < each
        step = gpus.encoder_window_bytes() + gpus.tokens_at(age) * fast.token
        read = gpus.text_bytes() + gpus.encoder_bytes() + gpus.sessions_by_bandwidth(L4, fast, age) * step
        assert read <= L4.bandwidth * 0.08 < read + step


def test_a_token_alone_reads_the_language_model() -> None:
    assert gpus.speed(L4, gpus.fast(), 1).token_ms == pytest.approx(1000 * gpus.text_bytes() / 0.30e12)
    for gpu in gpus.GPUS:
        assert gpus.speed(gpu, gpus.fast(), 64).tokens_s > gpus.speed(gpu, gpus.fast(), 1).tokens_s


def test_what_was_measured_is_less_than_the_bound() -> None:
    for requests in (1, 64):
        assert 0 < gpus.reached(requests) < 1
    assert gpus.live_measured(L4) == "no"
    assert "fell behind" in gpus.live_measured(H200)
    assert gpus.measured("stock-eager", 1)["ms_per_token"] > 1000 * gpus.fast().needs.weights / H200.bandwidth
