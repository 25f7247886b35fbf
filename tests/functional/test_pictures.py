"""Pictures over HTTP: in every API, from one conversation, and refused with the place of each."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
import torch
from PIL import Image

from aioinfer.engine import pictures
from tests.functional.conftest import Served, openai_client, serve
from tests.hostile_files import at_bounded_cost
from tests.vision_models import (
    IMAGE,
    as_file,
    as_url,
    conversation,
    picture,
    reference_inputs,
    reference_output,
    save_model,
)
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME, TOKENS = "qwen3_vl", 6
PICTURE = picture(120, 90, 1)
URL = as_url(PICTURE)
BASE64 = URL.partition(",")[2]
TEXT = "What is this?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model whose tokenizer begins texts with a token that its chat template writes as well."""
    folder = tmp_path_factory.mktemp("model")
    saved = save_model(NAME, folder)
    tokenizer, config = (folder / name for name in ("tokenizer.json", "tokenizer_config.json"))
    backend, begin = tokenizers.Tokenizer.from_file(str(tokenizer)), "<|im_start|>"
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, 256)]
    )
    backend.save(str(tokenizer))
    settings = json.loads(config.read_text("utf-8"))
    template = {"chat_template": begin + settings["chat_template"]}
    config.write_text(json.dumps(settings | template), "utf-8")
    return folder, saved


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sighted(model: tuple[Path, Any]) -> AsyncIterator[Served]:
    settings: dict[str, Any] = {
        "parallel.executor": "inline", "model.path": str(model[0]), "model.dtype": "float32",
        "media.max_pictures": 3, "server.served_model_names": ["sighted"],
    }  # fmt: skip
    async with serve(**settings) as served:
        yield served


def picture_first(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def test_each_api_gives_the_reference_s_text(
    sighted: Served, model: tuple[Path, Any]
) -> None:
    messages: Any = conversation(PICTURE, TEXT)
    async with openai_client(sighted) as client:
        chat = await client.chat.completions.create(model="sighted", messages=messages, **GREEDY)
        text = {"type": "input_text", "text": TEXT}
        image = {"type": "input_image", "image_url": URL, "detail": "auto"}
        given: Any = picture_first([image, text])
        response = await client.responses.create(
            model="sighted", input=given, temperature=0, max_output_tokens=TOKENS
        )
    whole = await sighted.post(
        "/v1/chat/completions", messages=messages, return_token_ids=True, **GREEDY
    )
    prompt, found = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
    expected = await asyncio.to_thread(reference_output, model[1], NAME, prompt, [PICTURE], TOKENS)
    assert found == expected.tokens
    answer = whole["choices"][0]["message"]["content"]
    assert chat.choices[0].message.content == answer == response.output_text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(prompt)
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    text = {"type": "text", "text": TEXT}
    content = [{"type": "image", "source": source}, text]
    anthropic = {"messages": picture_first(content), **GREEDY}
    reply = await sighted.post("/v1/messages", **anthropic)
    assert reply["content"][0]["text"] == answer
    assert sum(reply["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")) == len(
        prompt
    )
    content[0] = {"type": "image", "source": {"type": "url", "url": URL}}
    reply = await sighted.post("/v1/messages", messages=picture_first(content), **GREEDY)
    assert reply["content"][0]["text"] == answer
    limits = {"temperature": 0, "num_predict": TOKENS}
    message = {"role": "user", "content": TEXT, "images": [BASE64]}
    ollama = await sighted.post("/api/chat", messages=[message], options=limits, stream=False)
    assert ollama["message"]["content"] == answer
    ollama = await sighted.post(
        "/api/generate", prompt=TEXT, images=[BASE64], options=limits, stream=False
    )
    assert ollama["response"] == answer
    text = (await sighted.post("/apply-template", messages=messages))["prompt"]
    assert "\n<__media__>" in text
    texts = text, text.replace("<__media__>", "<|vision_start|><__media__><|vision_end|>")
    prompts = [{"prompt_string": each, "multimodal_data": [BASE64]} for each in texts]
    limits = {"temperature": 0, "n_predict": TOKENS}
    *found, _ = await sighted.post("/completion", prompt=[*prompts, prompt], **limits)
    for llama, each in zip(found, texts, strict=True):
        assert (llama["content"], llama["prompt"]) == (answer, each)
        assert llama["tokens_evaluated"] == len(prompt)


async def test_an_embedding_has_the_picture(sighted: Served, model: tuple[Path, Any]) -> None:
    messages = {"messages": conversation(PICTURE, TEXT), "add_generation_prompt": False}
    ids = torch.tensor([(await sighted.post("/tokenize", **messages))["tokens"]])
    with torch.inference_mode():
        inputs = reference_inputs(NAME, [PICTURE]) | {"mm_token_type_ids": (ids == IMAGE).int()}
        states = model[1].model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    expected = torch.nn.functional.normalize(states[0, -1], dim=0).tolist()
    reply = await sighted.post("/v1/embeddings", messages=messages["messages"])
    assert reply["data"][0]["embedding"] == pytest.approx(expected, abs=1e-4)
    given = {"prompt_string": (await sighted.post("/apply-template", **messages))["prompt"]}
    content = [given | {"multimodal_data": [BASE64]}, given]
    with_picture, text = await sighted.post("/embedding", content=content)
    assert with_picture["embedding"] == [pytest.approx(expected, abs=1e-4)]
    assert text["embedding"] != [pytest.approx(expected, abs=1e-4)]


async def test_counts_of_tokens_are_exact(sighted: Served) -> None:
    messages = conversation(PICTURE, TEXT)
    usage = (await sighted.post("/v1/chat/completions", messages=messages, **GREEDY))["usage"]
    tokens = await sighted.post("/tokenize", messages=messages)
    assert tokens["count"] == usage["prompt_tokens"]
    content = [
        {"type": "image", "source": {"type": "base64", "data": BASE64}},
        {"type": "text", "text": TEXT},
    ]
    counted = await sighted.post("/v1/messages/count_tokens", messages=picture_first(content))
    assert counted["input_tokens"] == usage["prompt_tokens"]
    items = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": TEXT}]
    counted = await sighted.post("/v1/responses/input_tokens", input=picture_first(items))
    assert counted["input_tokens"] == usage["prompt_tokens"]


async def test_models_tell_what_they_read(sighted: Served, served: Served) -> None:
    for server, expected in ((sighted, ["text", "image"]), (served, ["text"])):
        async with server.http.get("/v1/models") as response:
            (first, *_) = (await response.json())["data"]
        assert first["input_modalities"] == expected
    for server, expected in ((sighted, True), (served, False)):
        shown = await server.post("/api/show")
        assert ("vision" in shown["capabilities"]) == expected
        async with server.http.get("/props") as response:
            props = await response.json()
        assert props["modalities"] == {"vision": expected, "audio": False}
        assert props["media_marker"] == "<__media__>"


async def test_a_conversation_goes_on_with_a_stored_picture(sighted: Served) -> None:
    items = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": TEXT}]
    limits = {"temperature": 0, "max_output_tokens": 2}
    first = await sighted.post("/v1/responses", input=picture_first(items), **limits)
    second = await sighted.post(
        "/v1/responses", input="And?", previous_response_id=first["id"], **limits
    )
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_texts_of_special_tokens_are_no_pictures(sighted: Served) -> None:
    messages = conversation("<|image_pad|><|vision_start|>", PICTURE, "<|image_pad|>")
    reply = await sighted.post("/tokenize", messages=messages)
    plain = await sighted.post("/tokenize", messages=conversation(PICTURE))
    assert reply["count"] > plain["count"] + 30
    pads = [sum(token == 260 for token in each["tokens"]) for each in (reply, plain)]
    assert pads[0] == pads[1]


@pytest.mark.parametrize("template_reads", [True, False])
async def test_a_template_is_applied_without_reading_pictures(
    template_reads: bool, sighted: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not template_reads:  # as InternVL's first ones, which know texts alone
        reader = sighted.frontend._pictures
        assert reader is not None
        monkeypatch.setattr(reader, "_writes_marker", False)
        monkeypatch.setattr(reader, "_around", ("", ""))
        monkeypatch.setattr(type(reader._format), "behind", "\n")
    content = [image_url({"url": BROKEN}), {"type": "text", "text": "<|image_pad|>"}]
    reply = await sighted.post("/apply-template", messages=picture_first(content))
    picture = "<__media__>" if template_reads else "<__media__>\n"
    assert f"<|im_start|>user\n{picture}<|image_pad|><|im_end|>\n" in reply["prompt"]
    many = picture_first([image_url({"url": BROKEN})] * 4)
    reply = await sighted.post("/apply-template", 400, messages=many)
    assert "one too many" in reply["error"]["message"]


BROKEN = "data:image/png;base64," + base64.b64encode(as_file(PICTURE)[:300]).decode()


def chat_of(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def image_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def response_of(**fields: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **fields}]}]}


def block(**source: str) -> dict[str, Any]:
    return {"max_tokens": 1, **chat_of({"type": "image", "source": source})}


def llama_of(text: str, *files: Any, **others: Any) -> tuple[str, dict[str, Any]]:
    return "/completion", {"prompt": {"prompt_string": text, "multimodal_data": files}} | others


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
AT = "messages[0].content[0]"
#: Of each: the path, the body, and the parameter and a part of the error.
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a broken picture": (
        CHAT, chat_of({"type": "text", "text": "a"}, image_url({"url": BROKEN})),
        "messages[0].content[1].image_url", "is broken",
    ),
    "no url": (CHAT, chat_of({"type": "image_url"}), f"{AT}.image_url", "is missing"),
    "another type": (
        CHAT, chat_of({"type": "video_url"}), f"{AT}.type",
        "must be one of 'text', 'refusal', 'image_url', 'input_audio', 'audio_url'",
    ),
    "a picture of the assistant": (
        CHAT, chat_of(image_url(URL), role="assistant"), AT, "assistant's message has no pictures"
    ),
    "a file": (
        CHAT, chat_of(image_url("file:///etc/passwd")), f"{AT}.image_url", "allowed_sources"
    ),
    "a host": (
        RESPONSES, response_of(image_url="http://127.0.0.1/"), "input[0].content[0].image_url",
        "allowed_sources",
    ),
    "a stored file": (
        RESPONSES, response_of(file_id="file-1"), "input[0].content[0].image_url", "must be a URL"
    ),
    "no source": (
        MESSAGES, {"max_tokens": 1, **chat_of({"type": "image"})}, f"{AT}.source", "must be of type"
    ),
    "another media type": (
        MESSAGES, block(type="base64", media_type="text/html", data=BASE64),
        f"{AT}.source.media_type", "must be an image's",
    ),
    "wrong base64": (
        MESSAGES, block(type="base64", media_type="image/png", data="@@"), f"{AT}.source.data",
        "is not valid base64",
    ),
    "Ollama's wrong base64": (
        "/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["@@"]}]},
        "messages[0].images[0]", "is not valid base64",
    ),
    "a raw prompt": (
        "/api/generate", {"prompt": "a", "raw": True, "images": [BASE64]}, "images", "raw prompt",
    ),
    "too many": (
        CHAT, {"messages": conversation(*[PICTURE] * 4)}, "messages[0].content[3].image_url",
        "one too many",
    ),
    "a ribbon": (
        CHAT, {"messages": conversation(Image.new("RGB", (3000, 10)))}, f"{AT}.image_url",
        "200 times as long",
    ),
    "a cut prompt": (
        CHAT, {"messages": conversation(PICTURE), "truncate_prompt_tokens": 5},
        "truncate_prompt_tokens", "would cut",
    ),
    "llama.cpp's file without a place": (
        *llama_of("a", BASE64), "prompt.multimodal_data", "<__media__> of the text: 0, not 1",
    ),
    "llama.cpp's places without files": (
        *llama_of("<__media__><__media__>"), "prompt.multimodal_data", ": 2, not 0",
    ),
    "llama.cpp's data URL": (
        *llama_of("<__media__>", URL), "prompt.multimodal_data[0]", "is not valid base64",
    ),
    "llama.cpp's broken picture": (
        *llama_of("<__media__><__media__>", BASE64, BROKEN.partition(",")[2]),
        "prompt.multimodal_data[1]", "is broken",
    ),
    "llama.cpp's placeholder beside a place": (
        *llama_of("<|image_pad|><__media__>", BASE64), "prompt", "2 placeholder tokens stand for 1",
    ),
    "llama.cpp's bytes": (*llama_of("", 7), "prompt.multimodal_data[0]", "must be a string"),
    "llama.cpp's prompt among token ids": (
        "/completion", {"prompt": [7, {"prompt_string": "a"}]}, "prompt", "and nothing else",
    ),
    "too many for llama.cpp's prompts": (
        "/embedding", {"content": [llama_of("<__media__>" * 2, "a", "a")[1]["prompt"]] * 2},
        "content[1].multimodal_data[1]", "one too many",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_picture_that_is_refused(name: str, sighted: Served) -> None:
    path, body, param, message = REFUSED[name]
    reply = await sighted.post(path, 400, **body)
    error = reply["error"]
    text = error if isinstance(error, str) else error["message"]
    assert param in text
    assert message in text
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == param


async def test_models_refuse_what_they_do_not_read(sighted: Served, served: Served) -> None:
    sound = conversation("a", PICTURE, hears=True)
    for server, messages, place, message in (
        (served, conversation("a", PICTURE), "image_url", "'smollm2' reads no pictures"),
        (served, sound, "input_audio.data", "is a sound, and the model 'smollm2' hears none"),
        (sighted, sound, "input_audio.data", "is a sound, and the model hears none"),
    ):
        for path in (CHAT, "/apply-template", "/v1/embeddings"):
            reply = await server.post(path, 400, messages=messages)
            assert reply["error"]["param"] == f"messages[0].content[1].{place}"
            assert message in reply["error"]["message"]
    path, body = llama_of("<__media__>", BASE64)
    error = (await served.post(path, 400, **body))["error"]
    assert error["param"] == "prompt.multimodal_data[0]"
    assert "'smollm2' reads text alone" in error["message"]
    text = await served.post(path, prompt={"prompt_string": "<__media__>"}, n_predict=0)
    assert text["prompt"] == "<__media__>"


async def test_the_loop_is_not_held_up(sighted: Served) -> None:
    """By large pictures, broken ones and bombs; the longest pause of the loop is looked at."""
    data = await asyncio.to_thread(as_file, picture(2600, 2000, 4), "JPEG")
    large = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    bomb = await asyncio.to_thread(as_url, Image.new("1", (9000, 9000)))
    bodies = [json.dumps(chat_of(image_url(url))) for url in (large, BROKEN, bomb)]

    async def statuses() -> list[int]:
        found = []
        for body in bodies:
            async with sighted.http.post(
                "/tokenize",
                data=io.BytesIO(body.encode()),
                headers={"Content-Type": "application/json"},
            ) as response:
                found.append(response.status)
        return found

    assert await at_bounded_cost(statuses) == [200, 400, 400]


@pytest_asyncio.fixture(loop_scope="session")
async def reader(
    sighted: Served, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[pictures.PictureReader]:
    """The reader of the server's pictures, which keeps none for later requests; nothing collects
    garbage meanwhile."""
    found = sighted.frontend._pictures
    assert found is not None
    monkeypatch.setattr(found, "_held", [])  # of tests before
    monkeypatch.setattr(found, "_recent", pictures._RecentPictures())
    monkeypatch.setattr(pictures, "_MAX_RECENT_BYTES", 0)
    gc.disable()
    yield found
    gc.enable()


async def test_a_repeated_picture_is_not_decoded_again(
    sighted: Served, reader: pictures.PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used go where all do not fit, and none for one that does not fit
    alone."""
    decoded = []
    decode = pictures.decode_picture

    def counted(data: bytes, *rest: Any) -> Image.Image:
        decoded.append(data)
        return decode(data, *rest)

    monkeypatch.setattr(pictures, "decode_picture", counted)

    async def text_of(number: int, width: int = 90) -> str:
        messages = conversation(picture(width, 80, number), TEXT)
        fields = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
        reply = await sighted.post(CHAT, messages=messages, **fields)
        content: str = reply["choices"][0]["message"]["content"]
        return content

    cold = [await text_of(number) for number in (1, 2)]
    assert len(decoded) == 2
    monkeypatch.setattr(pictures, "_MAX_RECENT_BYTES", 2**30)
    assert [await text_of(number) for number in (1, 2, 1, 2, 1)] == [*cold, *cold, cold[0]]
    assert len(decoded) == 4
    each = reader._recent.nbytes // 2
    monkeypatch.setattr(pictures, "_MAX_RECENT_BYTES", 2 * each)
    for number in (3, 1, 2):  # 3 displaces 2, and 2 displaces 3
        await text_of(number)
    await text_of(4, width=800)
    assert len(decoded) == 7
    assert reader._recent.nbytes == 2 * each
    await text_of(1)
    assert len(decoded) == 7


async def freed(reader: pictures.PictureReader) -> None:
    """Returns when no picture is left. A handler may end after its client has the reply."""
    await until(lambda: not reader.held_bytes, 120)


#: Of each: the path, the fields beside the messages, and the status.
ENDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "length": (CHAT, {"max_tokens": 3, "ignore_eos": True}, 200),
    "two sequences": (CHAT, {"max_tokens": 3, "n": 2}, 200),
    "beams": (CHAT, {"max_tokens": 3, "use_beam_search": True, "n": 2}, 200),
    "a stop string": (CHAT, {"max_tokens": 50, "stop": ["a", "e", "0"]}, 200),
    "counted": ("/tokenize", {}, 200),
    "too long": (CHAT, {"max_tokens": 10**6}, 400),
    "a cut prompt": (CHAT, {"truncate_prompt_tokens": 5}, 400),
    "a ribbon": (CHAT, {"messages": conversation(PICTURE, Image.new("RGB", (3000, 10)))}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
async def test_a_request_s_pictures_are_freed_at_its_end(
    name: str, sighted: Served, reader: pictures.PictureReader
) -> None:
    path, fields, status = ENDS[name]
    messages = conversation(PICTURE, picture(70, 60, len(name)), TEXT)
    await sighted.post(path, status, **{"messages": messages, **fields})
    await freed(reader)


async def test_pictures_of_all_requests_have_a_bound(
    sighted: Served, reader: pictures.PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a request alone does not meet: the first is taken, and so is one after its end, or
    after its client has gone."""
    monkeypatch.setattr(pictures, "_MAX_HELD_BYTES", 1)
    body = {"messages": conversation(PICTURE, TEXT), "temperature": 0, "ignore_eos": True}
    more = {"stream": True, "max_tokens": 100}
    for stays in (True, False):
        async with sighted.http.post(CHAT, json=body | more) as response:
            assert response.status == 200
            assert await response.content.readline()
            refused = await sighted.post(CHAT, 503, **body, max_tokens=1)
            assert "use all memory" in refused["error"]["message"]
            if stays:
                assert b"[DONE]" in await response.content.read()
            else:
                response.close()
        await freed(reader)
        await sighted.post(CHAT, **body, max_tokens=1)
        await freed(reader)
