"""Drafters on a CPU: the text is that of a run without drafts, whatever a drafter says, and a
drafter that is the target is right."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aioinfer.config import SpeculationConfig, load_config
from aioinfer.engine.served_model import with_speculation
from aioinfer.errors import ConfigError
from aioinfer.features.speculation.drafting import Drafting, DraftRows
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.drafters.eagle3 import make_eagle3
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request
from tests.eagle_models import LAYOUTS, EagleReference, eagle_head
from tests.mtp_models import mtp_model
from tests.paged_model import PagedModel, load_model
from tests.scheduled_worker import (
    GREEDY,
    NEW_TOKENS,
    RandomLookahead,
    generate,
    prompts_that_begin_alike,
)
from tests.tiny_models import tiny_model

MOST = 4
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02),
    SamplingParams(temperature=0.7, top_p=0.9),
)
PENALIZED = (
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0, 11: -50.0}),
)


class AlwaysAhead(RandomLookahead):
    """Asks for as many lookahead rows of each request as there are drafts."""

    reserve = MOST - 1

    def lookahead(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        return dict.fromkeys(decodes, self._most)


def drafts_of(
    model: Path, method: Literal["draft", "eagle3", "mtp"] = "draft"
) -> SpeculationConfig:
    return SpeculationConfig(method=method, model=str(model), max_draft_tokens=MOST)


def test_the_default_method(tmp_path: Path) -> None:
    """The head of the checkpoint if it has one, or the model that is named, by its kind."""
    with_head, _ = mtp_model("qwen3_5", tmp_path / "with_head")
    plain = tiny_model("llama", tmp_path / "plain", vocab_size=200)
    eagle_head(tmp_path / "eagle", "midlayer")
    eagle_head(tmp_path / "speculator", "layers.0")

    def method(folder: Path, *settings: str) -> tuple[str, str | None]:
        config = load_config(None, [f"model.path={folder}", *settings])
        speculation = with_speculation(config, folder).speculation
        return speculation.method, speculation.model

    assert method(with_head) == ("mtp", None)
    assert method(plain) == ("ngram", None)
    assert method(with_head, "model.load_format=dummy") == ("ngram", None)
    assert method(with_head, "speculation.method=none") == ("none", None)
    assert method(with_head, "parallel.pipeline_parallel_size=2") == ("ngram", None)
    shared = "parallel.expert_parallel=true", "parallel.data_parallel_size=2"
    assert method(with_head, *shared) == ("none", None)
    for name, found in (("eagle", "eagle3"), ("speculator", "eagle3"), ("plain", "draft")):
        model = str(tmp_path / name)
        assert method(plain, f"speculation.model={model}") == (found, model)
    config = json.loads((with_head / "config.json").read_text("utf-8"))
    rule = {"dynamic": {"-:.*mtp.*": {}}}
    for checkpoint, rules, found in (
        ("gptq", {}, "ngram"),
        ("fp8", {}, "mtp"),
        ("gptq", rule, "mtp"),
    ):
        quantized = {"quant_method": checkpoint, "bits": 4, "group_size": 32, **rules}
        text = json.dumps(config | {"quantization_config": quantized})
        (with_head / "config.json").write_text(text, "utf-8")
        assert method(with_head) == (found, None)
    (with_head / "config.json").write_text(json.dumps(config), "utf-8")
    # a checkpoint whose head was left out
    tensors = load_file(with_head / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    assert len(kept) < len(tensors)
    save_file(kept, with_head / "model.safetensors", {"format": "pt"})
    assert method(with_head) == ("ngram", None)


def test_a_draft_model_that_is_the_target_is_always_right(tmp_path: Path) -> None:
    """Its text lacks the second token, which windows of 9 tokens leave behind."""
    folder = tiny_model("mistral", tmp_path, vocab_size=200, sliding_window=9)
    rng = random.Random(2)
    prompts = [[rng.randrange(200) for _ in range(rng.randint(20, 60))] for _ in range(9)]
    plain, _ = generate(folder, prompts, params=PARAMS)
    ahead = AlwaysAhead(MOST)
    outputs, _ = generate(
        folder, prompts, params=PARAMS, ahead=ahead, speculation=drafts_of(folder), block_size=16
    )
    assert outputs == plain
    assert ahead.num_kept == ahead.num_rows
    assert ahead.num_rows >= len(prompts) * NEW_TOKENS * MOST / (MOST + 1) * 0.9


@pytest.mark.parametrize(
    "family", ["gemma3", pytest.param("deepseek_v3", marks=pytest.mark.extended)]
)
def test_other_families(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, vocab_size=200)
    prompts = prompts_that_begin_alike(8)
    plain, _ = generate(folder, prompts, params=PARAMS)
    ahead = AlwaysAhead(MOST)
    outputs, _ = generate(
        folder, prompts, params=PARAMS, ahead=ahead, speculation=drafts_of(folder)
    )
    assert outputs == plain
    assert ahead.num_kept > 0.2 * ahead.num_rows


def test_a_draft_model_of_another_shape(tmp_path: Path) -> None:
    """It has a KV group of its own, and is mostly wrong."""
    folder = tiny_model("llama", tmp_path / "target", vocab_size=200)
    small = tiny_model(
        "qwen3", tmp_path / "small", vocab_size=190, num_hidden_layers=1, head_dim=8, seed=3
    )
    prompts, params = prompts_that_begin_alike(9), (*PARAMS, *PENALIZED)
    plain, _ = generate(folder, prompts, params=params)
    ahead = RandomLookahead(MOST)
    outputs, _ = generate(folder, prompts, params=params, ahead=ahead, speculation=drafts_of(small))
    assert outputs == plain
    assert 0 < ahead.num_kept < 0.2 * ahead.num_rows


def test_siblings_chunks_and_preemption(tmp_path: Path) -> None:
    """Several sequences a prompt, prompts in chunks beside lookahead rows, and too few blocks."""
    folder = tiny_model("llama", tmp_path, vocab_size=200)
    prompts, params = prompts_that_begin_alike(5), (*PARAMS, *PENALIZED)
    plain, _ = generate(folder, prompts, n=3, params=params)
    ahead = RandomLookahead(3)
    outputs, scheduler = generate(
        folder, prompts, n=3, budget=13, num_blocks=60, params=params, ahead=ahead,
        speculation=drafts_of(folder),
    )  # fmt: skip
    assert outputs == plain
    assert scheduler.stats.preemptions > 1
    assert ahead.num_kept > 50


@pytest.mark.parametrize(
    ("layout", "norms_residual"), [("midlayer", False), ("layers.0", False), ("layers.0", True)]
)
def test_an_eagle_head_computes_what_plain_torch_does(
    layout: str, norms_residual: bool, tmp_path: Path
) -> None:
    """A text in chunks, and then its own output in the place of the target's streams."""
    folder = tiny_model("llama", tmp_path / "target", vocab_size=200)
    target = load_model(folder, ParallelGroup(0, 1))
    assert isinstance(target, DecoderModel)
    tensors = eagle_head(
        tmp_path / "head", layout, taps=(0, 1, 1), norms_residual=norms_residual,
        has_embedding=norms_residual,
    )  # fmt: skip
    make = LayerMaker(target.backend, 64, 512, 1e-5)
    head = make_eagle3(tmp_path / "head", target, make, "auto")
    head.load(tmp_path / "head", "auto", 0, lambda done, total: None)
    assert head.tapped_layers == (0, 1, 1)
    reference = EagleReference(tensors, layout, norms_residual=norms_residual)
    rng = random.Random(2)
    text = torch.tensor([rng.randrange(200) for _ in range(24)], dtype=torch.int32)
    assert target.embedding is not None
    table = tensors["embed_tokens.weight"] if norms_residual else target.embedding.weight
    paged = PagedModel(head, 16)  # type: ignore[arg-type]
    taps = torch.randn(24, 3, 64, generator=torch.Generator().manual_seed(1))
    expected = reference.forward(reference.combine(taps), table[text.long()])
    outputs = []
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 10), (10, 24)):
            step = paged.prepare({0: text[start:end].tolist()})
            outputs.append(head.forward(head.combine(taps[start:end]), step))
        output = torch.cat(outputs)
        assert (output - expected).abs().max() < 2e-5 * expected.std()
        logits, wanted = head.logits(output), reference.logits(expected, 200)
        assert torch.equal(logits.isinf(), wanted.isinf())
        there = wanted.isfinite()
        assert (logits[there] - wanted[there]).abs().max() < 2e-5 * wanted[there].std()


def test_streams_before_layers_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_model("qwen3", tmp_path, vocab_size=200, num_hidden_layers=6)
    model = load_model(folder, ParallelGroup(0, 1))
    model.tapped_layers = (2, 3, 5)
    text = [random.Random(3).randrange(200) for _ in range(20)]
    step = PagedModel(model, 16).prepare({0: text})
    step.taps = torch.zeros(20, 3, 64)
    with torch.inference_mode():
        model.finish(step, model.begin(step))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        states = theirs(torch.tensor([text]), output_hidden_states=True).hidden_states
    for number, place in ((2, 0), (3, 1), (5, 2)):
        assert torch.allclose(step.taps[:, place], states[number][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_with_an_eagle_head(layout: str, tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path / "target", vocab_size=200, num_hidden_layers=4)
    eagle_head(tmp_path / "head", layout)
    prompts, params = prompts_that_begin_alike(9), (*PARAMS, *PENALIZED)
    plain, _ = generate(folder, prompts, params=params)
    ahead = RandomLookahead(MOST)
    outputs, _ = generate(
        folder, prompts, budget=40, params=params, ahead=ahead,
        speculation=drafts_of(tmp_path / "head", "eagle3"),
    )  # fmt: skip
    assert outputs == plain
    assert ahead.num_rows > 100


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    target = load_model(tiny_model("llama", tmp_path / "t", vocab_size=200), ParallelGroup(0, 1))
    assert isinstance(target, DecoderModel)
    make = LayerMaker(target.backend, 64, 512, 1e-5)
    eagle_head(tmp_path / "deep", "midlayer", taps=(2, 9, 17))
    with pytest.raises(ConfigError, match=r"before the layers \[2, 9, 17\] of a model that has 2"):
        make_eagle3(tmp_path / "deep", target, make, "auto")
    eagle_head(tmp_path / "other", "layers.0", taps=(0, 0, 1), vocab_size=300)
    head = make_eagle3(tmp_path / "other", target, make, "auto")
    with pytest.raises(ConfigError, match="another vocabulary"):
        head.load(tmp_path / "other", "auto", 0, lambda done, total: None)


def test_a_target_that_keeps_states(tmp_path: Path) -> None:
    """Its states follow the rows that are kept; the draft model has attention alone."""
    folder = tiny_model("qwen3_5_text", tmp_path / "target", vocab_size=200)
    small = tiny_model("llama", tmp_path / "small", vocab_size=200, seed=3)
    prompts = prompts_that_begin_alike(6)
    plain, _ = generate(folder, prompts, params=PARAMS)
    ahead = RandomLookahead(MOST)
    outputs, _ = generate(folder, prompts, params=PARAMS, ahead=ahead, speculation=drafts_of(small))
    assert outputs == plain
    assert ahead.num_rows > ahead.num_kept > 0
    with pytest.raises(ConfigError, match="keep states cannot draft"):
        generate(folder, prompts, ahead=ahead, speculation=drafts_of(folder))


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5", "deepseek_v3", "mimo"),
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("qwen3_next", "glm4_moe")),
    ],
)
def test_text_with_a_head_of_the_model(name: str, tmp_path: Path) -> None:
    folder, _ = mtp_model(name, tmp_path, vocab_size=200)
    prompts = prompts_that_begin_alike(5)
    plain, _ = generate(folder, prompts, params=PARAMS)
    ahead = RandomLookahead(MOST)
    speculation = SpeculationConfig(method="mtp", max_draft_tokens=MOST)
    outputs, _ = generate(
        folder, prompts, budget=40, params=PARAMS, ahead=ahead, speculation=speculation
    )
    assert outputs == plain
    assert ahead.num_rows > 60


def test_drafts_of_two_passes_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, tokens and positions go together: the head's first draft behind a prompt, and
    the second one, for which its own output takes the place of hidden states."""
    folder, reference = mtp_model("mimo", tmp_path, vocab_size=200)
    prompt = [random.Random(4).randrange(200) for _ in range(24)]
    drafts: dict[int, int] = {}
    append = Drafting._append

    def note(self: Drafting, logits: torch.Tensor, rows: DraftRows) -> None:
        best = logits.argmax(-1).tolist()
        for position, draft in zip(rows.positions.tolist(), best, strict=True):
            drafts.setdefault(position, draft)
        append(self, logits, rows)

    monkeypatch.setattr(Drafting, "_append", note)
    speculation = SpeculationConfig(method="mtp", max_draft_tokens=2)
    ((first, *_),), _ = generate(
        folder, [prompt], ahead=AlwaysAhead(2), speculation=speculation, block_size=16
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        text = [*prompt[1:], first]
        for position in (25, 26):
            output = reference(hidden, table[torch.tensor(text)])
            draft = int((output[-1] @ head.T).argmax())
            assert drafts[position] == draft
            hidden, text = torch.cat((hidden, output[-1:])), [*text, draft]
