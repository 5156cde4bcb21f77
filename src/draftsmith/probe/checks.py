"""Verdicts on a target, from its facts and the evidence that they rest on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.draft.config import draft_config, rope_is_portable
from draftsmith.errors import DraftsmithError
from draftsmith.layers import default_aux_layer_ids, to_sglang, validate_layer_ids
from draftsmith.probe.tensors import find_keys, stored_head
from draftsmith.recipe import Draft
from draftsmith.records import TargetFacts

NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
# Layers whose state is not a cache of keys and values.
RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "kda", "gated_deltanet")
TENSOR_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class Check:
    """One verdict: `warn` is what to know before going on, `fail` is what the work would die of."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check_target(
    facts: TargetFacts, evidence: dict[str, Any], *, weights_needed: bool = False, code_trusted: bool = False
) -> list[Check]:
    """Verdicts on configuration, weights, tokenizer and shape, in the order in which they matter.

    Args:
        weights_needed: the work that follows reads the weights, so that they must be on this machine.
        code_trusted: `target.trust_remote_code`.
    """
    return [
        _configuration(facts, evidence),
        _layer_ids(facts, evidence),
        _weights(facts, evidence, weights_needed),
        *_dense_tensors(facts, evidence),
        _vocabulary(facts),
        _special_tokens(facts),
        _tokenizer(facts, evidence),
        _attention(facts),
        _rope(facts, evidence),
        *_layer_types(facts),
        _quantization(facts, evidence),
        *_remote_code(facts, evidence, code_trusted),
        *_other_files(evidence),
    ]


def verdict(checks: list[Check]) -> Literal["ok", "warn", "fail"]:
    """The worst of them."""
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


# ---- Configuration and layers ----


def _configuration(facts: TargetFacts, evidence: dict[str, Any]) -> Check:
    config = evidence["config"]
    absent = [name for name in NEEDED if getattr(facts, name) is None]
    if absent:
        detail = f"{', '.join(absent)} is neither in config.json nor to be seen in the tensors"
        hint = "transformers fills it from the model's class; write it into config.json"
        return Check("configuration", "fail", detail, hint)
    if config.get("is_encoder_decoder"):
        detail = "is an encoder-decoder; EAGLE-3 drafts continue the text of a decoder"
        return Check("configuration", "fail", detail, "give a decoder-only model")
    if facts.architecture is None:
        hint = "write the class of the model under `architectures`; engines choose their code by it"
        return Check("configuration", "warn", "names no architecture", hint)
    inside = f", its text model {facts.text_model_type} under {facts.wrapper}" if facts.wrapper else ""
    seen = f"; not written but seen in the tensors or derived: {', '.join(facts.derived)}" if facts.derived else ""
    return Check("configuration", "ok", f"{facts.architecture}{inside}{seen}")


def _layer_ids(facts: TargetFacts, evidence: dict[str, Any]) -> Check:
    layers = facts.num_hidden_layers
    if layers is None:
        return Check("layer ids", "fail", "cannot be chosen: the number of decoder layers is not known")
    try:
        ids = validate_layer_ids(facts.aux_layer_ids or default_aux_layer_ids(layers), layers)
    except DraftsmithError as error:
        return Check("layer ids", "fail", error.what, error.hint)
    stacks = {name: count for name, count in evidence.get("layers", {}).items() if _of_decoder(name, facts)}
    if evidence.get("weights_sha256") and stacks and max(stacks.values()) < layers:
        name = max(stacks, key=lambda stack: stacks[stack])
        detail = f"config.json says {layers} decoder layers; the weight files hold {stacks[name]} under {name}"
        return Check("layer ids", "fail", detail, "the checkpoint is incomplete, or its config.json another model's")
    written = ", ".join(map(str, ids))
    elsewhere = ", ".join(map(str, to_sglang(ids)))
    return Check(
        "layer ids", "ok", f"{written} of {layers}: layers applied before the state; SGLang writes {elsewhere}"
    )


def _of_decoder(stack: str, facts: TargetFacts) -> bool:
    """Whether a stack of layers stands beside the embedding: `model.layers` beside `model.embed_tokens.weight`."""
    beside = (facts.embedding_key or "").rpartition(".")[0].rpartition(".")[0]
    return facts.embedding_key is not None and stack.rpartition(".")[0] == beside


# ---- Weights ----


def _weights(facts: TargetFacts, evidence: dict[str, Any], needed: bool) -> Check:
    problems = [problem for problem in evidence["problems"] if not _of_other_file(problem)]
    count = facts.weight_files
    files = f" in {count} file{'s' if count > 1 else ''}" if count else ""
    size = f"{facts.weight_bytes / 1e9:,.1f} GB{files}" if facts.weight_bytes else "size not known"
    if problems:
        shown = "; ".join(f"{problem['file']} {problem['detail']}" for problem in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        return Check("weights", "fail", shown + more, _weight_remedy(problems[0]["kind"]))
    if evidence.get("weights_at") == "hub":
        detail = f"{size}, on the hub and not on this machine"
        hint = f"`hf download {evidence['hub_id']} --revision {facts.revision}`"
        return Check("weights", "fail" if needed else "warn", detail, hint)
    return Check("weights", "ok", f"{size}, each as long as its header says")


def _weight_remedy(kind: str) -> str:
    return {
        "lfs_pointer": "`git lfs pull` in the folder fetches what they point to",
        "no_weights": "convert them to safetensors, or download the model's safetensors files",
        "lost_tensors": "index and weight files are not of one checkpoint; download both again",
    }.get(kind, "download the named files again")


def _dense_tensors(facts: TargetFacts, evidence: dict[str, Any]) -> list[Check]:
    """Embedding, head and final norm: all that training needs of the target."""
    tensors = evidence.get("tensors") or {}
    if not tensors:
        return [Check("lm_head", "warn", "not known: no weight file could be read")]
    problems = find_keys(tensors, facts.vocab_size, facts.tie_word_embeddings).problems
    if not evidence.get("weights_sha256") and evidence.get("weights_at") != "hub" and problems:
        return [Check("lm_head", "warn", f"not known while weight files are damaged: {'; '.join(problems.values())}")]
    hint = "training reads this tensor by its name; please report the model's names"
    checks = [
        Check(name.replace("_", " "), "fail", problems[name], hint)
        for name in ("embedding", "final_norm")
        if name in problems
    ]
    return [*checks, _head(facts, tensors, problems.get("lm_head"))]


def _head(facts: TargetFacts, tensors: dict[str, Any], problem: str | None) -> Check:
    """Flag and tensor of tied embeddings may contradict each other; only a head that is nowhere is an error."""
    module = stored_head(tensors)
    if problem and module is None:
        hint = f"the file lacks {_expected_head(facts)}; if the model ties them, set tie_word_embeddings to true"
        return Check("lm_head", "fail", problem, hint)
    if problem:
        hint = "training needs dense rows: take lm_head.weight from the unquantised model that this was made from"
        return Check("lm_head", "fail", problem, hint)
    if facts.lm_head_key == facts.embedding_key and module is not None:
        detail = f"tied to {facts.embedding_key}; {module} is stored all the same, and engines ignore it"
        return Check(
            "lm_head", "warn", detail, "set tie_word_embeddings to false if the stored head is the trained one"
        )
    if facts.lm_head_key == facts.embedding_key:
        why = "tied to" if facts.tie_word_embeddings else "not stored and not denied: taken from"
        return Check("lm_head", "ok", f"{why} {facts.embedding_key}, {facts.lm_head_dtype}")
    return Check(
        "lm_head", "ok", f"{facts.lm_head_key}, {facts.lm_head_dtype} {tensors[facts.lm_head_key or '']['shape']}"
    )


def _expected_head(facts: TargetFacts) -> str:
    """`lm_head` stands beside the `model` that holds the embedding."""
    parts = (facts.embedding_key or "").split(".")
    above = parts[: parts.index("model")] if "model" in parts else []
    return ".".join([*above, "lm_head.weight"])


# ---- Vocabulary and tokenizer ----


def _vocabulary(facts: TargetFacts) -> Check:
    size, rows, tokens = facts.vocab_size, facts.embedding_rows, facts.tokenizer_size
    if size is not None and tokens is not None and tokens > size:
        detail = f"the tokenizer has {tokens:,} token ids; the embedding has {size:,} rows"
        return Check("vocabulary", "fail", detail, "tokenizer and weights are not of one model")
    if rows is not None and size is not None and rows != size:
        detail = f"config.json says {size:,}; the embedding has {rows:,} rows"
        return Check(
            "vocabulary", "warn", detail, f"engines read the first {min(rows, size):,}; drafts follow config.json"
        )
    if tokens is None or size is None:
        return Check("vocabulary", "ok", f"{size or 0:,} rows; the tokenizer's size is not known")
    padding = f"; {size - tokens:,} rows pad" if tokens < size else ""
    return Check("vocabulary", "ok", f"{tokens:,} token ids in {size:,} rows{padding}")


def _special_tokens(facts: TargetFacts) -> Check:
    """Padding that is also an end of turn does no harm here: masks go by position, never by token id."""
    size = facts.vocab_size or 0
    named = {"bos": facts.bos_token_id, "pad": facts.pad_token_id}
    named |= {f"eos {number}": id for number, id in enumerate(facts.eos_token_ids, 1)}
    outside = [f"{name} {id}" for name, id in named.items() if id is not None and id != -1 and not 0 <= id < size]
    if outside and size:
        detail = f"{', '.join(outside)} is outside the vocabulary of {size:,}"
        return Check("special tokens", "fail", detail, "correct the ids in config.json and generation_config.json")
    if not facts.eos_token_ids:
        hint = "answers would end at max_new_tokens only; set eos_token_id in generation_config.json"
        return Check("special tokens", "warn", "no end-of-turn token is named", hint)
    shared = "; padding is one of them" if facts.pad_token_id in facts.eos_token_ids else ""
    return Check("special tokens", "ok", f"a turn ends with {', '.join(map(str, facts.eos_token_ids))}{shared}")


def _tokenizer(facts: TargetFacts, evidence: dict[str, Any]) -> Check:
    files = evidence.get("tokenizer_files") or {}
    if not files:
        hint = "copy the tokenizer files of the model into the folder"
        return Check("tokenizer", "fail", "no tokenizer file is in the folder", hint)
    if facts.template_sha256 is None:
        hint = "set prepare.chat_template to a Jinja file, or take the instruction-tuned model"
        return Check("tokenizer", "warn", "has no chat template, as base models have none", hint)
    return Check("tokenizer", "ok", f"{', '.join(sorted(files))}, with a chat template")


# ---- Shape ----


def _attention(facts: TargetFacts) -> Check:
    if facts.attention is None:
        hint = "set train.draft.num_attention_heads, num_key_value_heads and head_dim"
        return Check("attention", "warn", "is not told by the configuration", hint)
    kind = f"{facts.attention}, {facts.num_attention_heads} heads, {facts.num_key_value_heads} for keys and values"
    try:
        draft = draft_config(facts, Draft(), None, facts.aux_layer_ids or ())
    except DraftsmithError as error:
        return Check("attention", "warn", f"{kind}; {error.what}", error.hint)
    shape = f"{draft.num_attention_heads} heads of {draft.head_dim}, {draft.num_key_value_heads} for keys and values"
    if facts.attention == "mla":
        return Check("attention", "ok", f"{kind}; the draft is Llama-style all the same, with an explicit {shape}")
    return Check("attention", "ok", f"{kind}; the draft has {shape}")


def _rope(facts: TargetFacts, evidence: dict[str, Any]) -> Check:
    if facts.rope_theta is None:
        hint = "the draft takes 10000, which is its own matter and served as trained; nothing needs to be done"
        return Check("RoPE", "warn", f"{_unread_theta(evidence)}; the model's class may have a default, or none", hint)
    said = [f"theta {facts.rope_theta:g}"]
    said += [_describe_scaling(facts.rope_scaling)] if facts.rope_scaling else []
    said += _describe_factors(facts.rope_scaling or {})
    said += [f"on {facts.partial_rotary_factor:.0%} of each head"] if facts.partial_rotary_factor else []
    said += [f"theta {facts.rope_local_theta:g} in sliding windows"] if facts.rope_local_theta else []
    said += ["queries scaled by llama_4_scaling"] if facts.llama_4_scaling else []
    if not rope_is_portable(facts.rope_scaling):
        said.append("the draft takes theta without the scaling, which only the target's own attention can compute")
    return Check("RoPE", "ok", "; ".join(said))


def _describe_scaling(scaling: dict[str, Any]) -> str:
    factor = scaling.get("factor")
    return f"{scaling['rope_type']} scaling" + (f" by {factor:g}" if isinstance(factor, int | float) else "")


def _describe_factors(scaling: dict[str, Any]) -> list[str]:
    original = scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") != "longrope" or original is None:
        return []
    served = f"vLLM serves with the short factors, unless serve.engine_args.max_model_len is above {original:,}"
    return [f"{served}: states are captured with the same"]


def _unread_theta(evidence: dict[str, Any]) -> str:
    written = json.dumps(evidence["config"])
    return "theta is not one number" if '"rope_theta": [' in written else "no theta is in config.json"


def _layer_types(facts: TargetFacts) -> list[Check]:
    kinds = facts.layer_types or {}
    recurrent = [kind for kind in kinds if any(word in kind for word in RECURRENT)]
    if not recurrent:
        return []
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    hint = "engines roll recurrent state back for rejected drafts; rehearse, and check acceptance after long answers"
    return [Check("layer types", "warn", f"mixed: {told}", hint)]


# ---- Quantisation, code, other files ----


def _quantization(facts: TargetFacts, evidence: dict[str, Any]) -> Check:
    sizes = evidence.get("dtype_bytes") or {}
    stored = ", ".join(f"{dtype} {size / 1e9:,.1f} GB" for dtype, size in sorted(sizes.items(), key=lambda i: -i[1]))
    packed = sorted(dtype for dtype in sizes if dtype not in (*TENSOR_DTYPES, "I64", "BOOL"))
    if facts.quantization is None and packed:
        detail = f"config.json tells of none, but tensors are {', '.join(packed)}"
        return Check(
            "quantization", "fail", detail, "engines would read them as plain numbers; restore the configuration"
        )
    if facts.quantization is None:
        return Check("quantization", "ok", f"none: {stored or facts.dtype or 'dtype not known'}")
    detail = describe_quantization(facts.quantization)
    if sizes and not packed:
        hint = "remove quantization_config from config.json if this is a dequantised copy"
        return Check("quantization", "warn", f"{detail} in config.json, but every tensor is dense: {stored}", hint)
    return Check("quantization", "ok", f"{detail}; {stored}" if stored else detail)


def describe_quantization(quantization: dict[str, Any]) -> str:
    """Method, format, bits and group in a few words: "compressed-tensors pack-quantized, 4-bit int, groups of 32"."""
    method = quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed method"
    words = [f"{method} {quantization['format']}" if quantization.get("format") else f"{method}"]
    groups = [group.get("weights") for group in _objects(quantization.get("config_groups"))]
    for weights in _objects(groups) or [quantization]:
        bits = weights.get("num_bits") or weights.get("bits") or weights.get("w_bit")
        words += [f"{bits}-bit {weights.get('type') or ''}".strip()] if bits else []
        size = weights.get("group_size")
        words += [f"groups of {size}"] if isinstance(size, int) and size > 0 else []
        block = weights.get("weight_block_size") or weights.get("block_structure")
        words += [f"blocks of {' by '.join(map(str, block))}"] if isinstance(block, list) else []
    return ", ".join(dict.fromkeys(words))


def _objects(values: Any) -> list[dict[str, Any]]:
    """The objects that are values of an object or items of a list; none where it is neither."""
    found = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return [value for value in found if isinstance(value, dict)]


def _remote_code(facts: TargetFacts, evidence: dict[str, Any], trusted: bool) -> list[Check]:
    """Code is named, never run: all facts come from JSON. An exported draft carries no auto_map."""
    of_tokenizer = evidence.get("tokenizer_auto_map") or {}  # a list of its classes, until transformers 4.23
    named = {
        **(facts.auto_map or {}),
        **(of_tokenizer if isinstance(of_tokenizer, dict) else {"AutoTokenizer": of_tokenizer}),
    }
    if not named:
        return []
    classes = [part for value in named.values() for part in (value if isinstance(value, list) else [value])]
    files = sorted({f"{name.partition('.')[0]}.py" for name in classes if isinstance(name, str) and "--" not in name})
    absent = sorted(set(files) - set(evidence.get("python_files") or ()))
    hint = "set target.trust_remote_code=true after reading it, unless transformers and the engine know the model"
    if absent:
        return [Check("remote code", "warn", f"auto_map names {', '.join(absent)}, which the folder lacks", hint)]
    brought = ", ".join(files) or "code of another repository"
    detail = f"the folder brings {brought} for {', '.join(sorted(named))}; the probe ran nothing of it"
    return [Check("remote code", "ok" if trusted else "warn", detail, hint)]


def _other_files(evidence: dict[str, Any]) -> list[Check]:
    damaged = [problem for problem in evidence["problems"] if _of_other_file(problem)]
    if not damaged:
        return []
    detail = "; ".join(f"{problem['file']} {problem['detail']}" for problem in damaged)
    return [Check("other files", "fail", detail, "download the named files again")]


def _of_other_file(problem: dict[str, str]) -> bool:
    """A damaged JSON file, which only where an index and its files disagree concerns the weights."""
    return problem["file"].endswith(".json") and problem["kind"] != "lost_tensors"
