"""What crosses from one stage to the next. No torch at import: tensors appear in annotations only.

Dimension legend, used throughout the package:
    S  tokens of a flat batch, several documents back to back     T  tokens of one sequence
    A  auxiliary layers (3)                                       N  decoder layers of the target
    Ht hidden size of the target      H  hidden size of the draft
    Vt vocabulary of the target       Vd vocabulary of the draft
    K  unroll steps of training, or draft tokens per round of serving
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target model from its configuration and weight index alone.

    A fact that the configuration does not have is None and its name is in `missing`: absent and false are
    different. Layer ids are canonical: id `a` is the residual stream after `a` decoder layers, before any norm.
    """

    path: str  # resolved local folder
    revision: str | None
    architecture: str | None
    model_type: str | None
    text_model_type: str | None
    num_hidden_layers: int | None
    hidden_size: int | None
    intermediate_size: int | None
    vocab_size: int | None  # rows of the embedding as configured, padding included
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    attention: str | None  # mha, gqa, mqa, mla
    hidden_act: str | None
    rms_norm_eps: float | None
    max_position_embeddings: int | None
    rope_theta: float | None
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool | None
    num_experts: int | None
    scoring_func: str | None
    topk_method: str | None
    llama_4_scaling: dict[str, Any] | None
    dtype: str | None
    quantization: dict[str, Any] | None
    auto_map: dict[str, Any] | None  # set when the folder brings code of its own
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weight_bytes: int | None
    weight_files: int | None
    aux_layer_ids: tuple[int, ...] | None
    # Names of the dense tensors that the draft and its teacher need, as they are in the weight files.
    embedding_key: str | None
    lm_head_key: str | None  # the embedding's, where the head is tied
    final_norm_key: str | None
    # What the model is, for fingerprints: SHA-256 of configuration, weight headers and sizes, tokenizer, template.
    config_sha256: str | None
    weights_sha256: str | None
    tokenizer_sha256: str | None
    template_sha256: str | None
    missing: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()  # facts that follow from others or from tensor shapes, and are not written down
    wrapper: str | None = None  # key of the configuration that holds the text model's, "text_config"
    partial_rotary_factor: float | None = None
    rope_local_theta: float | None = None  # of sliding-window layers, where they have their own
    layer_types: dict[str, int] | None = None  # kind of layer -> how many
    mla: dict[str, int | None] | None = None  # q_lora_rank, kv_lora_rank, qk_nope_, qk_rope_, v_head_dim
    pad_token_id: int | None = None
    tokenizer_size: int | None = None  # largest token id + 1
    embedding_rows: int | None = None
    lm_head_dtype: str | None = None  # as in the weight file's header: "BF16", "F8_E4M3" …

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, text: str) -> TargetFacts:
        """Raises ValueError, naming the first fact that is not there or of another type."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(": ".join([*map(str, first["loc"]), first["msg"]])) from None


@dataclass(frozen=True)
class Conversation:
    """Messages in the OpenAI form: dicts with `role`, `content` and whatever else the template uses."""

    id: str
    messages: list[dict[str, Any]]
    domain: str  # where it comes from, for figures by domain
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Sample:
    """One rendered sequence. `loss_mask[i]` is 1 where the target itself wrote token `i`."""

    id: str
    conversation_id: str
    domain: str
    split: str  # "train" or "validation"; all samples of a conversation share one
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class Features:
    """A sample with the target's states for it, as they are in the store."""

    id: str
    domain: str
    split: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    aux: torch.Tensor  # [T, A, Ht], ids ascending
    last: torch.Tensor  # [T, Ht], after the last layer, before the final norm


@dataclass(frozen=True)
class EncodedFeatures:
    """The same, with states that are encoded already as the store's codec does it: its parts by name."""

    id: str
    domain: str
    split: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    aux: dict[str, torch.Tensor]  # each [T, A, …]
    last: dict[str, torch.Tensor]  # each [T, …]


@dataclass(frozen=True)
class Batch:
    """Documents back to back in one flat sequence: no padding, and nothing attends across documents."""

    sample_ids: tuple[str, ...]
    input_ids: torch.Tensor  # [S] int64
    loss_mask: torch.Tensor  # [S] bool
    document: torch.Tensor  # [S] int64, ascending from 0
    position: torch.Tensor  # [S] int64, restarts at 0 in each document
    aux: torch.Tensor  # [S, A, Ht]
    last: torch.Tensor  # [S, Ht]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input_ids, self.loss_mask, self.document, self.position, self.aux, self.last

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(self.sample_ids, *map(move, self.tensors()))

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On the device, with the states in the given dtype."""
        return Batch(
            sample_ids=self.sample_ids,
            input_ids=self.input_ids.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            document=self.document.to(device, non_blocking=True),
            position=self.position.to(device, non_blocking=True),
            aux=self.aux.to(device, dtype, non_blocking=True),
            last=self.last.to(device, dtype, non_blocking=True),
        )


@dataclass(frozen=True)
class Acceptance:
    """How many draft tokens the target accepts, in the engines' own definition.

    `per_position[i]` is the share of rounds in which draft token `i` and all before it were accepted;
    `mean_acceptance_length` is 1 + accepted / rounds, the bonus token included
    (vLLM `v1/spec_decode/metrics.py`).
    """

    name: str
    num_speculative_tokens: int
    mean_acceptance_length: float
    per_position: tuple[float, ...]
    prompts: int
    tokens: int
    confidence_95: tuple[float, float]
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        return data | data.pop("extra")
