"""The sections of the configuration: each key once, with its documentation and its bounds.

`config` joins them, and reads and checks the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from aioinfer.config_keys import key
from aioinfer.sampling_params import MAX_LOGPROBS

#: Sampling parameters that may have a default.
SAMPLING_DEFAULTS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens",
)  # fmt: skip
#: Limits of an API key.
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is served."""

    path: str = key(
        "A local folder, a GGUF file, a hub id (`Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@main` with "
        "a branch, tag or commit) or `package:NAME/FILE` (a file that an installed Python package "
        "ships)."
    )
    trust_remote_code: bool = key(
        "Run Python code that the checkpoint brings along. Only for checkpoints that you trust: "
        "the code can do whatever the server's user can.",
        False,
    )
    tokenizer: str | None = key(
        "Folder or hub id of the tokenizer, where it does not lie with the model. It holds "
        "`tokenizer.json`, sentencepiece's `tokenizer.model`, Mistral's `tekken.json`, or a bare "
        "vocabulary (`vocab.json` with `merges.txt`, or `vocab.txt`) of BERT, DistilBERT, MPNet, "
        "RoBERTa, BART, GPT-2, OPT, Phi, Qwen2, Qwen3 or Whisper. `none`: there is none, prompts "
        "must be token ids, and completions return `token_ids` and no text; text "
        "prompts, chat, stop strings and `/tokenize` are answered 400.",
        None,
    )
    hf_overrides: dict[str, Any] = key(
        "Values laid over the model's `config.json` before it is read, such as "
        "`{ rope_parameters = { rope_theta = 1e6 } }`; nested tables are merged.",
        {},
    )
    chat_template: str | None = key(
        "File with a Jinja chat template to use in place of the tokenizer's own.", None
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "dummy_skewed"] = key(
        "How weights are stored; `dummy` makes random ones at full shape (for speed measurements). "
        "`dummy_skewed`: the same, and of experts the first tenth is taken by half of the tokens.",
        "auto",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "Data type of weights and arithmetic. `auto`: the checkpoint's on a GPU, float32 on a CPU.",
        "auto",
    )
    quantization: Literal["auto", "none", "fp8", "int8"] = key(
        "`auto`: weights are quantized as the checkpoint says. `none`: they are not, and a GGUF "
        "file is converted to float32. `fp8`, `int8`: weights of 16 or 32 bits are quantized while "
        "they are loaded, with a scale for each output feature.",
        "auto",
    )
    max_model_len: int | None = key(
        "Maximum length of a request in tokens, prompt and output together. Default: the model's "
        "own, or what fits into the KV cache. Of encoders: `max_seq_length` of their folder, or "
        "what fits into a step.",
        None,
        minimum=1,
    )
    sleep_mode: bool = key(
        "On a GPU, hold weights and KV cache in memory that `/sleep` gives back and `/wake_up` "
        "takes again (docs/training.md). The host then needs pinned memory for the weights. On a "
        "CPU a model sleeps without it.",
        False,
    )
    offload_gb: float = key(
        "GiB of weights, at least, that each worker has in pinned memory of the host and not on "
        "its GPU. Each step copies them, one layer ahead (docs/offload.md). For GPUs alone.",
        0.0,
        minimum=0.0,
    )
    seed: int = key("Seed of `dummy` weights, and of requests that bring none.", 0)
    sampling: dict[str, Any] = key(
        "Sampling parameters of requests that bring none, over the model's "
        "`generation_config.json`, such as `{ temperature = 0.6, top_p = 0.95 }`: "
        f"{', '.join(f'`{name}`' for name in SAMPLING_DEFAULTS)}. `max_tokens` is less where the "
        "context has no room for it; built-in default: 16 for completions, as OpenAI has it; for "
        "chat and offline use what the context has room for.",
        {},
        names=SAMPLING_DEFAULTS,
    )
    features: list[str] = key(
        "Step features and logits processors of other installed packages, by the names of their "
        "entry points `aioinfer.features` (docs/features.md).",
        [],
    )

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts go in and out."""
        return self.tokenizer != "none"

    @property
    def has_random_weights(self) -> bool:
        """Whether weights are made, and not read."""
        return self.load_format in ("dummy", "dummy_skewed")


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How the model's text is read as a message."""

    tool_format: Literal[
        "auto",
        "none",
        "hermes",
        "nemotron",
        "qwen_coder",
        "llama",
        "mistral",
        "deepseek",
        "kimi",
        "harmony",
        "lfm2",
        "gemma",
    ] = key(
        "How the model writes tool calls. `auto`: as its chat template shows; `hermes` where that "
        "shows none. `none`: its text is not looked through for calls.",
        "auto",
    )
    reasoning_format: Literal["auto", "none", "think", "brackets", "channel"] = key(
        "How the model writes thoughts: between `<think>` and `</think>`, `[THINK]` and "
        "`[/THINK]`, or `<|channel>thought` and `<channel|>`. `auto`: as its chat template shows. "
        "`none`: thoughts stay in the answer.",
        "auto",
    )


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Embeddings: how a prompt's hidden states are pooled."""

    type: Literal["last", "mean", "cls", "all"] | None = key(
        "Which hidden states make an embedding: the last token's, the mean of all, the first "
        "token's, or `all`: a vector for each token. Default: what the model's folder says "
        "(`1_Pooling/config.json`), else `last`, of encoders `mean`.",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = key(
        "Tokens per KV block. Default: 16 on a CPU, 128 on a GPU.", None, minimum=1
    )
    num_blocks: int | None = key(
        "KV blocks of a worker. Default: as many as fit into the memory below. Layers with a "
        "sliding window have no more than running requests can use; of states there are as many, "
        "and a snapshot for each request.",
        None,
        minimum=1,
    )
    cpu_memory_gib: float = key(
        "KV cache of a CPU worker in GiB, where `num_blocks` is not given.", 2.0, above=0
    )
    gpu_memory_utilization: float = key(
        "Fraction of a GPU's memory to use, weights and activations included.",
        0.9,
        above=0,
        maximum=1,
    )
    dtype: Literal["auto", "model", "fp8", "fp8_unchecked"] = key(
        "Data type of keys and values. `auto`: what the checkpoint is made for (its "
        "`kv_cache_scheme`), else `model`, the dtype of the arithmetic. `fp8` (e4m3) holds twice "
        "as many tokens as 16 bits, but not of latent vectors; states beside keys keep their "
        "dtype. They are divided by the checkpoint's scales if it has any, else by scales that are "
        "calibrated at the start with a random prompt; a model that the rounding harms is refused "
        "then, unless it is `fp8_unchecked` (docs/quantization.md).",
        "auto",
    )
    state_dtype: Literal["float32", "bfloat16"] = key(
        "Data type of the matrices that layers with a state keep between steps. `bfloat16` takes "
        "half the memory, and half the bytes of a decode; each step rounds the state.",
        "float32",
    )
    enable_prefix_caching: bool = key(
        "Keep the KV blocks of finished requests for prompts that begin alike. Blocks are shared; "
        "where they have more than 16 tokens, one that only begins alike is copied.",
        True,
    )
    host_bytes: int = key(
        "Memory of the host in bytes, for each worker, that keeps KV blocks beyond those of the "
        "device (docs/kv-store.md): more than the device's own, or it finds little that the device "
        "does not have. 0: none.",
        0,
        minimum=0,
    )
    disk_path: str | None = key(
        "Folder for KV blocks that outlive the server, behind those of `host_bytes`. One server at "
        "a time may use it. The workers of an engine are on one host. Default: none.",
        None,
    )
    disk_bytes: int = key(
        "Bytes that the files in `disk_path` may take, of each engine.", 64 * 2**30, minimum=1
    )
    peer_key_file: str | None = key(
        "File with a key that servers share which hand prompts over to each other: one computes a "
        "prompt, another reads its KV blocks and generates (docs/kv-store.md). Needs "
        "`host_bytes`. Default: none are handed over.",
        None,
    )
    peer_address: str | None = key(
        "`HOST:PORT` at which the first worker serves KV blocks to servers that have the key; the "
        "ports behind it are those of the other workers. Default: none are served.",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Which requests run together in a step."""

    #: Whether the next step is planned while the workers execute the last one. Without that a
    #: request is in one step at a time, which tests compare with.
    plan_ahead: ClassVar[bool] = True

    max_num_seqs: int = key(
        "Maximum number of sequences that run at a time on an engine (slots of a worker).",
        512,
        minimum=1,
        maximum=65_536,
    )
    max_num_batched_tokens: int = key(
        "Token budget of a step: prefill and decode tokens together. Encoders compute prompts "
        "whole, and none that is longer.",
        8192,
        minimum=1,
    )
    target_itl_ms: float | None = key(
        "Milliseconds between the tokens of a stream: a step that also decodes takes as much "
        "prefill as is predicted to fit, a fifth of the step at least. 0: as much as waiting "
        "prompts are worth by their predicted cost, for 2 to 3 % more throughput with long "
        "prompts, at twice the p99 of ITL. Default, and in pipelines: a quarter of "
        "`max_num_batched_tokens`, so that long prompts do not stall streams; where no client "
        "reads a stream (`LLM`, `batch`), all of it.",
        None,
        minimum=0,
    )
    max_waiting_requests: int | None = key(
        "Maximum number of requests that wait for a slot, beyond the free ones, on all "
        "engines together (each of n completions is one); further ones are answered 503. Of "
        "several API keys none may fill it alone.",
        4096,
        minimum=0,
    )
    max_logprobs: int = key(
        "Maximum number of likeliest tokens whose log-probabilities a request may ask for at "
        "each position; -1: all. Above 20 they cost time, and above 128 a lot of it.",
        MAX_LOGPROBS,
        minimum=-1,
    )


DraftMethod = Literal["auto", "none", "ngram", "draft", "eagle3", "mtp"]


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding: a step verifies draft tokens beside the last one of a request. The text
    is that of plain decoding; drafts are verified only where that is expected to save time."""

    method: DraftMethod = key(
        "Where drafts come from. `ngram`: from the request's own prompt and output, behind an "
        "earlier occurrence of its last tokens, and from outputs of other requests; for tasks that "
        "repeat their input. All other methods draft so, too, behind long matches. `draft`: from a "
        "smaller model of the same tokenizer, `speculation.model`. `eagle3`: from an EAGLE-3 head "
        "that was trained for the model, `speculation.model`. `mtp`: from the head for further "
        "tokens that the model's own checkpoint has. `auto`: `eagle3` or `draft` where "
        "`speculation.model` is set, by what it is; else `mtp` if the checkpoint has such a head "
        "and the model is not in a pipeline, else `ngram`. `none`: no drafts.",
        "auto",
    )
    model: str | None = key(
        "The model or head that drafts, named as in `model.path`. Needed by `draft` and `eagle3`.",
        None,
    )
    max_draft_tokens: int = key(
        "Maximum number of draft tokens of a request in a step. How many there are follows from "
        "how many were kept of late, and from measured times of steps.",
        5,
        minimum=1,
        maximum=15,
    )

    @property
    def has_drafter(self) -> bool:
        """Whether a model or a head drafts."""
        return self.method in ("draft", "eagle3", "mtp")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters (LoRA) of the model. A request names one in the place of the model, and requests of
    several adapters and of none share steps."""

    #: Memory of the host for adapters that are not on a GPU, for each worker.
    host_bytes: ClassVar[int] = 8 * 2**30
    #: Virtual tokens of a soft prompt, at most.
    longest_prompt: ClassVar[int] = 256

    adapters: dict[str, str] = key(
        "Adapters by name, each a folder as peft saves it, a hub id or `package:NAME/FOLDER`. "
        "`/v1/load_lora_adapter` adds further ones.",
        {},
    )
    max_adapters: int | None = key(
        "Adapters on a GPU at a time; requests of others wait. Default: as many as `adapters` has, "
        "at most 8; 0 for a server without adapters.",
        None,
        minimum=0,
        maximum=64,
    )
    max_rank: int = key(
        "Maximum rank of an adapter. GPU memory grows with it.", 16, minimum=1, maximum=256
    )
    targets: list[Literal["experts", "embeddings", "prompts"]] = key(
        "What adapters may change beside linear layers, for memory of each slot: `experts` (with "
        "matrices for every expert), `embeddings` and the head (with matrices for the vocabulary), "
        "`prompts` (soft prompts of up to 256 virtual tokens).",
        [],
    )

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum of virtual tokens of a soft prompt; 0 for none."""
        return self.longest_prompt if "prompts" in self.targets else 0

    @property
    def num_slots(self) -> int:
        """How many adapters there may be on a GPU."""
        return min(8, len(self.adapters)) if self.max_adapters is None else self.max_adapters


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Pictures and sound in requests, for models that read them."""

    #: Pixels of a picture, by its header: larger ones are refused before they are decoded.
    max_pixels: ClassVar[int] = 25_000_000
    #: Embeddings of pictures or sources that a step computes, beside one picture or source at
    #: least: each takes the place of a prompt token.
    encoder_budget: ClassVar[int] = 4096
    #: Embeddings of pictures that stay on the device, for requests with the same picture.
    cache_embeddings: ClassVar[int] = 16_384

    max_pictures: int = key(
        "Maximum of pictures in a request, or of clips of sound. 0: the model reads text alone, "
        "and its tower is not loaded.",
        16,
        minimum=0,
        maximum=1024,
    )
    max_bytes: int = key(
        "Maximum size of a file. A sound may be an hour long, and longer in proportion where this "
        "is more than its default.",
        25 * 2**20,
        minimum=1,
    )
    allowed_sources: list[str] = key(
        "Where pictures may come from beside the request itself: hosts, for http(s), and folders, "
        "as absolute paths, for files below them (`file:///...`). Other hosts, private addresses "
        "and redirects are refused.",
        [],
    )

    @property
    def max_seconds(self) -> int:
        """The maximum length of a sound: an hour takes 230 MB while it is transcribed."""
        return max(3600, 3600 * self.max_bytes // (25 * 2**20))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The workers."""

    tensor_parallel_size: int = key(
        "Tensor-parallel ranks: workers among which each layer is sharded.", 1, minimum=1
    )
    pipeline_parallel_size: int = key(
        "Pipeline stages: groups of `tensor_parallel_size` workers, each with some of the "
        "layers, through which a step passes one after the other. As many steps are in flight "
        "as there are stages, each with a part of the requests and of the token budget: few "
        "streams are no faster than on one GPU.",
        1,
        minimum=1,
    )
    expert_parallel: bool | str = key(
        "Mixtures of experts: place whole experts on the tensor-parallel ranks, instead of some "
        "channels of every expert; all else stays sharded. `true`: equal parts, in order; or the "
        "path of a JSON file that names the experts of each rank, some on several if need be: `GET "
        "/experts/placement` of a server that has counted tokens makes one. With "
        "`tensor_parallel_size` = 1 and `data_parallel_size` above 1 the engines divide the "
        "experts among them and exchange the tokens of each step, and everything else is each "
        "engine's own; on GPUs those of one host that reach each other's memory.",
        False,
    )
    worker_extension: str | None = key(
        "Class of an installed package, as `package.module.Class`, whose methods every worker has "
        "as well; `/collective_rpc` calls them (docs/training.md).",
        None,
    )
    data_parallel_size: int = key(
        "Engines: replicas of the model side by side, each with workers and a KV cache of its "
        "own. A request goes to the one where it costs the least: by cached prompt and load.",
        1,
        minimum=1,
    )
    executor: Literal["auto", "inline", "multiprocess", "ray"] = key(
        "Where workers run: `inline` in a thread of the server (one worker only), "
        "`multiprocess` in processes of their own (`auto`), `ray` on the hosts of a Ray "
        "cluster. Under torchrun, `auto` takes the processes that it has started.",
        "auto",
    )
    device: str = key(
        "Device of the workers: `cpu`, `cuda`, or `auto`: CUDA where there is a GPU. A number "
        "behind it is that of the first GPU which the model takes, as in `cuda:2`; the others "
        "follow it. Of `[[models]]` those that have a GPU in common take turns, and others are "
        "awake side by side (docs/models.md); on CPUs the numbers say that alone. No number with "
        "Ray.",
        "auto",
    )
    cuda_graphs: bool = key(
        "Replay CUDA graphs of whole decode steps and of the layers of other steps. `false` "
        "launches every kernel by itself: slower, for finding faults and for models whose layers "
        "a graph cannot hold.",
        True,
    )
    cpu_threads: int | None = key(
        "Compute threads of a CPU worker. Default: the machine's cores, divided among all workers.",
        None,
        minimum=1,
        maximum=1024,
    )
    restart_workers: int = key(
        "Maximum number of consecutive restarts of an engine's workers after one died or hung; "
        "ten minutes of service reset the count. Requests go on then as after a preemption. "
        "Where workers have not come back after 30 s, or twice as long as the first start took, "
        "another engine takes the requests over, or they are answered 503, as `/health` is "
        "until the workers serve. After the last restart, or at once with 0, the engine is "
        "dead: its requests go on with another one, and the server ends with status 1 once no "
        "engine lives.",
        3,
        minimum=0,
    )

    @property
    def world_size(self) -> int:
        """The workers of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def device_type(self) -> str:
        """The device without a number: "auto", "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def gpus(self) -> range:
        """The numbers of the GPUs that the engines take."""
        first = int(self.device.partition(":")[2] or 0)
        return range(first, first + self.world_size * self.data_parallel_size)

    @property
    def data_parallel_attention(self) -> bool:
        """Whether the engines divide the experts among them."""
        is_divided = bool(self.expert_parallel) and self.tensor_parallel_size == 1
        return is_divided and self.data_parallel_size > 1


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = key("Address to listen on, or `unix:PATH`: a Unix socket.", "127.0.0.1")
    port: int = key("Port to listen on; 0 takes a free one.", 8000, minimum=0, maximum=65535)
    tls_files: list[str] = key(
        "PEM files with the server's certificate, those above it and its private key, without a "
        "passphrase: one file, or the key in a second one. Serves HTTPS, and HTTPS only.",
        [],
    )
    api_keys: list[str] | str = key(
        "Keys of which a request must bring one, as `Authorization: Bearer KEY`; only "
        "`/health` and what is below it, `/metrics`, `/openapi.json` and the pages' files "
        "need none. Others can read a command line: keep keys in a file. Or the path of a TOML "
        "file with a table `[NAME]` for each key: `key` or `sha256` (`python -m "
        "aioinfer.api.http.keys NAME` makes both) and, if need be, what `limits` may hold, such as "
        "`requests_per_minute = 60` (0 lifts a limit), `weight` (its share while requests of "
        "several keys wait; 1), `min_priority` (lowest `priority` of its requests, where lower "
        "goes first, and the one of those that name none, if above 0; 0, as without keys) and "
        "`admin`. SIGHUP has it read again.",
        [],
        secret=True,
    )
    limits: dict[str, int] = key(
        "What an API key may use unless the file of `api_keys` says otherwise; without keys, what "
        "all requests together may: `requests_per_minute` (POST requests; as many may come at once "
        "after a minute without any), `tokens_per_minute` (of prompts, cached ones included, and "
        "outputs; a request is charged its prompt and its `max_tokens` when it is queued, and what "
        "it has used when it ends) and `max_concurrent_requests` (POST requests that are being "
        "answered). Requests beyond it are answered 429, with `Retry-After`.",
        {},
        minimum=1,
        maximum=10**12,
        names=LIMITS,
    )
    admin_key: str | None = key(
        "Key that opens the endpoints which act on the whole server (`/pause`, `/resume`, "
        "`/sleep`, `/abort`, `/reset_prefix_cache`, `/experts/placement`, "
        "`/v1/load_lora_adapter`), and nothing else. Tables of the file of `api_keys` with "
        "`admin = true` open them, too; without either they are answered 403.",
        None,
        secret=True,
    )
    cors_origins: list[str] = key(
        "Origins (`https://example.org`) whose web pages may use the server from a browser; `*` is "
        "all.",
        [],
    )
    root_path: str = key(
        "Path under which a proxy shows the server, such as `/llm`: requests below it are answered "
        "whether or not the proxy has taken it off.",
        "",
    )
    unknown_fields: Literal["refuse", "ignore"] = key(
        "Fields of requests that are not known: `refuse` answers 400, as OpenAI does; "
        "`ignore` is what vLLM does. Known fields that are not supported and would change the "
        "answer are always refused.",
        "refuse",
    )
    served_model_names: list[str] = key(
        "Names that the `model` of a request may have. Default: `model.path`. A file's names "
        "stand for the file's own `model.path`: not for another that the command line gives.",
        [],
    )
    allowed_hosts: list[str] = key(
        "Names that the `Host` header may have, without port; `*.example.org` is all names "
        "below a domain, `*` any. Others are answered 421, against DNS rebinding. Default: "
        "localhost's names where only this machine can connect by TCP, otherwise any.",
        [],
    )
    request_timeout_s: float | None = key(
        "Seconds from its arrival after which a request is ended: 504, or an error event in a "
        "stream. A request's own `timeout_s` may shorten it. Default: never.",
        None,
        above=0,
    )
    files_folder: str | None = key(
        "Folder for `/v1/files` and `/v1/batches`, made if it is missing. One server at a time may "
        "use it. Default, and where it is empty: both are answered 404.",
        None,
    )
    shutdown_delay_s: float = key(
        "Seconds for which the server goes on accepting requests after SIGTERM, while "
        "`/health/ready` is 503 already: time for load balancers to notice.",
        0.0,
        minimum=0,
    )
    shutdown_timeout_s: float = key(
        "Seconds that SIGTERM waits for running requests; a second signal does not wait.",
        30.0,
        minimum=0,
    )

    @property
    def path_prefix(self) -> str:
        """`root_path` as paths begin with it: empty, or with a slash before it and none behind."""
        path = self.root_path.strip("/")
        return f"/{path}" if path else ""

    @property
    def unix_socket(self) -> str | None:
        """The path of the Unix socket to listen on, None for an address."""
        return self.host.removeprefix("unix:") if self.host.startswith("unix:") else None


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The log on stderr."""

    format: Literal["text", "json"] = key(
        "Form of the lines: `text` for people, `json` for programs (an object a line, also in "
        "place of the start-up table).",
        "text",
    )
    requests: bool = key(
        "Log a line for each request when it ends: its id, the client's address, its API key's "
        "name, status, tokens and times, and why it was refused if it was. GET requests are logged "
        "if they fail, `/health` and `/metrics` never.",
        True,
    )


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces: the spans of each request, sent to a collector when it has ended."""

    endpoint: str | None = key(
        "URL of an OTLP/HTTP collector, such as `http://localhost:4318`; `/v1/traces` is appended "
        "to one without a path. Needs `pip install 'aioinfer[otel]'`, which reads the collector's "
        "headers, the service's name and the sampler from OpenTelemetry's environment variables "
        "(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`). Default: no "
        "traces.",
        None,
    )
