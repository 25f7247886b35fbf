"""lm-eval: `local-completions` and `local-chat-completions` over tasks of local data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from conftest import Server
from lm_eval.tasks import TaskManager

CAPITALS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo"}
TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - metric: acc
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
""",
    "generate": """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
  temperature: 0
metric_list:
  - metric: exact_match
""",
}
HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """The tasks above, over a file of four questions."""
    folder: Path = tmp_path_factory.mktemp("tasks")
    data = folder / "capitals.jsonl"
    choices = list(CAPITALS.values())  # lm-eval puts a space before them
    with data.open("w") as file:
        for label, (country, city) in enumerate(CAPITALS.items()):
            text = f"The capital of {country} is {city}."
            line = {"country": country, "answer": city, "text": text, "label": label}
            file.write(json.dumps(line | {"choices": choices}) + "\n")
    for name, rest in TASKS.items():
        head = HEAD.format(name=name, data=data)
        if "doc_to_text" in rest:
            head = head.replace(head[head.index("doc_to_text") :], "")
        (folder / f"{name}.yaml").write_text(head + rest)
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(server: Server, tasks: TaskManager, task: str, **options: Any) -> Any:
    kind = "local-chat-completions" if options.pop("chat", False) else "local-completions"
    path = "chat/completions" if "chat" in kind else "completions"
    arguments = {"model": server.model, "base_url": f"{server.base}/{path}"} | options
    return lm_eval.simple_evaluate(
        model=kind, model_args={"max_retries": 1, "max_length": 512, **arguments}, tasks=[task],
        task_manager=tasks, apply_chat_template="chat" in kind, bootstrap_iters=0,
    )  # fmt: skip


REMOTE = {"tokenizer_backend": "remote", "tokenized_requests": True}


@pytest.mark.parametrize("further", [{}, {"num_concurrent": 4}, {"batch_size": 4}])
def test_log_likelihoods(server: Server, tasks: TaskManager, further: dict[str, Any]) -> None:
    """The tokenizer is the server's, asked for over HTTP; prompts are token ids, and `echo` with
    `logprobs` scores them."""
    found = evaluate(server, tasks, "choose", **REMOTE, **further)
    assert found["results"]["choose"]["acc,none"] >= 0.5
    for sample in found["samples"]["choose"]:
        assert all(score < 0 for ((score, _),) in sample["resps"])
    # one of them, asked for without lm-eval
    reply = server.post(
        "/v1/completions", prompt="The capital of France is Paris", max_tokens=1, echo=True,
        logprobs=1, temperature=0,
    )  # fmt: skip
    entries = reply["choices"][0]["logprobs"]
    samples = found["samples"]["choose"]
    france = next(sample for sample in samples if sample["doc"]["country"] == "France")
    scored = max(score for ((score, _),) in france["resps"])  # that of Paris
    place = entries["tokens"].index(" Paris")
    assert scored == pytest.approx(entries["token_logprobs"][place], abs=1e-3)


def test_perplexity(server: Server, tasks: TaskManager) -> None:
    found = evaluate(server, tasks, "rolling", **REMOTE)
    assert 1 < found["results"]["rolling"]["byte_perplexity,none"] < 4


def test_generation(server: Server, tasks: TaskManager) -> None:
    plain = evaluate(server, tasks, "generate", tokenizer_backend=None, tokenized_requests=False)
    assert all("Paris" in sample["resps"][0][0] for sample in plain["samples"]["generate"][:1])
    by_ids = evaluate(server, tasks, "generate", **REMOTE)
    texts = [
        [sample["resps"] for sample in found["samples"]["generate"]] for found in (plain, by_ids)
    ]
    assert texts[0] == texts[1]
    chat = evaluate(server, tasks, "generate", chat=True)
    assert len(chat["samples"]["generate"]) == len(CAPITALS)
