"""What a run costs before it is started: device memory, time, disk. Each figure says what it assumes.

N decoder layers   A auxiliary layers   K unroll steps   Vt, Vd vocabularies   H hidden size of target and draft
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from draftsmith.draft.config import DraftConfig, draft_config
from draftsmith.errors import RequestError
from draftsmith.gpus import peak_flops
from draftsmith.probe.checks import Check
from draftsmith.probe.machine import inspect_machine
from draftsmith.recipe import Probe, Recipe, Train
from draftsmith.records import TargetFacts
from draftsmith.redo import bytes_aside
from draftsmith.rundir import RunPaths
from draftsmith.store.sizes import bytes_per_token

USABLE_MEMORY = 0.9  # of a device; the rest is for activations, graphs and the driver. vLLM's own default
UTILIZATION = 0.3  # of peak arithmetic, in prefill and in training
WRITE_BYTES_PER_SECOND = 2**30  # of a local NVMe disk; measured 1.1 GB/s with SmolLM2 on an H200
CORE_FLOPS = 80e9  # one AVX2 core: 32 float32 operations a cycle at 2.5 GHz
UNKNOWN_GPU_FLOPS = 989e12
LOGITS_BYTES = 480 << 20  # of the student's, in memory at a time: `fast_loss.STUDENT_BYTES`
MILLION = 1_000_000


@dataclass(frozen=True)
class Devices:
    """What the target is spread over."""

    name: str
    count: int
    memory_bytes: int | None  # of one
    flops: float  # peak of one, per second
    is_cpu: bool = False


@dataclass(frozen=True)
class Tokens:
    """How many tokens the figures are for."""

    count: int
    known: str  # "exact", "bound" or "unit": so many, at most so many, or figures per million
    taught: float = 1.0  # share of them, at most, whose last state is kept

    def __str__(self) -> str:
        number = f"{figure(self.count / MILLION)} million tokens"
        return {"exact": number, "bound": f"at most {number}", "unit": "every million tokens"}[self.known]


def check_budget(facts: TargetFacts, recipe: Recipe, evidence: dict[str, Any]) -> list[Check]:
    """The budget of a run as verdicts; what memory or disk cannot hold fails.

    Args:
        evidence: its `config`, and of another machine its `machine` and `disk_free_bytes`.
    """
    remote = "host" in evidence
    devices = plan_devices(recipe.probe, evidence["machine"] if remote else inspect_machine())
    tokens = count_tokens(recipe)
    aux_layer_ids = tuple(recipe.extract.aux_layer_ids or facts.aux_layer_ids or (1, 2, 3))
    room = evidence["disk_free_bytes"] if remote else room_for_store(RunPaths(recipe.folder))
    codec, width = recipe.extract.codec, facts.hidden_size
    per_token = bytes_per_token(width, len(aux_layer_ids), codec, tokens.taught) if width else None
    active = active_parameters(facts, text_config(evidence.get("config") or {}, facts.wrapper))
    checks = [
        *_check_length(facts, recipe.prepare.max_length_tokens),
        _check_memory(facts, devices, recipe.extract.batch_tokens),
        _check_load(facts, devices, recipe.probe),
        _check_store(per_token, tokens, room),
        _check_extraction(active, per_token, tokens, devices),
    ]
    try:
        draft = draft_config(facts, recipe.train.draft, recipe.prepare.draft_vocab_size, aux_layer_ids)
    except RequestError as error:
        return [*checks, Check("training", "warn", f"not known: {error.what}", error.hint)]
    share = 1 - recipe.prepare.validation_fraction
    return [
        *checks,
        _check_training(draft, recipe.train, tokens, share, devices),
        _check_trainer(draft, recipe, devices),
    ]


def plan_devices(probe: Probe, machine: dict[str, Any]) -> Devices:
    """The devices that the recipe names, or those of the machine; its CPU where neither has any."""
    gpus = machine["gpus"]
    if not gpus and probe.gpus is None and probe.gpu_memory_gib is None:
        return Devices(f"{machine['cpus']} CPU cores", 1, machine["memory_bytes"], CORE_FLOPS * machine["cpus"], True)
    memory = min((gpu["memory_bytes"] for gpu in gpus), default=None)
    if probe.gpu_memory_gib is not None:
        memory = int(probe.gpu_memory_gib * 2**30)
    name = gpus[0]["name"] if gpus else "unknown GPU"
    flops = peak_flops(name) or UNKNOWN_GPU_FLOPS
    return Devices(name, probe.gpus or len(gpus) or 1, memory, flops)


def count_tokens(recipe: Recipe) -> Tokens:
    """Tokens of the run's corpus; before there is one, at most what the limits of its sources allow."""
    corpus = RunPaths(recipe.folder).corpus
    if corpus.exists():
        from draftsmith.corpus import corpus_lengths, corpus_taught

        count = sum(corpus_lengths(corpus).values())
        return Tokens(count, "exact", sum(corpus_taught(corpus).values()) / max(1, count))
    limits = [source.limit for source in recipe.prepare.sources]
    if limits and all(limits):
        return Tokens(sum(limit or 0 for limit in limits) * recipe.prepare.max_length_tokens, "bound")
    return Tokens(MILLION, "unit")


def room_for_store(paths: RunPaths) -> int:
    """Bytes that the run's store may come to hold: what is free on its disk, and what it has already, or had."""
    folder = paths.store.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return shutil.disk_usage(existing).free + written + bytes_aside(paths, "extract")


def text_config(config: dict[str, Any], wrapper: str | None) -> dict[str, Any]:
    """The text model's configuration inside a wrapper's; `wrapper` is a dotted key of it."""
    for key in wrapper.split(".") if wrapper else ():
        config = config[key]
    return config


# ---- The target: positions, weights, cache, arithmetic ----


def _check_length(facts: TargetFacts, most_tokens: int) -> list[Check]:
    """A warning where samples may go on past the target's positions."""
    positions, scaling = facts.max_position_embeddings, facts.rope_scaling or {}
    factor = _number(scaling, "factor")
    if positions and factor and scaling["rope_type"] in ("yarn", "linear", "dynamic"):  # as vLLM derives it
        positions = max(positions, int((_number(scaling, "original_max_position_embeddings") or positions) * factor))
    if not positions or most_tokens <= positions:
        return []
    detail = f"prepare.max_length_tokens is {most_tokens:,}, and the target has {positions:,} positions"
    hint = f"past them it writes nonsense or fails: set prepare.max_length_tokens to at most {positions}"
    return [Check("sample length", "warn", detail, hint)]


def weight_bytes_per_device(facts: TargetFacts, devices: Devices) -> int | None:
    """Split evenly, as tensor parallelism does up to a few small tensors. A CPU computes in float32."""
    if facts.weight_bytes is None:
        return None
    widened = 2 if devices.is_cpu and facts.dtype in ("bfloat16", "float16") and facts.quantization is None else 1
    return facts.weight_bytes * widened // devices.count


def kv_bytes_per_token(facts: TargetFacts, gpus: int, element_bytes: int = 2) -> int | None:
    """Key-value cache of one token on one of `gpus` devices.

    MLA keeps one latent of kv_lora_rank + qk_rope_head_dim, whole on every device (DeepSeek-V2, arXiv 2405.04434,
    section 2.1); otherwise heads are shared out, one to a device at the least.
    """
    kinds = facts.layer_types or {}
    layers = sum(n for kind, n in kinds.items() if "attention" in kind and "linear" not in kind)
    layers = layers or facts.num_hidden_layers or 0
    if facts.mla and facts.mla.get("kv_lora_rank"):
        width = (facts.mla["kv_lora_rank"] or 0) + (facts.mla["qk_rope_head_dim"] or 0)
        return layers * width * element_bytes
    if not layers or facts.num_key_value_heads is None or facts.head_dim is None:
        return None
    heads = max(1, -(-facts.num_key_value_heads // gpus))
    return layers * 2 * heads * facts.head_dim * element_bytes


def active_parameters(facts: TargetFacts, config: dict[str, Any]) -> int | None:
    """Weights of the decoder layers that one token is multiplied with; of experts, those that it is routed to.

    Every layer is taken to have softmax attention, and a gated MLP of three matrices. Embedding and head are left
    out: extraction runs neither over more than a row.

    Args:
        config: of the text model.
    """
    hidden, layers, attention = facts.hidden_size, facts.num_hidden_layers, _attention_parameters(facts)
    if not hidden or not layers or attention is None:
        return None
    experts = _number(config, "num_experts_per_tok", "top_k_experts", "moe_topk")
    dense = 3 * hidden * (facts.intermediate_size or 4 * hidden)
    if not facts.num_experts or not experts:
        return layers * (attention + dense)
    size = _number(config, "moe_intermediate_size") or facts.intermediate_size or 4 * hidden
    shared = _number(config, "shared_expert_intermediate_size") or _number(config, "n_shared_experts") * size
    sparse = 3 * hidden * (experts * size + shared) + hidden * facts.num_experts
    listed = config.get("mlp_only_layers")
    dense_layers = _number(config, "first_k_dense_replace") or (len(listed) if isinstance(listed, list) else 0)
    sparse_layers = (layers - dense_layers) // (_number(config, "decoder_sparse_step") or 1)
    return layers * attention + sparse_layers * sparse + (layers - sparse_layers) * dense


def _number(config: dict[str, Any], *keys: str) -> int:
    """The first of the settings that is a whole number, the largest where it is given by layer; 0 if none is."""
    for value in map(config.get, keys):
        whole = [
            n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int | float) and n == n // 1
        ]
        if any(whole):
            return int(max(whole))
    return 0


def _attention_parameters(facts: TargetFacts) -> int | None:
    """Weights of one layer's attention projections."""
    hidden, heads = facts.hidden_size, facts.num_attention_heads
    if not hidden or not heads:
        return None
    if facts.mla and facts.mla.get("kv_lora_rank"):
        latent, rope, nope, value = (
            facts.mla[name] or 0 for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        rank = facts.mla["q_lora_rank"]
        query_size = heads * (nope + rope)
        query = hidden * rank + rank * query_size if rank else hidden * query_size
        return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    if facts.head_dim is None:
        return None
    return 2 * hidden * facts.head_dim * (heads + (facts.num_key_value_heads or heads))


# ---- The draft ----


def draft_parameters(draft: DraftConfig) -> tuple[int, int, int]:
    """Trained weights: of `fc`, which runs once a token, of the decoder layer, and of `lm_head`; norms left out."""
    queries, keys = (heads * draft.head_dim for heads in (draft.num_attention_heads, draft.num_key_value_heads))
    attention = 2 * draft.hidden_size * (queries + 2 * keys) + queries * draft.hidden_size
    return (
        len(draft.aux_layer_ids) * draft.target_hidden_size * draft.hidden_size,
        attention + 3 * draft.hidden_size * draft.intermediate_size,
        draft.hidden_size * draft.draft_vocab_size,
    )


def training_flops_per_token(draft: DraftConfig, unroll_steps: int) -> int:
    """Six operations a weight forward and backward, layer and head once a step; two for the teacher's whole head."""
    fc, layer, head = draft_parameters(draft)
    return 6 * (fc + unroll_steps * (layer + head)) + 2 * draft.target_hidden_size * draft.vocab_size


def trainer_bytes(
    draft: DraftConfig, train: Train, document_tokens: int, state_bytes: int, *, plain: bool = False
) -> tuple[int, int]:
    """(weights, what backward keeps) of one trainer.

    Weights: float32 masters, gradients and two moments; the teacher's head, and the embedding that it shares with the
    draft.

    Args:
        state_bytes: of a number in the dtype to compute in.
        plain: by the plain computation that judges the fast one.
    """
    weights = 16 * sum(draft_parameters(draft)) + 2 * state_bytes * draft.vocab_size * draft.target_hidden_size
    tokens, steps = _tokens_at_once(train), train.unroll_steps
    if plain:
        return weights, tokens * steps * _plain_bytes(draft, min(document_tokens, tokens), state_bytes)
    return weights, _fast_bytes(draft, tokens, steps, state_bytes)


def _fast_bytes(draft: DraftConfig, tokens: int, steps: int, state_bytes: int) -> int:
    """The buffers of each unroll step (`draft/fast_unroll.py`), the batch's states, one chunk of logits, and the
    matrices in the dtype to compute in, with the teacher's rows of the draft vocabulary."""
    fc, layer, head = draft_parameters(draft)
    queries, keys = (heads * draft.head_dim for heads in (draft.num_attention_heads, draft.num_key_value_heads))
    of_step = 2 * queries + 4 * keys + 3 * draft.hidden_size + 2 * draft.intermediate_size
    states = (len(draft.aux_layer_ids) + 1) * draft.target_hidden_size
    logits = min(LOGITS_BYTES, state_bytes * tokens * steps * draft.draft_vocab_size)
    return state_bytes * (tokens * (steps * of_step + states) + fc + layer + 2 * head) + logits


def _plain_bytes(draft: DraftConfig, document_tokens: int, state_bytes: int) -> int:
    """Of a token and step: activations of the layer, logits and log-probabilities with the teacher's, and the attention
    weights of whole documents."""
    activations = state_bytes * (14 * draft.hidden_size + 4 * draft.intermediate_size)
    logits = (state_bytes + 4 + 4) * draft.draft_vocab_size
    return activations + logits + (state_bytes + 4) * draft.num_attention_heads * document_tokens


def _tokens_at_once(train: Train) -> int:
    """Of one trainer that is alone: others would take a share of the batch."""
    return min(train.batch_tokens, train.micro_batch_tokens or train.batch_tokens)


# ---- Verdicts ----


def _check_memory(facts: TargetFacts, devices: Devices, batch_tokens: int) -> Check:
    name, where = "device memory", f"each of {devices.count} × {devices.name}"
    weights, cache = weight_bytes_per_device(facts, devices), kv_bytes_per_token(facts, devices.count)
    if weights is None:
        return Check(name, "warn", "not known: the size of the weights is not", "put the weight files into the folder")
    detail = f"{size(weights)} of weights on {where}"
    if cache is not None:
        detail += (
            f", {size(cache * batch_tokens)} of KV cache for {batch_tokens:,} tokens in flight ({cache:,} bytes each)"
        )
    assumed = "assuming an even split" + (" and float32" if devices.is_cpu else ", a 16-bit cache")
    need = weights + (cache or 0) * batch_tokens
    if devices.memory_bytes is None:
        return Check(name, "warn", f"{detail}; {assumed}", "set probe.gpu_memory_gib to have it compared")
    usable = int(USABLE_MEMORY * devices.memory_bytes)
    detail += f", of {size(devices.memory_bytes)}; {assumed}, {1 - USABLE_MEMORY:.0%} left for all else"
    if need <= usable:
        return Check(name, "ok", detail)
    enough = -(-(facts.weight_bytes or 0) // usable)
    hint = f"weights alone take {enough} such devices: set probe.gpus and probe.gpu_memory_gib to those of the run"
    return Check(name, "fail", detail, hint)


def _check_load(facts: TargetFacts, devices: Devices, probe: Probe) -> Check:
    if facts.weight_bytes is None:
        return Check("load time", "warn", "not known: the size of the weights is not")
    seconds = facts.weight_bytes / (probe.load_gib_per_second * 2**30)
    detail = f"{duration(seconds)} for {size(facts.weight_bytes)}; assuming {probe.load_gib_per_second:g} GiB/s"
    return Check("load time", "ok", f"{detail} (probe.load_gib_per_second)")


def _check_store(per_token: int | None, tokens: Tokens, room: int) -> Check:
    if not per_token:
        return Check("store size", "warn", "not known: the configuration does not say hidden_size")
    need = per_token * tokens.count
    detail = f"{size(need)} for {tokens}, {per_token:,} bytes each; {size(room)} free, "
    detail += f"room for {figure(room / per_token / MILLION)} million tokens"
    hint = "set run_dir to a larger disk, extract.codec=int8 for half of bf16's bytes, or take fewer conversations"
    hint += " (prepare.sources[].limit)"
    if need <= room:
        return Check("store size", "ok", detail)
    return Check("store size", "fail" if tokens.known == "exact" else "warn", detail, hint)


def _check_extraction(active: int | None, per_token: int | None, tokens: Tokens, devices: Devices) -> Check:
    if active is None or not per_token:
        return Check("extraction time", "warn", "not known: the configuration does not say the layers' shape")
    compute = 2 * active / (devices.flops * devices.count * UTILIZATION)
    write = per_token / WRITE_BYTES_PER_SECOND
    seconds = max(compute, write) * tokens.count
    bound = "arithmetic" if compute > write else "the disk"
    detail = (
        f"{duration(seconds)} for {tokens}, {1 / max(compute, write):,.0f} tokens/s, bound by {bound}; assuming "
        f"2 × {figure(active / 1e9)} billion operations a token at {_speed(devices)}, attention scores not counted, "
        f"and {size(WRITE_BYTES_PER_SECOND)}/s to disk"
    )
    return Check("extraction time", "ok", detail)


def _check_training(draft: DraftConfig, train: Train, tokens: Tokens, share: float, devices: Devices) -> Check:
    one = Devices(devices.name, 1, devices.memory_bytes, devices.flops, devices.is_cpu)
    flops = training_flops_per_token(draft, train.unroll_steps)
    assumed = f"assuming {figure(flops / 1e9)} billion operations a token and epoch at {_speed(one)}"
    if train.max_steps is not None:
        seen, what = train.max_steps * train.batch_tokens, f"{train.max_steps:,} steps of {train.batch_tokens:,} tokens"
    else:
        seen, what = int(tokens.count * share * train.epochs), f"{train.epochs:g} epochs over {share:.0%} of {tokens}"
    seconds = flops * seen / (one.flops * UTILIZATION)
    return Check("training time", "ok", f"{duration(seconds)} for {what}; {assumed}")


def _check_trainer(draft: DraftConfig, recipe: Recipe, devices: Devices) -> Check:
    train, document_tokens = recipe.train, recipe.prepare.max_length_tokens
    narrow = train.autocast == "bfloat16" or (train.autocast == "auto" and not devices.is_cpu)
    plain = train.kernels == "plain" or not (narrow or devices.is_cpu)  # as `train.step.Learner` chooses
    weights, kept = trainer_bytes(draft, train, document_tokens, 2 if narrow else 4, plain=plain)
    detail = (
        f"{size(weights)} of weights and optimizer, at most {size(kept)} for the backward pass of "
        f"{_tokens_at_once(train):,} tokens; assuming documents of {document_tokens:,} tokens, every token supervised"
    )
    if devices.memory_bytes is None:
        return Check("trainer memory", "ok", detail)
    detail += f"; of {size(devices.memory_bytes)} ({devices.name})"
    if weights + kept <= USABLE_MEMORY * devices.memory_bytes:
        return Check("trainer memory", "ok", detail)
    hint = "set train.micro_batch_tokens; or lower train.batch_tokens, max_length_tokens or draft_vocab_size of prepare"
    return Check("trainer memory", "warn", detail, hint)


def _speed(devices: Devices) -> str:
    known = "" if devices.is_cpu or peak_flops(devices.name) else ", taken for an H100"
    peak = f"{figure(devices.flops / 1e12)} TFLOP/s"
    return f"{UTILIZATION:.0%} of {devices.count} × {peak} ({devices.name}{known})"


def figure(number: float) -> str:
    """Three digits, and never an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def size(number: float) -> str:
    """Bytes for people, in the binary units that `df -h` prints."""
    unit = next((unit for unit in range(4) if number < 1024 ** (unit + 1)), 4)
    return f"{figure(number / 1024**unit)} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def duration(seconds: float) -> str:
    for limit, unit, length in ((120, "seconds", 1), (7200, "minutes", 60), (172800, "hours", 3600)):
        if seconds < limit:
            return f"{figure(seconds / length)} {unit}"
    return f"{figure(seconds / 86400)} days"
