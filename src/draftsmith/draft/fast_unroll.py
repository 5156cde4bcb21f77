"""The unroll of `unroll.py` with its backward pass written out: same mathematics, less work, a third of the memory.

What an automatic backward pass would not do:
- The embedding half of query, key and value is the same at every step but for a shift by one token. It is projected
  once, and its gradients are added up before they are multiplied once.
- Weight gradients of all steps add up in float32 inside the matrix product.
- What is cheap to compute again is not kept: norms, the MLP's activation, the states fed back after a norm.
- Gradients take the memory of what they are gradients of.
- A norm whose input is frozen needs no gradient of its input: with y = x̂ ⊙ w and G = doutᵀ x̂, the projection W of y
  has the gradient G ⊙ w, and the norm's weight has Σ_out G ⊙ W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, pad, silu

from draftsmith.draft.fast_attention import (
    Documents,
    causal_attention,
    causal_attention_backward,
    merge_own,
    merge_own_backward,
)
from draftsmith.draft.fused import accumulate, fused, wide
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


@dataclass
class Step:
    """What the backward pass needs of one step."""

    attended: torch.Tensor  # [S, heads, d]
    lse: torch.Tensor  # [heads, S]
    state: torch.Tensor  # [S, H] before the MLP
    gate: torch.Tensor  # [S, I]
    up: torch.Tensor
    out: torch.Tensor  # [S, H] before the final norm


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
    """One pass forward and back, with what is kept between them."""

    def __init__(self, inputs: UnrollInputs, weights: Weights) -> None:
        config, dtype = inputs.draft.config, inputs.aux.dtype
        self.inputs, self.config, self.weights = inputs, config, weights
        self.eps, self.head_dim, self.kv_heads = config.rms_norm_eps, config.head_dim, config.num_key_value_heads
        projections = (weights.query, weights.key, weights.value)
        self.w_embed, self.w_hidden = (
            torch.cat([w[:, half].to(dtype) for w in projections])
            for half in (slice(config.hidden_size), slice(config.hidden_size, None))
        )  # [heads·d + 2·kv_heads·d, H] each
        self.w_attended, self.w_gate, self.w_up, self.w_down = (
            w.to(dtype) for w in (weights.attended, weights.gate, weights.up, weights.down)
        )
        positions = torch.arange(inputs.documents.longest + inputs.steps, device=inputs.aux.device)
        half = self.head_dim // 2
        self.cos, self.sin = (table[:, :half] for table in inputs.draft.rotation(positions, wide(inputs.aux).dtype))
        self.saved: list[Step] = []

    def forward(self, keep: bool) -> torch.Tensor:
        config, steps, slots = self.config, self.inputs.steps, len(self.inputs.input_ids)
        self.first = hidden = self._fuse() @ self.weights.fc.to(self.inputs.aux.dtype).t()
        embedded = rms_norm(self._embeds(), self.weights.embed_norm, self.eps) @ self.w_embed.t()
        self.qkv = hidden.new_empty(steps, slots, len(self.w_hidden))
        states = hidden.new_empty(steps, slots + steps, config.hidden_size)
        for k in range(steps):
            after, before = states[k, 1 + k : 1 + k + slots], (states[k, : 1 + k], states[k, 1 + k + slots :])
            for rows in before:
                rows.zero_()
            normed = rms_norm(hidden, self.weights.hidden_norm, self.eps)
            projected = torch.addmm(embedded[1 + k : 1 + k + slots], normed, self.w_hidden.t())
            rotate_into(self._heads(self.qkv[k]), self._heads(projected), *self._rotation(k), self.kv_heads)
            attended, lse = self._attend(k)
            residual = normed if config.norm_before_residual else hidden
            state = torch.addmm(residual, attended.flatten(1), self.w_attended.t())
            mlp_input = rms_norm(state, self.weights.mlp_norm, self.eps)
            gate, up = mlp_input @ self.w_gate.t(), mlp_input @ self.w_up.t()
            out = torch.addmm(state, swiglu(gate, up), self.w_down.t())
            normed_out = rms_norm(out, self.weights.norm, self.eps)
            after.copy_(normed_out)
            hidden = normed_out if config.norm_output else out
            if keep:
                self.saved.append(Step(attended, lse, state, gate, up, out))
        return states

    def backward(self, dstates: torch.Tensor) -> Weights:
        weights, config, eps = self.weights, self.config, self.eps
        steps, slots = self.inputs.steps, len(self.inputs.input_ids)
        grads = _Gradients()
        self.dkv = self.qkv.new_zeros(steps, slots, 2, self.kv_heads, self.head_dim)
        dembedded = self.qkv.new_zeros(slots + steps, len(self.w_embed))
        dfed: torch.Tensor | None = None  # gradient of what the next step read
        for k in reversed(range(steps)):
            step = self.saved.pop()
            dnormed = dstates[k, 1 + k : 1 + k + slots]
            through, around = (dfed, None) if config.norm_output else (None, dfed)
            dout, dnorm = rms_norm_backward(step.out, weights.norm, dnormed, eps, through, around)
            grads.add("norm", dnorm)
            dstate = self._mlp_backward(grads, step, dout)
            hidden = self._hidden(k)
            normed = rms_norm(hidden, weights.hidden_norm, eps)
            dqkv = self._attention_backward(grads, k, step, dstate)
            dembedded[1 + k : 1 + k + slots] += dqkv
            grads.add_product("w_hidden", dqkv, normed)
            through, around = (dstate, None) if config.norm_before_residual else (None, dstate)
            dfed, dnorm = rms_norm_backward(hidden, weights.hidden_norm, dqkv @ self.w_hidden, eps, through, around)
            grads.add("hidden_norm", dnorm)
        assert dfed is not None
        return self._assemble(grads, dfed, dembedded)

    def _mlp_backward(self, grads: _Gradients, step: Step, dout: torch.Tensor) -> torch.Tensor:
        """Gradient of the state before the MLP, from that of what is after it."""
        active = dout @ self.w_down
        swiglu_backward_(step.gate, step.up, active)
        grads.add_product("down", dout, active)
        del active
        mlp_input = rms_norm(step.state, self.weights.mlp_norm, self.eps)
        grads.add_product("gate", step.gate, mlp_input)
        grads.add_product("up", step.up, mlp_input)
        dinput = torch.addmm(step.gate @ self.w_gate, step.up, self.w_up)
        dstate, dnorm = rms_norm_backward(step.state, self.weights.mlp_norm, dinput, self.eps, None, dout)
        grads.add("mlp_norm", dnorm)
        return dstate

    def _attention_backward(self, grads: _Gradients, k: int, step: Step, dstate: torch.Tensor) -> torch.Tensor:
        """Gradient of what query, key and value are at step k before their rotation: [S, heads·d + 2·kv_heads·d]"""
        grads.add_product("attended", dstate, step.attended.flatten(1))
        dattended = (dstate @ self.w_attended).view_as(step.attended)
        (query, _, _), (_, key, value) = self._split(self.qkv[k]), self._split(self.qkv[0])
        dquery, dkey, dvalue = causal_attention_backward(
            dattended, query, key, value, step.attended, step.lse, self.inputs.documents
        )
        self.dkv[0, :, 0] += dkey
        self.dkv[0, :, 1] += dvalue
        _, keys, values = self._split(self.qkv[1 : k + 1])
        dkeys, dvalues = self.dkv[1 : k + 1, :, 0], self.dkv[1 : k + 1, :, 1]
        merge_own_backward(dattended, query, keys, values, step.attended, step.lse, dquery, dkeys, dvalues)
        dqkv = torch.cat([dquery, self.dkv[k].flatten(1, 2)], dim=1)
        cos, sin = self._rotation(k)
        rotated = torch.empty_like(dqkv)
        rotate_into(rotated, dqkv, cos, -sin, self.kv_heads)
        return rotated.flatten(1)

    def _assemble(self, grads: _Gradients, dfirst: torch.Tensor, dembedded: torch.Tensor) -> Weights:
        """The gradients in the shapes of the weights, those of the frozen inputs' projections among them."""
        weights = self.weights
        w_embed = torch.cat([w[:, : self.config.hidden_size] for w in (weights.query, weights.key, weights.value)])
        dw_embed, dembed_norm = _behind_norm(
            dembedded, rms_norm(self._embeds(), None, self.eps), w_embed, weights.embed_norm
        )
        dqkv = torch.cat([dw_embed, grads.total["w_hidden"]], dim=1)
        dquery, dkey, dvalue = dqkv.split([len(weights.query), len(weights.key), len(weights.value)])
        if weights.fuse_norm is None:
            dfc, dfuse_norm = accumulate(None, dfirst, self._fuse()), None
        else:
            dfc, dfuse_norm = _behind_norm(dfirst, self._fuse(weighted=False), weights.fc, weights.fuse_norm)
        total = grads.total
        gradients = Weights(
            dfuse_norm, dfc, dembed_norm, total["hidden_norm"], dquery, dkey, dvalue, total["attended"],
            total["mlp_norm"], total["gate"], total["up"], total["down"], total["norm"],
        )  # fmt: skip
        return Weights._make(
            None if g is None or w is None else g.to(w.dtype) for g, w in zip(gradients, weights, strict=True)
        )

    def _attend(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        (query, _, _), (_, key, value) = self._split(self.qkv[k]), self._split(self.qkv[0])
        attended, lse = causal_attention(query, key, value, self.inputs.documents)
        _, keys, values = self._split(self.qkv[1 : k + 1])
        merge_own(query, keys, values, attended, lse)
        return attended, lse

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
        out = self.saved[k - 1].out
        return rms_norm(out, self.weights.norm, self.eps) if self.config.norm_output else out

    def _rotation(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        position = self.inputs.position + k
        return self.cos[position], self.sin[position]

    def _heads(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.unflatten(-1, (-1, self.head_dim))

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[…, heads·d + 2·kv_heads·d] → query, key, value, each […, its heads, d]"""
        heads = self._heads(qkv)
        return heads.split([heads.shape[-2] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=-2)


class _Gradients:
    """Sums over the steps, by name."""

    def __init__(self) -> None:
        self.total: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.total[name] = self.total[name] + gradient if name in self.total else gradient

    def add_product(self, name: str, doutput: torch.Tensor, inputs: torch.Tensor) -> None:
        self.total[name] = accumulate(self.total.get(name), doutput, inputs)


def _behind_norm(
    doutput: torch.Tensor, unit: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of W and w in out = W (x̂ ⊙ w), where x̂ = `unit` is frozen."""
    product = accumulate(None, doutput, unit)
    return product * norm, (product * weight).sum(0)


@fused
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) ⊙ weight over the last dimension, computed in float32 or wider."""
    x32 = wide(x)
    unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (unit if weight is None else unit * weight).to(x.dtype)


@fused
def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    dnormed: torch.Tensor,
    eps: float,
    through: torch.Tensor | None,
    around: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a norm's input and weight. `through` is added to what comes back to its output, `around` to what
    leaves its input: [S, H] → [S, H], [H]"""
    dy, x32 = wide(dnormed), wide(x)
    if through is not None:
        dy = dy + through
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    unit, dunit = x32 * scale, dy * weight
    dx = scale * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    if around is not None:
        dx = dx + around
    return dx.to(x.dtype), (dy * unit).sum(0)


@fused
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (silu(wide(gate)) * up).to(gate.dtype)


@fused
def swiglu_backward_(gate: torch.Tensor, up: torch.Tensor, dactive: torch.Tensor) -> None:
    """Leaves the gradients in `gate` and `up`, and the activation itself in `dactive`."""
    gate32, up32, d = wide(gate), wide(up), wide(dactive)
    share = gate32.sigmoid()
    active = gate32 * share
    dgate = d * up32 * share * (1 + gate32 * (1 - share))
    dup = d * active
    dactive.copy_(active * up32)
    gate.copy_(dgate)
    up.copy_(dup)


@fused
def rotate_into(
    target: torch.Tensor, source: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unrotated: int
) -> None:
    """RoPE in Llama's half-split layout on all but the last `unrotated` heads: [S, heads, d] → [S, heads, d].

    cos, sin: [S, d/2]. A negative sine rotates back.
    """
    rotated = source.shape[1] - unrotated
    first, second = wide(source[:, :rotated]).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    target[:, :rotated] = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(target.dtype)
    target[:, rotated:] = source[:, rotated:]
