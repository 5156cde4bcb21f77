from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith import engine_sglang, engine_vllm, export, serve
from draftsmith import recipe as recipes
from draftsmith.engines import ENGINES
from draftsmith.errors import RequestError
from draftsmith.rundir import RunPaths, digest_draft, write_json
from draftsmith.serve.folder import serve_folder
from tests.export.builders import PLAIN, make_facts
from tests.export.test_run import trained_run


@pytest.fixture
def paths(tmp_path: Path, tiny_target: Path) -> RunPaths:
    """A run whose draft is exported, in a folder whose name would mislead an engine that guesses."""
    paths = trained_run(tmp_path / "mtp-eagle-dflash it's", tiny_target, **PLAIN)
    export.run(make_recipe(tiny_target), paths)
    return paths


def make_recipe(target: Path | str, serve: dict[str, Any] | None = None, **settings: Any) -> recipes.Recipe:
    evaluate = {"num_speculative_tokens": settings.pop("evaluated_tokens", 3)}
    tree = {"name": "test", "target": {"model": str(target), **settings}, "evaluate": evaluate, "serve": serve or {}}
    return recipes.parse(tree)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def speculative_config(arguments: list[str]) -> dict[str, Any]:
    return json.loads(option(arguments, "--speculative-config"))


def test_the_command_survives_the_shell_and_says_the_method(paths, tiny_target):
    report = serve.run(make_recipe(tiny_target), paths)
    arguments = shlex.split(report["command"])
    assert arguments == report["arguments"]
    assert arguments[:3] == ["vllm", "serve", str(tiny_target.resolve())]
    assert speculative_config(arguments) == {
        "method": "eagle3",
        "model": str(paths.export("vllm").resolve()),
        "num_speculative_tokens": 3,
    }
    assert report["summary"] == [report["command"]]


def test_the_number_of_draft_tokens_is_that_of_serving_or_else_as_evaluated(paths, tiny_target):
    evaluated = make_recipe(tiny_target, evaluated_tokens=5)
    assert speculative_config(serve.run(evaluated, paths)["arguments"])["num_speculative_tokens"] == 5
    own = make_recipe(tiny_target, {"num_speculative_tokens": 2}, evaluated_tokens=5)
    assert speculative_config(serve.run(own, paths)["arguments"])["num_speculative_tokens"] == 2


def test_sglang_drafts_a_chain_of_as_many_tokens_as_vllm(paths, tiny_target):
    sections = {"engine": "sglang", "num_speculative_tokens": 4, "tensor_parallel_size": 2}
    arguments = shlex.split(serve.run(make_recipe(tiny_target, serve=sections), paths)["command"])
    assert option(arguments, "--speculative-algorithm") == "EAGLE3"
    assert option(arguments, "--speculative-draft-model-path") == str(paths.export("sglang").resolve())
    steps = ["--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--tp-size"]
    assert [option(arguments, name) for name in steps] == ["4", "1", "5", "2"]


def test_sglangs_flags_are_words_and_those_that_are_off_are_not_there(paths, tiny_target):
    given = {
        "max_model_len": 64,
        "cuda_graph_bs_decode": [1, 2],
        "json_model_override_args": {"a": 1},
        "page_size": None,
    }
    given |= {"disable_radix_cache": True, "enable_metrics": False}
    sections = {"engine": "sglang", "port": 8123, "engine_args": given}
    arguments = serve.run(make_recipe(tiny_target, serve=sections), paths)["arguments"]
    first = arguments.index("--context-length")
    words = ["--context-length", "64", "--cuda-graph-bs-decode", "1", "2", "--json-model-override-args", '{"a": 1}']
    assert arguments[first : first + 10] == [*words, "--disable-radix-cache", "--port", "8123"]
    assert not [word for word in arguments if "metrics" in word or "page-size" in word]


def test_sglangs_cap_with_a_draft_is_told_unless_it_is_set(paths, tiny_target):
    (note,) = serve.run(make_recipe(tiny_target, serve={"engine": "sglang"}), paths)["notes"]
    assert "48 requests" in note
    for name in ("max_running_requests", "max_num_seqs"):
        sections = {"engine": "sglang", "engine_args": {name: 64}}
        report = serve.run(make_recipe(tiny_target, serve=sections), paths)
        assert (report["notes"], option(report["arguments"], "--max-running-requests")) == ([], "64")


def test_sglang_alone_is_the_same_command_without_the_draft(tiny_target):
    with_draft, alone = (
        engine_sglang.command(make_recipe(tiny_target), make_facts(tiny_target), draft, 3, max_num_seqs=4, port=None)
        for draft in (Path("draft"), None)
    )
    assert with_draft[: len(alone)] == alone
    assert alone[-2:] == ["--max-running-requests", "4"]
    assert not [word for word in alone if "speculative" in word]
    assert engine_sglang.own_command(alone) == [sys.executable, *alone[1:]]


def test_a_hub_target_keeps_the_revision_that_was_probed(tiny_target):
    facts = make_facts(tiny_target, revision="0123abc")
    recipe = make_recipe("someone/some-model")
    for command in (engine.command for engine in ENGINES.values()):
        arguments = command(recipe, facts, Path("draft"), 3)
        assert "someone/some-model" in arguments
        assert option(arguments, "--revision") == "0123abc"
        assert "--revision" not in command(recipe, replace(facts, revision=None), Path("draft"), 3)


def test_how_the_target_is_loaded_is_as_in_the_recipe(tiny_target):
    recipe = make_recipe(tiny_target, dtype="float16", trust_remote_code=True)
    for command in (engine.command for engine in ENGINES.values()):
        arguments = command(recipe, make_facts(tiny_target), Path("draft"), 3)
        assert option(arguments, "--dtype") == "float16"
        assert "--trust-remote-code" in arguments


def test_an_engine_for_which_nothing_was_exported_is_refused_with_the_reason(tmp_path, tiny_target):
    paths = trained_run(tmp_path, tiny_target)  # norm_before_residual
    report = export.run(make_recipe(tiny_target), paths)
    write_json(paths.stage_file("export"), {"status": "done", "report": report})
    with pytest.raises(
        RequestError,
        match=r"(?s)SGLang cannot hold this draft: norm_before_residual.*train.draft.norm_before_residual=false",
    ):
        serve.run(make_recipe(tiny_target, {"engine": "sglang"}), paths)


def test_devices_that_do_not_divide_the_drafts_heads_are_refused(paths, tiny_target):
    with pytest.raises(RequestError, match="4 attention heads"):
        serve.run(make_recipe(tiny_target, {"tensor_parallel_size": 3}), paths)


def test_without_a_draft_the_command_is_that_of_the_target_alone(tiny_target):
    arguments = engine_vllm.command(
        make_recipe(tiny_target), make_facts(tiny_target), None, 3, max_num_seqs=4, port=None
    )
    assert arguments == ["vllm", "serve", str(tiny_target.resolve()), "--max-num-seqs", "4"]
    run_here = engine_vllm.own_command(arguments)
    assert run_here[1:] == ["-m", "vllm.entrypoints.openai.api_server", "--model", *arguments[2:]]


def leave_forecast(paths: RunPaths, best: dict[str, Any], **fields: Any) -> None:
    served = {"engine": "vllm", "draft_sha256": digest_draft(paths.export("vllm")), "forecast": {"best": best}}
    write_json(paths.served, served | fields)


@pytest.mark.parametrize(("concurrency", "k"), [(1, 5), (6, 2), (1000, 3)])
def test_the_fastest_of_the_forecast_is_served_where_there_is_one(paths, tiny_target, concurrency, k):
    fast, slow = ({"num_speculative_tokens": k, "speedup": 1.5} for k in (5, 2))
    leave_forecast(paths, {"1": fast, "8": slow, "64": None})
    report = serve.run(make_recipe(tiny_target, {"concurrency": concurrency}), paths)
    assert speculative_config(report["arguments"])["num_speculative_tokens"] == k == report["num_speculative_tokens"]
    assert ("no K is faster" if concurrency == 1000 else f"K = {k} is the fastest by the forecast") in report["notes"][
        0
    ]
    own = serve.run(make_recipe(tiny_target, {"concurrency": concurrency, "num_speculative_tokens": 4}), paths)
    assert (own["num_speculative_tokens"], own["notes"]) == (4, [])


def test_a_k_that_was_measured_is_said_to_be(paths, tiny_target):
    leave_forecast(paths, {"1": {"num_speculative_tokens": 5, "speedup": 1.5, "measured": True}})
    (note,) = serve.run(make_recipe(tiny_target), paths)["notes"]
    assert note.startswith("K = 5 is the fastest as measured, 1 at once: 1.50 times")


def test_served_figures_of_before_there_were_two_engines_are_vllms(paths, tiny_target):
    leave_forecast(paths, {"1": {"num_speculative_tokens": 5, "speedup": 1.5}})
    write_json(paths.served, {k: v for k, v in json.loads(paths.served.read_text()).items() if k != "engine"})
    assert serve.run(make_recipe(tiny_target), paths)["num_speculative_tokens"] == 5


@pytest.mark.parametrize("other", [{"draft_sha256": "another"}, {"engine": "sglang"}])
def test_the_forecast_of_another_draft_or_engine_chooses_nothing(paths, tiny_target, other):
    leave_forecast(paths, {"1": {"num_speculative_tokens": 5, "speedup": 1.5}}, **other)
    assert serve.run(make_recipe(tiny_target), paths)["num_speculative_tokens"] == 3


def test_more_draft_tokens_than_were_measured_are_told(paths, tiny_target):
    write_json(paths.acceptance, {"num_speculative_tokens": 3})
    assert serve.run(make_recipe(tiny_target, {"num_speculative_tokens": 3}), paths)["notes"] == []
    (note,) = serve.run(make_recipe(tiny_target, {"num_speculative_tokens": 4}), paths)["notes"]
    assert note.startswith("K = 4 is more than the 3 that `evaluate` measured")
    (paths.export("vllm") / "draftsmith.json").write_text(
        '{"target": {"model": "org/x"}, "acceptance": ' + paths.acceptance.read_text() + "}"
    )
    assert serve_folder(paths.export("vllm"), ["serve.num_speculative_tokens=4"])[1]["notes"] == [note]


@pytest.mark.vllm
def test_vllms_own_parser_takes_the_command(paths, tiny_target):
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = {"max_model_len": 64, "enforce_eager": True, "enable_prefix_caching": False}
    sections = {"tensor_parallel_size": 2, "port": 8123, "engine_args": flags | {"hf_overrides": {"a": [1]}}}
    recipe = make_recipe(tiny_target, sections, dtype="float32", trust_remote_code=True)
    arguments = engine_vllm.command(recipe, make_facts(tiny_target, revision="0123abc"), paths.export("vllm"), 3)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[2:])
    assert {name: getattr(parsed, name) for name in flags} == flags
    assert (parsed.port, parsed.hf_overrides) == (8123, {"a": [1]})
    assert parsed.speculative_config == speculative_config(arguments)
    assert (parsed.tensor_parallel_size, parsed.revision, parsed.dtype) == (2, "0123abc", "float32")
    assert parsed.trust_remote_code


def test_sglangs_own_parser_takes_the_command(paths, tiny_target):
    pytest.importorskip("sglang", reason="SGLang is not installed, which pins another torch")
    from argparse import ArgumentParser

    from sglang.srt.server_args import ServerArgs

    given = {"max_model_len": 64, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False}
    given |= {"cuda_graph_bs_decode": [1, 2], "enable_mixed_chunk": False}
    sections = {"engine": "sglang", "tensor_parallel_size": 2, "port": 8123, "engine_args": given}
    recipe = make_recipe(tiny_target, sections, dtype="bfloat16", trust_remote_code=True)
    facts, folder = make_facts(tiny_target, revision="0123abc"), paths.export("sglang")
    arguments = engine_sglang.command(recipe, facts, folder, 3, **engine_sglang.measuring_args(96))
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(arguments[3:])
    assert (parsed.context_length, parsed.mem_fraction_static, parsed.max_running_requests) == (64, 0.5, 96)
    assert (parsed.disable_radix_cache, parsed.enable_metrics, parsed.incremental_streaming_output) == (True,) * 3
    assert (parsed.cuda_graph_bs_decode, parsed.enable_mixed_chunk) == ([1, 2], False)
    assert (parsed.port, parsed.tp_size, parsed.revision, parsed.dtype) == (8123, 2, "0123abc", "bfloat16")
    assert (parsed.speculative_algorithm, parsed.speculative_draft_model_path) == ("EAGLE3", str(folder.resolve()))
    drafted = (parsed.speculative_num_steps, parsed.speculative_eagle_topk, parsed.speculative_num_draft_tokens)
    assert drafted == (3, 1, 4)
