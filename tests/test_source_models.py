"""Every family with an encoder before its decoder against transformers, greedily in float32:
sources however they are batched, cut, cached and preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from aioinfer.config import Config, MediaConfig, ModelConfig
from aioinfer.engine.sources import SourcePrompt
from aioinfer.engine.transcription import Recording, SpeechTokens, Transcriber
from aioinfer.engine.word_times import first_frames, words
from aioinfer.errors import RequestError
from aioinfer.executor.inline import InlineExecutor
from aioinfer.llm import LLM, Output
from aioinfer.models.source import SourceFormat
from aioinfer.models.whisper import log_mel, mel_filters
from aioinfer.sampling_params import BeamSearchParams, SamplingParams
from aioinfer.text.tokenizer import Tokenizer
from tests.source_models import (
    ID,
    MODELS,
    RATE,
    SECONDS,
    Reference,
    encoder_inputs,
    reference_output,
    reference_times,
    save_model,
    save_tokenizer,
    sound,
)
from tests.worker_extension import has_compiler

TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
#: Of each request: the decoder's first tokens, and its source.
Turn = tuple[list[int], Any]
_START = [ID[f"<|{name}|>"] for name in ("startoftranscript", "de", "transcribe", "notimestamps")]
_LONG = [ID["<|startofprev|>"], *range(65, 95), *_START]
SOUNDS = [sound(0.7, 1), sound(2.0, 2), sound(1.3, 3)]
TEXTS = [[*range(40, 90, 3), 297], [70] * 60 + [297], [99, 50], [*range(40, 90, 3), 297]]
SUPPRESSING = ("suppress_tokens", "begin_suppress_tokens")
TURNS: dict[str, list[Turn]] = {
    **{name: [([0], text) for text in TEXTS] for name in ("t5", "flan_t5")},
    "bart": [([297, 296], text) for text in TEXTS],
    "whisper": [(_START, SOUNDS[0]), (_LONG, SOUNDS[1]), (_START, SOUNDS[1]), (_LONG, SOUNDS[2])],
}


class Saved(NamedTuple):
    folder: Path
    name: str
    model: Any
    expected: dict[int, Reference]

    @property
    def turns(self) -> list[Turn]:
        return TURNS[self.name]


#: For tests of one family, the others being tested beside `make test`; and of all.
EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in MODELS if name != "whisper"]
ONE = pytest.mark.parametrize("saved", ["whisper", *EXTENDED], indirect=True)
EVERY = pytest.mark.parametrize("saved", MODELS, indirect=True)


@pytest.fixture(scope="module")
def make_saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Makes each model once, whatever lists of them tests have."""

    def make(name: str) -> Saved:
        folder = tmp_path_factory.mktemp(name)
        return Saved(folder, name, save_model(name, folder), {})

    return cache(make)


@pytest.fixture
def saved(request: pytest.FixtureRequest, make_saved: Callable[[str], Saved]) -> Saved:
    return make_saved(request.param)


def opened(saved: Saved, **settings: Any) -> LLM:
    given = {
        "model.dtype": "float32", "cache.block_size": 16, "parallel.executor": "inline",
        "scheduler.max_num_seqs": 8, "cache.cpu_memory_gib": 0.1, **settings,
    }  # fmt: skip
    return LLM(str(saved.folder), progress=False, settings=given)


def generate(llm: LLM, turns: Sequence[Turn], params: SamplingParams = PARAMS) -> list[Output]:
    prompts: list[Any] = [as_prompt(llm, turn) for turn in turns]
    return llm.run(llm._generate(prompts, [params] * len(prompts), [0] * len(prompts)))


def as_prompt(llm: LLM, turn: Turn) -> Any:
    start, source = turn
    if not isinstance(source, np.ndarray):
        return list(source)
    format = llm.frontend._model.source
    assert format is not None
    return SourcePrompt(start, format.source(source))


def check(saved: Saved, turns: Sequence[Turn], outputs: Sequence[Output]) -> None:
    for turn, output in zip(turns, outputs, strict=True):
        number = next(i for i, each in enumerate(saved.turns) if each is turn)
        if number not in saved.expected:
            start, source = turn
            saved.expected[number] = reference_output(
                saved.model, saved.name, start, source, TOKENS
            )
        expected = saved.expected[number]
        assert output.token_ids == expected.tokens, number
        found = [each.logprob for each in output.completions[0].logprobs or ()]
        assert found == pytest.approx(expected.logprobs, abs=2e-4), number


def test_spectrograms_are_transformers_s() -> None:
    for mels, samples in ((80, sound(1.7, 4)), (128, sound(0.3, 5)), (80, np.zeros(9000))):
        extract = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=2)
        expected = extract(samples, sampling_rate=RATE, return_tensors="pt").input_features
        padded = torch.zeros(1, 2 * RATE)
        padded[0, : len(samples)] = torch.from_numpy(samples)
        found = log_mel(padded, mel_filters(mels, padded.device))
        assert torch.allclose(found, expected, atol=3e-5)


@EVERY
def test_all_together(saved: Saved) -> None:
    with opened(saved) as llm:
        outputs = generate(llm, saved.turns)
        check(saved, saved.turns, outputs)
        given = {(tuple(start), len(source), sum(source)) for start, source in saved.turns}
        assert len({tuple(output.token_ids) for output in outputs}) == len(given)


@ONE
def test_chunks_and_one_source_a_step(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MediaConfig, "encoder_budget", 1)
    settings = {
        "scheduler.max_num_batched_tokens": 7, "scheduler.max_num_seqs": 4,
        "cache.enable_prefix_caching": False,
    }  # fmt: skip
    with opened(saved, **settings) as llm:
        check(saved, saved.turns, generate(llm, saved.turns))


@ONE
def test_preempted_requests_begin_again_with_their_source(saved: Saved) -> None:
    with opened(saved, **{"cache.num_blocks": 5}) as llm:
        outputs = generate(llm, [*saved.turns, *saved.turns])
        check(saved, [*saved.turns, *saved.turns], outputs)
        assert any(output.completions[0].num_preemptions for output in outputs)


@ONE
def test_a_source_that_is_known_is_not_encoded_again(saved: Saved) -> None:
    with opened(saved) as llm:
        calls = encoder_calls(llm)
        for _ in range(2):
            for turn in saved.turns:
                check(saved, [turn], generate(llm, [turn]))
        assert sum(calls) == num_sources(saved)
        llm.run(reset(llm))
        check(saved, saved.turns[:1], generate(llm, saved.turns[:1]))
        assert sum(calls) == num_sources(saved) + 1


def num_sources(saved: Saved) -> int:
    return len({tuple(np.asarray(source).tolist()) for _, source in saved.turns})


async def reset(llm: LLM) -> None:
    llm.frontend.reset_prefix_cache()


def encoder_calls(llm: LLM) -> list[int]:
    """Returns a list to which each call of the encoder adds how many sources it has."""
    executor = llm.frontend.engines[0]._workers.executor
    assert isinstance(executor, InlineExecutor)
    encoder, calls = executor._worker.runner.model.encoder, []
    encode = encoder.encode

    def count(sources: Any) -> Any:
        calls.append(len(sources))
        return encode(sources)

    encoder.encode = count
    return calls


@ONE
def test_sequences_and_beams_of_one_source(saved: Saved) -> None:
    start, source = saved.turns[0]
    with opened(saved) as llm:
        calls = encoder_calls(llm)
        (output,) = generate(llm, saved.turns[:1], SamplingParams(n=3, max_tokens=TOKENS, seed=1))
        assert len({tuple(each.token_ids) for each in output.completions}) > 1
        params = BeamSearchParams(beam_width=3, max_tokens=TOKENS, ignore_eos=True)
        (found,) = generate(llm, saved.turns[:1], params.sampling_params())
        assert calls == [1]
    expected = saved.model.generate(
        **encoder_inputs(saved.name, source, saved.model),
        decoder_input_ids=torch.tensor([start]), num_beams=3, max_new_tokens=TOKENS,
        min_new_tokens=TOKENS, do_sample=False, use_cache=False,
        **(dict.fromkeys(SUPPRESSING) if saved.name == "whisper" else {}),
    )  # fmt: skip
    assert found.token_ids == expected[0].tolist()[-TOKENS:]


@pytest.mark.extended
@EVERY
def test_two_tensor_parallel_ranks(saved: Saved) -> None:
    settings = {"parallel.tensor_parallel_size": 2, "parallel.executor": "multiprocess"}
    with opened(saved, **settings) as llm:
        assert llm.collective_rpc(has_compiler) == [False, False]
        check(saved, saved.turns, generate(llm, saved.turns))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
@pytest.mark.parametrize("saved", ["whisper"], indirect=True)
def test_transcripts_follow_the_rules_of_timestamps(saved: Saved, ranks: int) -> None:
    settings = {"parallel.tensor_parallel_size": ranks, "parallel.executor": "inline"}
    if ranks > 1:
        settings["parallel.executor"] = "multiprocess"
    with opened(saved, **settings) as llm:
        transcriber = llm.frontend.require_transcriber()
        for has_times in (True, False):
            parts = [transcriber.format.source(samples) for samples in SOUNDS]
            recording = Recording(parts, [0.0, 0.7, 2.7], 4.0)
            prompts: list[Any] = transcriber.prompts(
                recording, "de", "transcribe", text="", has_times=has_times, max_len=128
            )
            params = transcriber.params(0.0, has_times=has_times, logprobs=True)
            params = replace(params, max_tokens=TOKENS)
            outputs = llm.run(llm._generate(prompts, [params] * 3, [0] * 3))
            for samples, output in zip(SOUNDS, outputs, strict=True):
                expected = saved.model.generate(
                    **encoder_inputs("whisper", samples, saved.model), language="de",
                    task="transcribe", return_timestamps=has_times, max_new_tokens=TOKENS,
                    return_dict_in_generate=True,
                )  # fmt: skip
                # which returns what comes up to the last pair of timestamps, or all with the prompt
                sequence = expected["sequences"][0].tolist()[0 if has_times else 4 :]
                assert len(sequence) > 4
                assert output.token_ids[: len(sequence)] == sequence
                assert output.token_ids[0] >= ID["<|0.00|>"] or not has_times


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.extended)])
@pytest.mark.parametrize("saved", ["whisper"], indirect=True)
def test_tokens_have_the_times_of_transformers(saved: Saved, ranks: int) -> None:
    settings = {"parallel.tensor_parallel_size": ranks, "parallel.executor": "inline"}
    if ranks > 1:
        settings["parallel.executor"] = "multiprocess"
    # the tokens of the last one fill the decoder, and a step has room for no other
    sounds, counts = [*SOUNDS, SOUNDS[0]], [9, 30, 1, 124]
    source = np.random.default_rng(0)
    tokens = [source.choice([*range(200), ID["<|0.20|>"]], count).tolist() for count in counts]
    with opened(saved, **settings, **{"scheduler.max_num_batched_tokens": 130}) as llm:
        transcriber = llm.frontend.require_transcriber()
        parts = [transcriber.format.source(samples) for samples in sounds]
        recording = Recording(parts, [0.0] * 4, 6.0)
        for _ in range(2):  # the second time the prompts are in the cache
            prompts, params = transcriber.alignment(recording, "de", "transcribe", tokens, 128)
            outputs = llm.run(llm._generate(list[Any](prompts), [params] * 4, [0] * 4))
            found = [output.completions[0].features["alignment"] for output in outputs]
    assert [len(each) for each in found] == counts
    for samples, prompt, weights in zip(sounds, prompts, found, strict=True):
        if len(weights) > 1:  # of one token transformers makes NaN
            inputs = encoder_inputs("whisper", samples, saved.model)
            heads = [(layer, head) for layer in (1, 2) for head in range(4)]
            times = reference_times(saved.model, inputs, len(samples), heads, prompt, len(weights))
            assert [frame / 50 for frame in first_frames(weights)] == pytest.approx(times)
    assert first_frames(found[2]) == [0]


def test_words_are_runs_of_tokens() -> None:
    pieces = [" Well", "-known", ",", " \u201c", "N", "\ufffd", "\ufffd", "!", "\u201d", " is"]
    whole = {(5, 6): "\u00e9"}

    def decode(ids: Sequence[int]) -> str:
        return whole.get(tuple(ids), "".join(pieces[each] for each in ids))

    times = [each / 10 for each in range(len(pieces) + 1)]
    found = list(words(range(len(pieces)), times, "en", decode))
    assert found == [
        ("Well-known,", 0.0, 0.3), ("\u201cN\u00e9!\u201d", 0.3, 0.9), ("is", 0.9, 1.0)
    ]  # fmt: skip
    chinese = list(
        words(range(4), times[:5], "zh", lambda ids: "".join("你好。吗"[i] for i in ids))
    )
    assert chinese == [("你", 0.0, 0.1), ("好。", 0.1, 0.3), ("吗", 0.3, 0.4)]


def test_segments_have_the_times_of_their_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokens = SpeechTokens.load(tmp_path, tokenizer)
    format = SourceFormat("sound", SECONDS * RATE, SECONDS * 50, (1,), RATE)
    transcriber = Transcriber(format, tokens, tokenizer, Config(model=ModelConfig(path="")))

    def time(seconds: float) -> int:
        return ID[f"<|{seconds:.2f}|>"]

    parts = [format.source(np.zeros(length, np.float32)) for length in (RATE, RATE // 2)]
    recording = Recording(parts, [0.0, 1.0], 1.5)
    a, b, c = tokenizer.encode("abc", False)
    ids = [time(0.1), a, b, time(0.4), time(0.5), c, time(1.8), ID["<|endoftext|>"]]
    found = transcriber.segments(recording, 0, ids)
    assert [(each.start, each.end, each.text) for each in found] == [
        (0.1, 0.4, "ab"),
        (0.5, 1.0, "c"),
    ]
    # a transcript that was cut off, and one without text
    found = transcriber.segments(recording, 1, [time(0.1), a])
    assert [(each.start, each.end, each.text) for each in found] == [(1.1, 1.5, "a")]
    assert transcriber.segments(recording, 1, [time(0.0), time(0.2)]) == []

    open_end = [time(0.1), a, time(0.4), time(0.4), ID["<|endoftext|>"]]
    assert transcriber.with_rests(recording, [open_end, ids], [0, 1]) == (recording, [])  # silence
    loud = np.where(np.arange(RATE) % 2, 0.5, -0.5).astype(np.float32)
    quiet = np.where(np.arange(RATE) < 0.4 * RATE, loud, loud / 50)
    sounds = [format.source(each) for each in (loud, quiet, loud, loud, loud)]
    whole = Recording(sounds, [0.0, 1.0, 2.0, 3.0, 4.0], 5.0)
    closed, empty = [time(0.1), a, time(0.4)], [time(0.0), time(0.0)]
    transcripts = [open_end, open_end, closed, empty, open_end]
    more, numbers = transcriber.with_rests(whole, transcripts, range(4))
    assert numbers == [1]
    assert more.starts == [0.0, 0.4, 1.0, 2.0, 3.0, 4.0]
    assert np.array_equal(more.parts[1].values, loud[round(0.4 * RATE) :])
    more, numbers = transcriber.with_rests(whole, transcripts, [4])
    assert (numbers, more.starts[5]) == ([5], 4.4)
    transcriber.shutdown()


@pytest.mark.parametrize("saved", ["bart"], indirect=True)
def test_texts_and_token_ids_are_what_the_encoder_reads(saved: Saved) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with opened(saved) as llm:
        ids = [*llm.run(llm.frontend.encode("abc"))]
        text, listed = llm.generate(["abc", ids], params)
        assert text.token_ids == listed.token_ids
        assert text.prompt_token_ids == listed.prompt_token_ids == ids
        for prompt, message in (
            ([], "is empty"),
            ([5] * 129, "encoder takes 128"),
            ([300], "vocab"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([prompt], params)
        with pytest.raises(RequestError, match="prompt_logprobs is not supported"):
            llm.generate([[5]], replace(params, prompt_logprobs=0))
        with pytest.raises(RequestError, match="does not transcribe"):
            llm.frontend.require_transcriber()
