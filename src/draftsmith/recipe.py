"""Every setting of a run, once.

A recipe is YAML with one section per stage, and `target`, which all stages share. It is frozen; a key that does not
exist is refused with the nearest one that does. Settings that cannot change a result (devices, batch sizes, logging)
are marked `Free`: changing them does not make a finished stage stale.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from draftsmith.errors import RecipeError


class _Free:
    """Marks a setting that changes how, not what: it is left out of the stage's fingerprint."""


def _refuse_overflow(temperature: float) -> float:
    """Logits are divided by it; vLLM takes 0.01 in place of less."""
    if 0 < temperature < 0.01:
        raise PydanticCustomError("temperature", "should be 0, which is greedy, or at least 0.01")
    return temperature


Free = _Free()
PositiveInt = Annotated[int, Field(ge=1)]
DraftTokens = Annotated[int, Field(ge=1, le=32)]  # K; memory grows with it, and engines draft far fewer
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_refuse_overflow)]
LossKind = Literal["soft_cross_entropy", "forward_kl", "lk", "lk_hybrid"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's `true` is not 1."""
        kinds = _kinds_of(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise PydanticCustomError("number", "should be a number, not true or false")
        return value

    def identity(self) -> dict[str, Any]:
        """The settings that a result depends on, nested sections included, as plain JSON values."""
        chosen: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            if any(mark is Free for mark in info.metadata):
                continue
            value = getattr(self, name)
            chosen[name] = value.identity() if isinstance(value, Section) else _plain(value)
        return chosen


def _kinds_of(annotation: Any) -> set[Any]:
    """Types that an annotation speaks of, and values of its literals."""
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _kinds_of(inner[0])
    if get_origin(annotation) is Literal:
        return set(inner)
    return set().union(*map(_kinds_of, inner)) if inner else {annotation}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.identity()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


class Target(Section):
    """The model that is to decode faster."""

    model: str = Field(description="Local folder or hub id")
    revision: str | None = Field(None, description="Hub revision")
    trust_remote_code: bool = Field(False, description="Run code that the model folder brings along")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Computation dtype; auto: the checkpoint's own"
    )
    device: Annotated[str, Free] = Field("auto", description="auto, cpu, cuda, cuda:1 …")

    @property
    def name_for_engines(self) -> str:
        """The absolute path of a local folder, else the hub id."""
        folder = Path(self.model).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.model


class Probe(Section):
    """What the verdict and the budget are computed for."""

    engine: Annotated[Literal["vllm", "transformers"], Free] = "vllm"
    gpus: Annotated[PositiveInt | None, Free] = Field(None, description="Devices that share the target; all if null")
    gpu_memory_gib: Annotated[Positive | None, Free] = Field(None, description="Memory of one device; measured if null")
    load_gib_per_second: Annotated[Positive, Free] = Field(
        0.5, description="Rate at which weights are read from disk and put on the devices"
    )


class Source(Section):
    """One file of conversations, or one dataset of the hub."""

    path: str = Field(description="File, or dataset id where format is `dataset`")
    format: Literal["auto", "sharegpt", "messages", "parquet", "dataset"] = "auto"
    split: str = Field("train", description="Split of a `dataset`")
    domain: str | None = Field(None, description="Name for figures by domain; the file's own name if null")
    limit: PositiveInt | None = Field(None, description="Read at most so many conversations")
    skip: Annotated[int, Field(ge=0)] = Field(0, description="Pass over the first so many conversations")
    accept_truncated: bool = Field(False, description="Take the whole records of a file that is cut off")


class Regenerate(Section):
    """Answers written by the target itself: a draft learns poorly from other people's."""

    using: Literal["transformers", "server", "none"] = "transformers"
    url: Annotated[str | None, Free] = Field(None, description="OpenAI-compatible server, such as http://host:8000/v1")
    served_model: Annotated[str | None, Free] = Field(None, description="Model name on that server; asked if null")
    max_new_tokens: PositiveInt = 512
    max_turns: PositiveInt | None = Field(None, description="Answer at most so many user turns of a conversation")
    temperature: Temperature = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: Annotated[PositiveInt, Free] = Field(32, description="Sequences at once, or requests in flight")
    timeout_seconds: Annotated[Positive, Free] = Field(300.0, description="Longest wait for one answer of a server")


class Prepare(Section):
    """Conversations in, token ids and loss masks out."""

    sources: list[Source] = Field(default_factory=list)
    regenerate: Regenerate = Regenerate()
    max_length_tokens: PositiveInt = Field(2048, description="Longer samples are cut here")
    min_answer_tokens: PositiveInt = Field(4, description="Samples with fewer supervised tokens are dropped")
    chat_template: str | None = Field(None, description="Jinja file instead of the tokenizer's own template")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the template, such as enable_thinking"
    )
    draft_vocab_size: PositiveInt | None = Field(None, description="null: the target's whole vocabulary")
    validation_fraction: ProperFraction = Field(0.05, description="Share of conversations held out")
    workers: Annotated[PositiveInt, Free] = 1


class Extract(Section):
    """The target's hidden states for every token of the corpus."""

    engine: Literal["transformers", "vllm"] = "transformers"
    aux_layer_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="Canonical ids; null: 2, N//2, N-3"
    )
    codec: Literal["bf16", "fp32", "int8", "fp8", "lossless"] = Field(
        "bf16", description="How states are stored; int8, fp8: half of bf16; lossless: 0.7 of bf16, bit for bit"
    )
    batch_tokens: Annotated[PositiveInt, Free] = Field(4096, description="Tokens in one forward, padding included")
    shard_mib: Annotated[PositiveInt, Free] = Field(256, description="Size at which a shard is closed")
    capture: Annotated[Literal["auto", "native", "hooked"], Free] = Field(
        "auto", description="vLLM: its own method, or hooks on the layers; auto: its own where the model has it"
    )
    tensor_parallel_size: Annotated[PositiveInt, Free] = Field(1, description="vLLM: devices that share each layer")
    pipeline_parallel_size: Annotated[PositiveInt, Free] = Field(1, description="vLLM: stages of layers")
    data_parallel_size: Annotated[PositiveInt, Free] = Field(1, description="vLLM: engines that share the samples")
    max_num_batched_tokens: Annotated[PositiveInt, Free] = Field(8192, description="vLLM: tokens in one step")
    max_num_seqs: Annotated[PositiveInt, Free] = Field(256, description="vLLM: sequences in one step")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), Free] = Field(
        0.9, description="vLLM: share of a device's memory"
    )
    kv_cache_memory_bytes: Annotated[PositiveInt | None, Free] = Field(
        None, description="vLLM: size of its cache on each device, states included; null: what is left, 1 GiB on a CPU"
    )
    enforce_eager: Annotated[bool, Free] = Field(True, description="vLLM: compile nothing; whole prompts gain little")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="vLLM: any other of its EngineArgs")
    stall_seconds: Annotated[Positive, Free] = Field(900.0, description="vLLM: longest silence of a started engine")
    max_quarantined: Annotated[Fraction, Free] = Field(
        0.0, description="Share of the samples that may be set aside because they failed twice"
    )


class Draft(Section):
    """The draft's shape. What is null follows the target, or the draft to go on from."""

    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    norm_before_residual: bool = Field(True, description="Residual stream starts from the normed state")
    norm_before_fc: bool = Field(True, description="One RMSNorm over the concatenated auxiliary states")
    fc_norm: bool = Field(False, description="One RMSNorm per auxiliary state (EAGLE-3.1)")
    norm_output: bool = Field(True, description="Feed the normed output back to the next step (EAGLE-3.1)")
    initial: str | None = Field(
        None, description="Draft to go on from: RUN/train/checkpoints/final, RUN/export/vllm, or a published one"
    )


class Train(Section):
    """EAGLE-3 with training-time test."""

    draft: Draft = Draft()
    unroll_steps: DraftTokens = Field(5, description="Steps of training-time test")
    step_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="Weight of unroll step k is decay**k")
    loss: LossKind = Field("soft_cross_entropy", description="soft_cross_entropy, forward_kl, lk or lk_hybrid")
    mask_out_of_vocab: bool = Field(True, description="Skip positions whose target top-1 the draft cannot say")
    kernels: Literal["auto", "plain"] = Field("auto", description="plain: the slow, obvious computation")
    epochs: Positive = 10.0
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; overrides epochs")
    batch_tokens: PositiveInt = Field(8192, description="Tokens of one optimizer step, of all ranks together")
    micro_batch_tokens: Annotated[PositiveInt | None, Free] = Field(
        None, description="Most tokens that a rank computes with at once; null: its whole share of the batch"
    )
    shard: Annotated[bool, Free] = Field(
        False, description="Divide weights, gradients and moments over the ranks (FSDP2), where one has no room for all"
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    min_learning_rate_ratio: Fraction = Field(0.1, description="Of the peak, at the end of the cosine")
    warmup_fraction: Fraction = 0.03
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.95)
    weight_decay: Fraction = 0.0
    max_grad_norm: Positive = 0.5
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Leave a moving average of the weights, which keeps so much of itself at a step"
    )
    feature_noise: Fraction = Field(0.0, description="Uniform noise on auxiliary states, as a share of their size")
    autocast: Literal["auto", "bfloat16", "none"] = Field(
        "auto", description="auto: bfloat16 on CUDA, none on CPU; none on CUDA also means kernels=plain"
    )
    device: Annotated[str, Free] = "auto"
    log_every_steps: Annotated[PositiveInt, Free] = 10
    checkpoint_every_steps: Annotated[PositiveInt, Free] = 500
    validate_every_steps: Annotated[PositiveInt, Free] = 500
    keep_checkpoints: Annotated[PositiveInt, Free] = 2
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], Free] = Field(
        default=["tensorboard"], description="Where figures are shown, beside metrics.jsonl"
    )


class Served(Section):
    """Speed in serving, by the engine with and without the exported draft."""

    enabled: bool = Field(False, description="Measure it, once the draft is exported")
    engine: Literal["vllm", "sglang"] | None = Field(None, description="Which is measured; null: that of serve.engine")
    url: str | None = Field(None, description="Running engine with the draft, http://host:8000; null: started here")
    baseline_url: str | None = Field(None, description="Running engine without it; null: started here")
    num_speculative_tokens: list[DraftTokens] = Field(
        default_factory=list, description="Draft tokens per round, each measured; []: as evaluated"
    )
    concurrency: list[PositiveInt] = Field([1, 8, 64], min_length=1, description="Sequences at once, each measured")
    prompt_sets: list[str] = Field(
        ["held_out"],
        min_length=1,
        description="held_out, mt_bench (first turns), humaneval, or a file of JSON lines or one array, whose records "
        "have `prompt`, `question`, `messages` or ShareGPT's `conversations`",
    )
    prompts: PositiveInt = Field(
        80, description="Of each set, at most; asked again where more are in flight, or a repeat is over in under 3 s"
    )
    max_tokens: Annotated[int, Field(ge=8)] = Field(
        128, description="Written for each prompt, past the end of an answer too"
    )
    temperature: Temperature = 0.0
    repeats: Annotated[int, Field(ge=1, le=10)] = Field(3, description="Of each measurement, for intervals")
    start_seconds: Positive = Field(1800.0, description="Longest wait for an engine to come up")
    timeout_seconds: Positive = Field(600.0, description="Longest silence of a started engine")


class Evaluate(Section):
    """What the draft is worth on held-out conversations."""

    num_speculative_tokens: DraftTokens = Field(3, description="Draft tokens per round")
    prompts: Annotated[int, Field(ge=0)] = Field(
        40, description="Held-out prompts decoded for real; 0: the estimate from recorded states alone"
    )
    max_new_tokens: PositiveInt = 128
    temperature: Temperature = Field(0.0, description="Prompts are sampled at it too; 0: greedy only")
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="At temperature, how the draft picks its tokens; greedy is vLLM's default"
    )
    compare_untrained: bool = Field(True, description="Also measure the draft as it was before training")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: float32 on CPU, else the target's")
    device: Annotated[str, Free] = "auto"
    served: Annotated[Served, Free] = Served()


class Export(Section):
    """The draft in the engines' formats."""

    formats: list[Literal["vllm", "sglang"]] | None = Field(
        None, description="null: every format that can hold this draft; the others are listed with the reason"
    )
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


class Serve(Section):
    """The engine command line."""

    engine: Literal["vllm", "sglang"] = "vllm"
    num_speculative_tokens: DraftTokens | None = Field(
        None, description="null: the fastest of the forecast where there is one, else as evaluated"
    )
    concurrency: PositiveInt = Field(1, description="Sequences at once for which the forecast is asked")
    tensor_parallel_size: PositiveInt = 1
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(None, description="null: the engine's own")
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further flags of the engine; SGLang takes max_model_len, gpu_memory_utilization, max_num_seqs and "
        "enable_prefix_caching by these names too",
    )


class Report(Section):
    """The page on the run."""

    against: Annotated[Path | None, Free] = Field(None, description="Folder of another run, to compare with")


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    run_dir: Annotated[Path | None, Free] = Field(None, description="null: runs/<name>")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    target: Target
    probe: Probe = Probe()
    prepare: Prepare = Prepare()
    extract: Extract = Extract()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    serve: Serve = Serve()
    report: Report = Report()

    @property
    def folder(self) -> Path:
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens per round in serving: as said there, else as evaluated."""
        return self.serve.num_speculative_tokens or self.evaluate.num_speculative_tokens


def load(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file and apply `section.field=value` overrides, whose values are YAML.

    Relative paths inside a recipe are taken from the working directory.

    Raises:
        RecipeError: the file is not there or not YAML, a key does not exist, or a value does not fit.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(
            "there is no such recipe", where=str(path), hint="give the path of a YAML file; recipes/ has some"
        ) from error
    except IsADirectoryError as error:
        raise RecipeError("is a folder", where=str(path), hint="give the YAML file that describes the run") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", where=str(path)) from error
    tree = _read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise RecipeError("must be a mapping of sections", where=str(path), hint="start with `name:` and `target:`")
    return parse(tree, overrides, where=str(path))


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has already, of which YAML's own loader silently keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in first:
                raise yaml.MarkedYAMLError(
                    problem=f"`{name}` is there since line {first[name]}; keep one", problem_mark=key.start_mark
                )
            first[name] = key.start_mark.line + 1
        return node


def _read_yaml(text: str, where: str) -> Any:
    """Raises RecipeError if it is not YAML, or has a key twice; names the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"is not valid YAML: {line}{error.problem}", where=where) from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"is not valid YAML: {' '.join(str(error).split())}", where=where) from error
    except RecursionError as error:
        raise RecipeError("is nested too deeply", where=where) from error


def parse(tree: dict[str, Any], overrides: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """Apply overrides to a tree of settings, in place, and check it.

    Raises:
        RecipeError: names every key that does not fit.
    """
    for override in overrides:
        _apply(tree, override)
    _refuse_odd_values(tree, where)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(detail) for detail in error.errors()]
        raise RecipeError("; ".join(problems), where=where, hint="`draftsmith recipe` prints every setting") from None


def _refuse_odd_values(value: Any, where: str, name: str = "") -> None:
    """Raises RecipeError for what YAML can say and neither a path, a command line nor the run's records can hold."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_odd_values(item, where, f"{name}.{key}" if name else str(key))
            if not isinstance(key, str | int):
                raise RecipeError(f"`{name}`: {key!r} is no name", where=where)
    elif isinstance(value, str):
        if "\0" in value or value != value.encode(errors="replace").decode():
            raise RecipeError(f"`{name}`: has a character that no path or text can have", where=where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"`{name}`: {value} is not a finite number", where=where)
    elif not isinstance(value, int | float | Path | None):
        raise RecipeError(
            f"`{name}`: {value!r} is no text, number, list or mapping", where=where, hint="quote it, if it is a text"
        )


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; a whole number addresses an item of a list."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise RecipeError("an override reads section.field=value", where=override)
    value = _read_yaml(text, override)
    *parents, last = dotted.split(".")
    node: Any = tree
    for key in parents:
        if isinstance(node, list):
            node = node[_index(node, key, override)]
            continue
        if not isinstance(node, dict):
            raise RecipeError(f"`{key}` is not below a section", where=override)
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RecipeError(f"`{last}` is not below a section", where=override)


def _index(items: list[Any], key: str, override: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= len(items):
        raise RecipeError(f"`{key}` is not one of the {len(items)} items, counted from 0", where=override)
    return int(key)


def _explain(detail: ErrorDetails) -> str:
    """One pydantic error as a sentence; for an unknown key, with the nearest that exists."""
    location = detail["loc"]
    dotted = ".".join(str(part) for part in location)
    if detail["type"] != "extra_forbidden":
        return f"`{dotted}`: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    known = list(fields_at(location[:-1]))
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"`{dotted}` does not exist; did you mean `{near[0]}`?"
    elsewhere = [path for path in every_setting() if path.endswith("." + str(location[-1]))]
    if elsewhere:
        return f"`{dotted}` does not exist; did you mean `{elsewhere[0]}`?"
    return f"`{dotted}` does not exist; here may stand {', '.join(known)}"


def fields_at(location: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """The settings that a section may hold; `location` is the path to it."""
    section: type[Section] = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        section = _section_of(section.model_fields[part]) or section
    return section.model_fields


def every_setting() -> dict[str, FieldInfo]:
    """Dotted name of every setting, in the order of the file."""
    found: dict[str, FieldInfo] = {}

    def walk(section: type[Section], prefix: str) -> None:
        for name, info in section.model_fields.items():
            inner = _section_of(info)
            if inner is None:
                found[prefix + name] = info
            else:
                walk(inner, f"{prefix}{name}.")

    walk(Recipe, "")
    return found


def _section_of(info: FieldInfo) -> type[Section] | None:
    candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def describe() -> str:
    """Every setting with its default and meaning, one a line."""
    lines = []
    for name, info in every_setting().items():
        value = info.get_default(call_default_factory=True)
        default = "required" if info.is_required() else json.dumps(value, default=str)
        choices = sorted(kind for kind in _kinds_of(info.annotation) if isinstance(kind, str))
        said = " ".join(filter(None, (info.description, f"[{', '.join(choices)}]" if choices else "")))
        lines.append(f"{name:<42} {default:<14} {said}".rstrip())
    return "\n".join(lines)


def settings_page() -> str:
    """docs/settings.md."""
    return (
        f"# Every setting\n\nWritten by `make docs`; `draftsmith recipe` prints the same.\n\n```\n{describe()}\n```\n"
    )
