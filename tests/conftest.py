"""Settings for all tests: threads and memory, the order of files, which tests `make test-fast`
leaves out, and Triton's interpreter for `tests/kernels`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Tests run several compute processes at a time on few cores. Threads that spin while they wait for
# one another would then keep the one they wait for from running. OpenMP reads this when torch is
# imported, here and in child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Several test files at a time (`make test`): each computes with one thread, its child processes
# included, unless a test sets more. So none waits at every layer of a model for a thread that
# another file keeps from running, and the files together keep the cores busy while some of them
# wait. The first process sets this for the others that it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Models come and go, some by the dozen in one process, each loaded by a thread of its own. By
# default glibc keeps a heap for each thread, whose free memory no other uses, and gives back to the
# kernel what is free at a heap's end; getting, zeroing and mapping a gigabyte anew takes as long as
# loading the model. It reads these when a process starts: they hold for child processes.
os.environ.setdefault("MALLOC_ARENA_MAX", "1")
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**33))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))

TESTS = Path(__file__).parent
#: `make test-clients` runs these with packages of their own.
collect_ignore = ["clients"]
KERNELS = TESTS / "kernels"
#: Files that take longest, which begin first, so that none of them is left to one core at the end.
LONGEST = ("test_equality.py", "test_request_path.py", "test_recovery.py", "test_multiprocess.py")
#: Folders, files and tests that `make test-fast` (`--fast`) leaves out: they start servers or
#: worker processes, load real models or real tokenizers, or compile, or else take several seconds
#: of CPU time. (It leaves out the kernels, too, which take a run of their own.)
SLOW = frozenset(
    [
        "compiled",
        "functional",
        "gpu",
        "models",
        "test_bench.py",
        "test_bench_executors.py",
        "test_bench_gpu.py",
        "test_bench_large_bodies.py",
        "test_bench_plot.py",
        "test_bench_processes.py",
        "test_bench_sweep.py",
        "test_chat_template.py",
        "test_compiled.py",
        "test_detokenizer.py",
        "test_encoding.py",
        "test_engine.py::test_checks_of_sound_records_change_nothing",
        "test_formats.py::test_a_parser_takes_time_that_grows_with_the_text",
        "test_gguf.py",
        "test_gguf_file.py::test_smollm2_is_as_the_gguf_package_reads_it",
        "test_gguf_tokenizer.py",
        "test_host_agent.py",
        "test_loop_errors.py",
        "test_main.py",
        "test_masking.py::test_an_end_token_under_a_constraint_is_no_text",
        "test_masks.py::test_masks_are_shared_and_untouched_ones_take_no_memory",
        "test_anonymous_file.py::test_two_processes_meet",
        "test_multiprocess.py",
        "test_outside_features.py::test_a_restart_of_the_workers_changes_nothing",
        "test_outside_features.py::test_every_way_gives_the_same",
        "test_page.py",
        "test_parallel.py",
        "test_partial_blocks.py::test_outputs_are_right_whatever_is_copied",
        "test_perplexity.py",
        "test_pieces.py",
        "test_pipeline_parallel.py",
        "test_plain_content.py",
        "test_ray.py",
        "test_request_path.py",
        "test_requested_logprobs.py::test_a_model_of_several_widths",
        "test_ring.py::test_through_a_spawned_process",
        "test_schema.py",
        "test_sentencepiece_bpe.py",
        "test_soak.py",
        "test_stack_dump.py",
        "test_startup_errors.py",
        "test_token_bound.py",
        "test_token_path.py",
        "test_tokenizer.py",
        "test_torchrun.py",
    ]
)


#: Files and tests that `make test-extended` runs, and `make test` and CI do not, which have to end
#: within twenty minutes on two cores. Of these files CI runs the tests in KEPT alone; nothing there
#: checks Ollama's paths, the command line with a model, or traces. Run them before a release.
EXTENDED = frozenset(
    [
        "compiled/test_block_hopper_kernels.py",
        "compiled/test_cascade_kernels.py",
        "compiled/test_decode_attention.py::test_sinks_take_few_barriers",
        "compiled/test_few_rows_float8_kernels.py",
        "compiled/test_prefill_hopper.py::test_a_float8_cache",
        "compiled/test_prefill_hopper.py::test_block_tables_of_one_column",
        "compiled/test_latent_kernels.py",
        "compiled/test_exchange_kernels.py",
        "compiled/test_grouped_hopper_kernels.py",
        "compiled/test_expert_kernels.py",
        "compiled/test_hopper_products.py",
        "compiled/test_few_rows_dense_kernels.py",
        "compiled/test_scaled_kernels.py",
        "test_outside_features.py::test_a_restart_of_the_workers_changes_nothing",
        "test_outside_features.py::test_every_way_gives_the_same[two stages]",
        "test_requested_logprobs.py::test_several_ranks",
        "kernels/test_expert_kernels.py::test_a_rank_with_some_of_the_quantized_experts",
        "kernels/test_expert_kernels.py::test_biases_and_the_clamped_activation",
        "kernels/test_expert_kernels.py::test_one_token_in_three_launches[None-fp8]",
        "kernels/test_expert_kernels.py::test_one_token_in_three_launches[local1-fp8]",
        "kernels/test_expert_kernels.py::test_one_token_in_three_launches[local1-plain]",
        "kernels/test_expert_kernels.py::test_quantized_activations",
        "kernels/test_expert_kernels.py::test_quantized_weights",
        "kernels/test_expert_kernels.py::test_variants_of_routing",
        "kernels/test_quantized_expert_models.py",
        "functional/test_admin.py",
        "functional/test_api_page.py",
        "functional/test_batches.py",
        "functional/test_beam_search.py",
        "functional/test_cli.py",
        "functional/test_deploy.py::test_a_slow_upload_stays_at_nginx_and_its_stream_is_not_buffered",
        "functional/test_default_sampling.py::test_http_has_the_same_defaults",
        "functional/test_equality.py::test_preemption",
        "functional/test_equality.py::test_without_planning_ahead",
        "functional/test_equality.py::test_worker_processes[1]",
        "functional/test_equality.py::test_worker_processes[3]",
        "functional/test_equality_families.py::test_tensor_parallel[llama-4]",
        "functional/test_equality_families.py::test_tensor_parallel[qwen2-4]",
        "functional/test_equality.py::test_prompts_that_share_part_of_a_block[pipeline parallel]",
        "functional/test_equality.py::test_prompts_that_share_part_of_a_block[tensor parallel]",
        "functional/test_equality_families.py::test_tensor_parallel[qwen3-4]",
        "functional/test_recovery.py::test_requests_outlive_their_workers[one rank, stopped]",
        "functional/test_recovery.py::test_requests_outlive_their_workers[two ranks, one killed]",
        "functional/test_tensor_parallel.py::test_a_stopped_rank_ends_the_server_within_ten_"
        "seconds",
        "functional/test_tensor_parallel.py::test_ranks_that_are_out_of_step_sample_the_same_tokens[3]",
        "kernels/test_decoder_kernels.py::test_a_prefill_and_decodes[qwen3]",
        "kernels/test_expert_kernels.py::test_routing[21-rule3]",
        "kernels/test_expert_kernels.py::test_tokens_are_divided_among_copies_and_counted[21-config1]",
        "kernels/test_prefill_plan.py::test_every_tile_is_listed_once_in_descending_order_of_its_"
        "visible_keys[3-16]",
        "test_soak.py::test_a_signal_ends_the_server_as_well",
        "functional/test_equality.py::test_block_sizes",
        "functional/test_equality.py::test_pipeline_parallel",
        "functional/test_expert_parallel.py",
        "functional/test_float8_cache.py::test_ranks_give_the_same",
        "functional/test_float8_cache.py::test_real_weights",
        "functional/test_gateway.py::test_the_page_says_which_replica_it_shows",
        "functional/test_gateway.py::test_what_a_gateway_answers_itself",
        "functional/test_gpt_oss.py::test_two_ranks",
        "functional/test_kept_gguf.py",
        "functional/test_llama_cpp.py",
        "functional/test_latent_cache.py",
        "functional/test_lost_replicas.py",
        "functional/test_masks.py",
        "functional/test_ollama.py",
        "functional/test_page.py::test_a_round_with_a_tool",
        "functional/test_page.py::test_an_answer_by_a_schema",
        "functional/test_page.py::test_what_cannot_be_enforced_is_said_at_its_field",
        "functional/test_page_parts.py",
        "functional/test_pipeline_parallel.py",
        "functional/test_prompt_rows.py",
        "functional/test_python.py",
        "functional/test_recovery.py::test_repeated_crashes_end_the_server",
        "functional/test_recovery.py::test_the_streams_of_a_dead_engine_go_on_with_the_other",
        "functional/test_fuzz.py::test_a_worker_that_is_killed_ends_its_requests_with_an_error",
        "functional/test_llm.py::test_the_longest_request_that_fits_runs",
        "functional/test_responses.py",
        "functional/test_serve.py",
        "functional/test_serve_cluster.py",
        "functional/test_structured_output.py",
        "functional/test_tools.py",
        "functional/test_tracing.py",
        "functional/test_vllm.py",
        "kernels/test_all_reduce.py::test_the_norm_is_quantized_as_by_itself[dtype0-300]",
        "kernels/test_all_reduce.py::test_the_norm_is_quantized_as_by_itself[dtype1-36]",
        "kernels/test_all_reduce.py::test_the_norm_is_quantized_as_by_itself[dtype2-36]",
        "kernels/test_attention.py::test_a_sink_counts_once_however_a_row_is_split",
        "kernels/test_attention.py::test_pairs_of_channels_with_options",
        "kernels/test_attention.py::test_sinks_over_a_float8_cache",
        "kernels/test_attention.py::test_sinks_that_weigh_nothing_and_all",
        "kernels/test_attention.py::test_sinks_with_windows_and_soft_caps",
        "kernels/test_cascade_attention.py",
        "kernels/test_decoder_kernels.py::test_a_prefill_and_decodes[mistral]",
        "kernels/test_decoder_kernels.py::test_the_last_layer_for_sampled_rows",
        "kernels/test_decoder_kernels.py::test_two_ranks_over_symmetric_memory[gemma2-2-4]",
        "kernels/test_decoder_kernels.py::test_two_ranks_over_symmetric_memory[llama-1-64]",
        "kernels/test_exchanged_experts.py",
        "kernels/test_expert_exchange.py",
        "kernels/test_expert_models.py",
        "kernels/test_kernel_dense.py::test_candidates_compute_the_same[1]",
        "kernels/test_family_kernels.py::test_a_prefill_and_decodes",
        "kernels/test_latent_attention.py",
        "kernels/test_scaled_models.py::test_latent_attention",
        "kernels/test_scaled_models.py::test_two_ranks_over_symmetric_memory[float channel]",
        "test_bench_executors.py::test_a_short_run",
        "test_bench_gpu.py::test_http",
        "test_bench_gpu.py::test_gpt_oss_made_small",
        "test_bench_gpu.py::test_tokens_of_experts",
        "test_bench_large_bodies.py::test_a_short_run",
        "test_gguf.py::test_smollm2_is_as_transformers_reads_it",
        "test_grouped.py::test_two_ranks",
        "test_host_agent.py",
        "test_pipeline_parallel.py::test_a_killed_rank_is_named_with_its_stage",
        "test_ray.py",
        "test_schema.py::test_the_server_does_what_it_says",
        "test_soak.py::test_a_short_run",
        "test_soak.py::test_the_time_is_kept_and_half_of_it_may_be_warm_up",
        "test_stages.py::test_two_stages_compute_what_one_model_does",
        "test_startup_errors.py::test_a_disk_that_is_full_while_a_gguf_file_is_converted",
        "test_torchrun.py::test_a_script_of_two_ranks",
        "test_torchrun.py::test_a_script_on_two_hosts",
        "test_torchrun.py::test_a_server_of_two_ranks",
        "test_torchrun.py::test_a_server_on_two_hosts_one_of_which_is_lost",
        "test_torchrun.py::test_all_end_when_one_does",
        # with weights: make test-models ARGS=--extended
        "models/test_greedy.py::test_plain_english_is_likely[gemma-3-270m-q4_k_m.gguf]",
        "models/test_structured_output.py",
        "models/test_tokenizers.py::test_gemma_tokens_are_those_of_sentencepiece",
        "models/test_tools.py",
    ]
)
KEPT = frozenset(
    [
        "compiled/test_grouped_hopper_kernels.py::test_one_configuration",
        "compiled/test_few_rows_float8_kernels.py::test_other_weights_and_machines_are_rejected",
        "compiled/test_scaled_kernels.py::test_activations_are_quantized_in_registers",
        "functional/test_admin.py::test_only_an_admin_key_opens_them",
        "functional/test_api_page.py::test_every_endpoint_has_a_command",
        "functional/test_api_page.py::test_every_field_is_described",
        "functional/test_batches.py::test_a_batch_is_answered_in_order",
        "functional/test_batches.py::test_a_batch_that_cannot_be_read_fails",
        "functional/test_beam_search.py::test_a_small_model_under_preemption",
        "functional/test_llama_cpp.py::test_tokens_and_texts",
        "functional/test_latent_cache.py::test_chunks_and_preemption_change_nothing",
        "functional/test_lost_replicas.py::test_replies_of_a_killed_replica_go_on_with_another[few]",
        "functional/test_masks.py::test_tokens_are_the_same_however_they_are_planned",
        "functional/test_page_parts.py::test_a_call_streams_and_its_result_goes_on",
        "functional/test_page_parts.py::test_a_call_from_the_page_of_endpoints",
        "functional/test_page_parts.py::test_json_is_indented_while_it_comes",
        "functional/test_page_parts.py::test_names_and_headings",
        "functional/test_page_parts.py::test_the_pages_work_below_a_path",
        "functional/test_prompt_rows.py::test_real_weights",
        "functional/test_responses.py::test_a_response_in_the_background",
        "functional/test_responses.py::test_a_text_that_is_streamed",
        "functional/test_structured_output.py::test_a_schema",
        "functional/test_structured_output.py::test_the_openai_client_parses",
        "functional/test_tools.py::test_an_answer_by_a_schema_or_a_call",
        "functional/test_vllm.py::test_prompts_are_rendered",
        "kernels/test_cascade_attention.py::test_more_sharing_rows_than_a_tile_has",
        "kernels/test_exchanged_experts.py::test_tiles_go_by_the_tokens_that_may_come",
        "kernels/test_exchanged_experts.py::test_what_kernels_do_not_compute_is_refused",
        "kernels/test_latent_attention.py::test_decodes_in_float16",
        "kernels/test_latent_attention.py::test_norm_rotation_and_cache_write",
        "kernels/test_latent_attention.py::test_prefill_in_float16",
        "test_host_agent.py::test_two_hosts_give_what_one_gives",
    ]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that `make test-extended` and `make test-fast` use."""
    parser.addoption("--extended", action="store_true", help="run the tests in EXTENDED alone")
    parser.addoption("--fast", action="store_true", help="leave out what is in SLOW")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the folders and files in SLOW with `--fast`, without importing them."""
    if config.getoption("--fast") and collection_path.is_relative_to(TESTS):
        return collection_path.relative_to(TESTS).as_posix() in SLOW or None
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Switches Triton's interpreter on for a run of the kernel tests alone. Triton reads the
    variable at its import; worker processes of pytest-xdist inherit it."""
    invoked_in = config.invocation_params.dir
    paths = [(invoked_in / argument.split("::")[0]).resolve() for argument in config.args]
    if (
        paths
        and all(path.is_relative_to(KERNELS) for path in paths)
        and "triton" not in sys.modules
    ):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_interpreted():
        # The interpreter computes with numpy, which warns where a kernel computes NaN or infinity
        # on purpose, and uses functions that numpy has deprecated.
        for category in ("RuntimeWarning", "DeprecationWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}")


def is_interpreted() -> bool:
    """Whether this process interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_report_header(config: pytest.Config) -> str:
    """Returns whether the kernel tests are in this run."""
    if is_interpreted():
        return "Triton's interpreter: on"
    return "Triton's interpreter: off; tests/kernels takes a run of its own (pytest tests/kernels)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests in EXTENDED or all others, with `--fast` the tests in SLOW, and puts the
    files that take longest first; the sort leaves the others, and the tests of each, in order."""
    wanted, others = [], []
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        names = {f"{file}::{item.name}", f"{file}::{item.name.partition('[')[0]}"}
        is_extended = not EXTENDED.isdisjoint(names | {file}) and KEPT.isdisjoint(names)
        is_wanted = is_extended == config.getoption("--extended")
        if config.getoption("--fast") and not SLOW.isdisjoint(names):
            is_wanted = False
        (wanted if is_wanted else others).append(item)
    items[:] = wanted
    if others:
        config.hook.pytest_deselected(items=others)
    items.sort(
        key=lambda item: (
            LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)
        )
    )


@pytest.fixture(scope="session")
def tokenizer_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `tests.real_tokenizers` builds each tokenizer once, for all processes of
    a run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tokenizers"
