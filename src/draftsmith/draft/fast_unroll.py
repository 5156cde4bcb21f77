"""The unroll of `unroll.py` with its backward pass written out: same mathematics, less work, a third of the memory.

What an automatic backward pass would not do:
- The embedding half of query, key and value is the same at every step but for a shift by one token. It is projected
  once, and its gradients are added up at the end and multiplied once.
- Gradients take the memory of what they are gradients of, step by step, so that at the end the weight gradient of all
  steps is one matrix product, over K·S rows. Where that cannot be, it adds up in float32 inside the matrix product.
- What is cheap to compute again is not kept: norms, the MLP's activation, the states fed back after a norm.
- A norm whose input is frozen needs no gradient of its input: with y = x̂ ⊙ w and G = doutᵀ x̂, the projection W of y
  has the gradient G ⊙ w, and the norm's weight has Σ_out G ⊙ W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, pad

from draftsmith.draft.fast_attention import Documents, attend, attend_backward
from draftsmith.draft.fast_layers import (
    Rotation,
    add_product,
    add_rms_norm,
    rms_norm,
    rms_norm_backward,
    rotate_back,
    rotate_sum,
    scale_columns_,
    sum_shifted,
    swiglu,
    swiglu_backward_,
    wide_dtype,
)
from draftsmith.draft.model import Draft


class Weights(NamedTuple):
    """What has gradients, in the order of `Unroll.apply`."""

    fuse_norm: torch.Tensor | None  # [A·Ht], of `input_norm`, or of all `fc_norm` one after the other
    fc: torch.Tensor  # [H, A·Ht]
    embed_norm: torch.Tensor  # [H]
    hidden_norm: torch.Tensor
    query: torch.Tensor  # [heads·d, 2H]
    key: torch.Tensor
    value: torch.Tensor
    attended: torch.Tensor  # [H, heads·d]
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def of(cls, draft: Draft) -> Weights:
        named: dict[str, torch.Tensor] = dict(draft.named_parameters())
        fuse_norms = [named[name] for name in named if name.startswith(("input_norm.", "fc_norm."))]
        return cls(
            fuse_norm=torch.cat(fuse_norms) if fuse_norms else None,
            fc=named["fc.weight"],
            embed_norm=named["layers.0.input_layernorm.weight"],
            hidden_norm=named["layers.0.hidden_norm.weight"],
            query=named["layers.0.self_attn.q_proj.weight"],
            key=named["layers.0.self_attn.k_proj.weight"],
            value=named["layers.0.self_attn.v_proj.weight"],
            attended=named["layers.0.self_attn.o_proj.weight"],
            mlp_norm=named["layers.0.post_attention_layernorm.weight"],
            gate=named["layers.0.mlp.gate_proj.weight"],
            up=named["layers.0.mlp.up_proj.weight"],
            down=named["layers.0.mlp.down_proj.weight"],
            norm=named["norm.weight"],
        )


@dataclass(frozen=True)
class UnrollInputs:
    """What the unroll needs beside its weights."""

    draft: Draft
    input_ids: torch.Tensor  # [S]
    aux: torch.Tensor  # [S, A, Ht], in the dtype to compute in
    position: torch.Tensor  # [S]
    documents: Documents
    steps: int


def fast_unroll(inputs: UnrollInputs) -> torch.Tensor:
    """What `lm_head` reads, by the position that teaches it: [K, S+K, H]; slot j of step k is in row j+1+k."""
    states: torch.Tensor = Unroll.apply(inputs, *Weights.of(inputs.draft))
    return states


class Unroll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: UnrollInputs, *weights: torch.Tensor | None) -> torch.Tensor:
        run = _Run(inputs, Weights._make(w if w is None else w.detach() for w in weights))
        keep = any(ctx.needs_input_grad)
        states = run.forward(keep)
        if keep:
            ctx.run = run
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dstates: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run: _Run = ctx.run
        del ctx.run
        return None, *run.backward(dstates)


class _Run:
    """One pass forward and back, with what is kept between them.

    Buffers of all steps, and what the backward pass of a step leaves in them:

        qkv       [K, S, heads·d + 2·kv_heads·d]   → gradient of that
        attended  [K, S, heads·d]
        state     [K, S, H] before the MLP         → what gate and up read
        gate_up   [K, S, 2I]                       → gradient of that
        out       [K, S, H] before the final norm  → gradient of `state`
    """

    def __init__(self, inputs: UnrollInputs, weights: Weights) -> None:
        config = inputs.draft.config
        self.inputs, self.config, self.weights = inputs, config, weights
        self.eps, self.head_dim, self.kv_heads = config.rms_norm_eps, config.head_dim, config.num_key_value_heads
        self.steps, self.slots = inputs.steps, len(inputs.input_ids)
        positions = torch.arange(inputs.documents.longest + inputs.steps, device=inputs.aux.device)
        tables = inputs.draft.rotation(positions, wide_dtype(inputs.aux))
        self.cos, self.sin = (table[:, : self.head_dim // 2].contiguous() for table in tables)

    def _cast_weights(self) -> None:
        """Have the layer's matrices in the dtype to compute in: while they are in use, since the loss comes between."""
        weights, dtype = self.weights, self.inputs.aux.dtype
        w_qkv = _stacked([weights.query, weights.key, weights.value], dtype)  # [heads·d + 2·kv_heads·d, 2H]
        self.w_embed, self.w_hidden = w_qkv.chunk(2, dim=1)
        self.w_gate_up = _stacked([weights.gate, weights.up], dtype)
        self.w_attended, self.w_down = weights.attended.to(dtype), weights.down.to(dtype)

    def _drop_weights(self) -> None:
        del self.w_embed, self.w_hidden, self.w_gate_up, self.w_attended, self.w_down

    def forward(self, keep: bool) -> torch.Tensor:
        self._cast_weights()
        weights, eps, steps, slots = self.weights, self.eps, self.steps, self.slots
        dtype, size = self.inputs.aux.dtype, self.config.hidden_size
        embedded = rms_norm(self._embeds(), weights.embed_norm, eps) @ self.w_embed.t()  # [S+K, …]
        self.first = hidden = self._fuse() @ weights.fc.to(dtype).t()
        kept, empty = steps if keep else 1, hidden.new_empty
        self.qkv = empty(steps, slots, len(self.w_hidden))
        self.attended = empty(kept, slots, self.w_attended.shape[1])
        heads = self.attended.shape[2] // self.head_dim
        self.lse = [self.cos.new_empty(heads, slots) for _ in range(kept)]  # apart, so that each is aligned
        self.state, self.out = empty(kept, slots, size), empty(kept, slots, size)
        self.gate_up = empty(kept, slots, len(self.w_gate_up))
        states = empty(steps, slots + steps, size)
        for k in range(steps):
            at = k if keep else 0
            normed = rms_norm(hidden, weights.hidden_norm, eps)
            projected, shifted, split = normed @ self.w_hidden.t(), embedded[1 + k : 1 + k + slots], self._heads
            rotate_sum(split(projected), split(shifted), split(self.qkv[k]), self._rotation(k), self.kv_heads)
            query, keys, values = self._attention_inputs(k)
            attend(query, keys, values, self.inputs.documents, out=split(self.attended[at]), lse=self.lse[at])
            residual = normed if self.config.norm_before_residual else hidden
            update = self.attended[at] @ self.w_attended.t()
            mlp_input = torch.empty_like(update)
            add_rms_norm(residual, update, weights.mlp_norm, eps, total=self.state[at], out=mlp_input)
            torch.mm(mlp_input, self.w_gate_up.t(), out=self.gate_up[at])
            update = swiglu(self.gate_up[at]) @ self.w_down.t()
            before, after, beyond = states[k].split([1 + k, slots, steps - 1 - k])
            before.zero_()
            beyond.zero_()
            add_rms_norm(self.state[at], update, weights.norm, eps, total=self.out[at], out=after)
            hidden = after if self.config.norm_output else self.out[at]
        self._drop_weights()
        return states

    def backward(self, dstates: torch.Tensor) -> Weights:
        self._cast_weights()
        size, grads = self.config.hidden_size, _Gradients()
        self.dkv = self.qkv.new_zeros(self.steps, self.slots, 2, self.kv_heads, self.head_dim)
        dfed: torch.Tensor | None = None  # gradient of what the next step read
        for k in reversed(range(self.steps)):
            self._mlp_backward(grads, k, dstates[k, 1 + k : 1 + k + self.slots], dfed)
            dfed = self._attention_backward(grads, k)
        del self.dkv
        dembedded = sum_shifted(self.qkv)
        del self.qkv
        grads.add_product("attended", self.out.view(-1, size), self.attended.flatten(0, 1))
        del self.out, self.attended
        grads.add_product("gate_up", self.gate_up.flatten(0, 1), self.state.view(-1, size))
        del self.gate_up, self.state
        assert dfed is not None
        return self._assemble(grads, dfed, dembedded)

    def _mlp_backward(self, grads: _Gradients, k: int, dnormed: torch.Tensor, dfed: torch.Tensor | None) -> None:
        """From the gradient of what `lm_head` reads and of what is fed back, to that of the state before the MLP."""
        weights, eps, norm_output = self.weights, self.eps, self.config.norm_output
        gate_up, state, dout = self.gate_up[k], self.state[k], self.out[k]
        through, around = (dfed, None) if norm_output else (None, dfed)
        grads.add("norm", rms_norm_backward(dout, weights.norm, dnormed, eps, through=through, around=around, out=dout))
        active = dout @ self.w_down
        swiglu_backward_(gate_up, active)
        grads.add_product("down", dout, active)
        del active
        dinput = gate_up @ self.w_gate_up
        dnorm = rms_norm_backward(state, weights.mlp_norm, dinput, eps, around=dout, out=self.out[k])
        grads.add("mlp_norm", dnorm)
        rms_norm(state, weights.mlp_norm, eps, out=state)

    def _attention_backward(self, grads: _Gradients, k: int) -> torch.Tensor:
        """From the gradient of the state before the MLP to that of what step k read beside the embedding."""
        dstate, heads = self.out[k], self._heads
        dattended = heads(dstate @ self.w_attended)
        query, keys, values = self._attention_inputs(k)
        dkeys, dvalues = self.dkv[: k + 1].unbind(2)
        dquery = attend_backward(
            dattended, query, keys, values, heads(self.attended[k]), self.lse[k], self.inputs.documents,
            dkeys=dkeys, dvalues=dvalues,
        )  # fmt: skip
        dqkv, dkv = self.qkv[k], self.dkv[k].flatten(1, 2)
        rotate_back(dquery, dkv, self._rotation(k), self.kv_heads, out=heads(dqkv))
        del dattended, dquery
        hidden = self._hidden(k)
        grads.add_product("w_hidden", dqkv, rms_norm(hidden, self.weights.hidden_norm, self.eps))
        dhidden = dqkv @ self.w_hidden
        through, around = (dstate, None) if self.config.norm_before_residual else (None, dstate)
        dnorm = rms_norm_backward(
            hidden, self.weights.hidden_norm, dhidden, self.eps, through=through, around=around, out=dhidden
        )
        grads.add("hidden_norm", dnorm)
        return dhidden

    def _assemble(self, grads: _Gradients, dfirst: torch.Tensor, dembedded: torch.Tensor) -> Weights:
        """The gradients in the shapes of the weights, those of the frozen inputs' projections among them."""
        weights, total = self.weights, grads.total
        embeds = rms_norm(self._embeds(), None, self.eps)
        dw_embed, dembed_norm = _behind_norm(dembedded, embeds, self.w_embed, weights.embed_norm)
        dqkv = torch.cat([dw_embed, total["w_hidden"]], dim=1)
        dquery, dkey, dvalue = dqkv.split([len(weights.query), len(weights.key), len(weights.value)])
        dgate, dup = total["gate_up"].chunk(2)
        if weights.fuse_norm is None:
            dfc, dfuse_norm = add_product(None, dfirst, self._fuse()), None
        else:
            dfc, dfuse_norm = _behind_norm(dfirst, self._fuse(weighted=False), weights.fc, weights.fuse_norm)
        gradients = Weights(
            fuse_norm=dfuse_norm,
            fc=dfc,
            embed_norm=dembed_norm,
            query=dquery,
            key=dkey,
            value=dvalue,
            gate=dgate,
            up=dup,
            **{name: total[name] for name in ("hidden_norm", "attended", "mlp_norm", "down", "norm")},
        )
        return Weights._make(
            None if g is None or w is None else g.to(w.dtype) for g, w in zip(gradients, weights, strict=True)
        )

    def _fuse(self, weighted: bool = True) -> torch.Tensor:
        """What `fc` reads: [S, A·Ht], before the norm's weight if not `weighted`."""
        weight, aux = self.weights.fuse_norm, self.inputs.aux
        if weight is None:
            return aux.flatten(1)
        grouped = aux if self.config.fc_norm else aux.flatten(1)
        return rms_norm(grouped, weight.view(grouped.shape[1:]) if weighted else None, self.eps).flatten(1)

    def _embeds(self) -> torch.Tensor:
        """Embeddings of the flat batch and K more, of token 0 as in `unroll.shift`: [S+K, H]"""
        ids = pad(self.inputs.input_ids, (0, self.inputs.steps))
        return embedding(ids, self.inputs.draft.embed_tokens.weight.detach()).to(self.inputs.aux.dtype)

    def _hidden(self, k: int) -> torch.Tensor:
        """What step k read beside the embedding."""
        if k == 0:
            return self.first
        return rms_norm(self.out[k - 1], self.weights.norm, self.eps) if self.config.norm_output else self.out[k - 1]

    def _rotation(self, k: int) -> Rotation:
        return Rotation(self.cos, self.sin, self.inputs.position, k)

    def _heads(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.unflatten(-1, (-1, self.head_dim))

    def _attention_inputs(self, k: int) -> tuple[torch.Tensor, ...]:
        """Query of step k [S, heads, d]; keys and values of steps 0 … k, each [k+1, S, kv_heads, d]."""
        heads = self._heads(self.qkv[: k + 1])
        queries, keys, values = heads.split([heads.shape[2] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=2)
        return queries[k], keys, values


class _Gradients:
    """Sums over the steps, by name."""

    def __init__(self) -> None:
        self.total: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.total[name] = self.total[name] + gradient if name in self.total else gradient

    def add_product(self, name: str, doutput: torch.Tensor, inputs: torch.Tensor) -> None:
        self.total[name] = add_product(self.total.get(name), doutput, inputs)


def _stacked(weights: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Weights of equal width one above the other, in `dtype`."""
    stacked = torch.empty(sum(len(w) for w in weights), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    for part, weight in zip(stacked.split([len(w) for w in weights]), weights, strict=True):
        part.copy_(weight)
    return stacked


def _behind_norm(
    doutput: torch.Tensor, unit: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of W and w in out = W (x̂ ⊙ w), where x̂ = `unit` is frozen."""
    product = add_product(None, doutput, unit)
    dnorm = scale_columns_(product, norm, weight)
    return product, dnorm
