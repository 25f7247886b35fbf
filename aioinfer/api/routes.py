"""The routes of the application: which function answers which path. `openapi` and `page` add their
own."""

from __future__ import annotations

from aiohttp import web

from aioinfer.api.admin import control as admin
from aioinfer.api.admin import experts, info, metrics
from aioinfer.api.anthropic import endpoints as anthropic
from aioinfer.api.batch import batches, conversations, files
from aioinfer.api.errors import PREFIX, Handler
from aioinfer.api.http.request_body import defer_continue
from aioinfer.api.llama_cpp import endpoints as llama_cpp
from aioinfer.api.ollama import endpoints as ollama
from aioinfer.api.openai import chat, completions, pooling, responses, tokenization

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    # OpenAI
    ("POST", "/v1/completions", completions.create_completion),
    ("POST", "/v1/chat/completions", chat.create_chat_completion),
    ("POST", "/chat/completions", chat.create_chat_completion),
    ("GET", "/v1/chat/completions", conversations.list_chats),
    ("GET", "/v1/chat/completions/{id}/messages", conversations.list_chat_messages),
    ("GET", "/v1/chat/completions/{id}", conversations.get_chat),
    ("POST", "/v1/chat/completions/{id}", conversations.update_chat),
    ("DELETE", "/v1/chat/completions/{id}", conversations.delete_chat),
    ("POST", "/v1/responses", responses.create_response),
    ("POST", "/responses", responses.create_response),
    ("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
    ("GET", "/v1/responses/{id}", responses.get_response),
    ("DELETE", "/v1/responses/{id}", responses.delete_response),
    ("POST", "/v1/responses/{id}/cancel", responses.cancel_response),
    ("GET", "/v1/responses/{id}/input_items", responses.list_input_items),
    ("POST", "/v1/conversations", conversations.create_conversation),
    ("POST", "/v1/conversations/{id}/items", conversations.create_items),
    ("GET", "/v1/conversations/{id}/items", conversations.list_items),
    ("GET", "/v1/conversations/{id}/items/{item_id}", conversations.get_item),
    ("DELETE", "/v1/conversations/{id}/items/{item_id}", conversations.delete_item),
    ("GET", "/v1/conversations/{id}", conversations.get_conversation),
    ("POST", "/v1/conversations/{id}", conversations.update_conversation),
    ("DELETE", "/v1/conversations/{id}", conversations.delete_conversation),
    ("POST", "/v1/files", files.upload_file),
    ("GET", "/v1/files", files.list_files),
    ("GET", "/v1/files/{file_id}", files.get_file),
    ("GET", "/v1/files/{file_id}/content", files.get_content),
    ("DELETE", "/v1/files/{file_id}", files.delete_file),
    ("POST", "/v1/batches", batches.create_batch),
    ("GET", "/v1/batches", batches.list_batches),
    ("GET", "/v1/batches/{batch_id}", batches.get_batch),
    ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch),
    # Anthropic
    ("POST", "/v1/messages", anthropic.create_message),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    # Ollama
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/tags", ollama.list_tags),
    ("GET", "/api/ps", ollama.list_running),
    ("GET", "/api/version", ollama.version),
    ("POST", "/api/embed", pooling.embed_for_ollama),
    ("POST", "/api/embeddings", pooling.embed_for_ollama),
    # llama.cpp
    ("POST", "/completion", llama_cpp.complete),
    ("POST", "/completions", llama_cpp.complete),
    ("POST", "/infill", llama_cpp.infill),
    ("POST", "/embedding", llama_cpp.embed),
    ("POST", "/apply-template", llama_cpp.apply_template),
    ("GET", "/props", llama_cpp.props),
    ("GET", "/slots", llama_cpp.slots),
    # Embeddings and the like, tokens
    ("POST", "/v1/embeddings", pooling.create_embeddings),
    ("POST", "/pooling", pooling.create_pooling),
    ("POST", "/classify", pooling.classify),
    ("POST", "/score", pooling.score),
    ("POST", "/v1/score", pooling.score),
    ("POST", "/rerank", pooling.rerank),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/tokenize", tokenization.tokenize),
    ("POST", "/detokenize", tokenization.detokenize),
    # The server and its model
    ("GET", "/v1/models", info.list_models),
    ("GET", "/v1/models/{id:.+}", info.get_model),
    ("GET", "/models", info.list_models),
    ("GET", "/health/live", info.live),
    ("GET", "/health/ready", info.ready),
    ("GET", "/version", info.version),
    ("GET", "/load", info.show_load),
    ("GET", "/server_info", info.server_info),
    ("GET", "/tokenizer_info", info.tokenizer_info),
    ("GET", "/metrics", metrics.show_metrics),
    ("POST", "/abort", admin.abort),
    ("POST", "/pause", admin.pause),
    ("POST", "/resume", admin.resume),
    ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    ("GET", "/experts", experts.show_experts),
    ("GET", "/experts/placement", experts.make_placement),
)


def add_routes(app: web.Application) -> None:
    """Adds all of them to an application."""
    for method, path, handler in ROUTES:
        if method == "GET":  # answers HEAD as well
            app.router.add_get(path, handler)
        else:
            app.router.add_route(method, path, handler, expect_handler=defer_continue)
    health = app.router.add_get("/health", info.health).resource
    assert health is not None
    app[PREFIX] = lambda: health.canonical.removesuffix("/health")
