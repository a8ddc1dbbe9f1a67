"""The DFlash drafter (arXiv 2602.06036): a few decoder layers that fill a block of masks in one pass.

It reads the target's hidden states at a few layers: context = hidden_norm(fc(features)). Each draft layer projects the
same context with its own key and value matrices, so one matmul serves all layers. The tokens of the block then attend
to [context; block]. Embedding and LM head are the target's unless the drafter has others. `heads` has the heads that
correct one draft by those before it. Parameter names are as in the published checkpoints.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.dflash.config import GRU, HIDDEN_AND_TOKEN, MARKOV_HEADS, ConvConfig, DFlashConfig
from algorithms.dflash.heads import BlockLogits, CandidateSelector, ConfidenceHead, GroupedConv, GRUHead, MarkovHead
from algorithms.drafting.feature_head import DrafterModel
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import INIT_STD, DecoderLayer, reset_layers, run_layers
from algorithms.models.fusion import project, queries_only
from algorithms.models.layers import Mixer, RMSNorm
from algorithms.models.scaled_linear import joined


class StackedKV(NamedTuple):
    """Key and value weights of all draft layers in one matrix."""

    weight: Tensor | kernels.ScaledWeight  # [num_layers * 2 * H_kv * D, hidden], keys then values of each layer
    bias: Tensor | None
    k_norm: Tensor | None  # [num_layers, D]


class ConvLayer(DecoderLayer):
    def __init__(self, decoder: DecoderConfig, conv: ConvConfig) -> None:
        super().__init__(decoder)
        self.attention_conv = GroupedConv(conv, decoder.hidden_size)
        self.mlp_conv = GroupedConv(conv, decoder.hidden_size)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        return self._after(layer, self.input_layernorm(x), x, mixer)

    def fused(self, layer: int, start: kernels.Normed, mixer: Mixer, following: RMSNorm) -> kernels.Normed:
        x = self._after(layer, start.normed, start.residual, mixer)
        return kernels.Normed(following(x), x)

    def _after(self, layer: int, normed: Tensor, x: Tensor, mixer: Mixer) -> Tensor:
        convolve, projection = GroupedConv.convolve, self.self_attn.o_proj
        before, after = self.attention_conv.coefficients(normed)
        mixed = self.self_attn(layer, convolve(normed, before), mixer)
        x = x + convolve(project(projection, mixed, self.post_attention_layernorm.impl), after)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.coefficients(normed)
        return x + convolve(self.mlp(convolve(normed, before)), after)


class DFlashDrafter(DrafterModel):
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config.decoder, config.owns_embedding, config.owns_head, config.num_known)
        self.config, self.layer_ids = config, config.target_layer_ids
        hidden, eps = config.decoder.hidden_size, config.decoder.rms_norm_eps
        decoder, conv = config.decoder, config.conv
        layers = [ConvLayer(decoder, conv) if conv else DecoderLayer(decoder) for _ in range(decoder.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if config.mask_token_id == decoder.vocab_size else None
        vocab_size, head = config.decoder.vocab_size, config.head
        self.markov_head = self.gru_head = self.candidate_selector = None
        if head is not None and head.kind in MARKOV_HEADS:
            self.markov_head = MarkovHead(head, vocab_size, config.num_known, hidden)
        elif head is not None and head.kind == GRU:
            self.gru_head = GRUHead(head, config.num_known, hidden)
        elif head is not None:
            self.candidate_selector = CandidateSelector(head, vocab_size, config.num_known, hidden)
        self.confidence_head = None
        if config.confidence is not None:
            rank = head.rank if head is not None and config.confidence == HIDDEN_AND_TOKEN else 0
            self.confidence_head = ConfidenceHead(hidden, rank)

    def reset_parameters(self) -> None:
        reset_layers(self.layers)
        nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5)
        if self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=INIT_STD)
        for module in self.modules():
            if isinstance(module, (MarkovHead, GRUHead, CandidateSelector, GroupedConv)):
                module.reset_parameters()

    def embed_block(self, last_tokens: Tensor, size: int) -> Tensor:
        """Inputs `[..., size, hidden]` of blocks: the embedding of each of `last_tokens [...]` int64, then masks."""
        if self.mask_embedding is None:
            tokens = last_tokens.new_full((*last_tokens.shape, size), self.config.mask_token_id)
            tokens[..., 0] = last_tokens
            return self.embed(tokens) * self.config.embed_scale
        first = self.embed(last_tokens)[..., None, :]
        masks = self.mask_embedding.to(first.dtype).expand(*last_tokens.shape, size - 1, -1)
        return torch.cat([first, masks], dim=-2) * self.config.embed_scale

    def context(self, features: list[Tensor], hidden: Tensor) -> Tensor:
        """Context `[..., T, hidden]` from `features [..., T, hidden]` of each layer id, and final hidden states."""
        ids, last = self.config.target_layer_ids, self.config.num_target_layers - 1
        if len(features) != len(ids):
            raise ValueError(f"DFlash reads {len(ids)} target layers, got features of {len(features)}")
        if self.config.reads_final_norm:
            features = [hidden if index == last else feature for index, feature in zip(ids, features, strict=True)]
        return self.hidden_norm(project(self.fc, torch.cat(features, dim=-1), self.impl))

    def stack_kv(self) -> StackedKV:
        """The weights that `context_kv` multiplies with; for inference, once after loading."""
        attentions = [cast(DecoderLayer, layer).self_attn for layer in self.layers]
        weight, bias = joined([projection for a in attentions for projection in (a.k_proj, a.v_proj)])
        norms: list[Tensor] = [a.k_norm.weight for a in attentions if a.k_norm is not None]
        return StackedKV(weight, bias, torch.stack(norms) if norms else None)

    def context_kv(self, context: Tensor, stacked: StackedKV | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of every draft layer, each `[..., T, num_layers, H_kv, D]`, before key norm and RoPE."""
        decoder = self.config.decoder
        weight, bias, _ = stacked or self.stack_kv()
        if self.impl is None and isinstance(weight, Tensor):
            flat = F.linear(context, weight, bias)
        else:
            flat = kernels.linear(context.contiguous(), weight, bias, impl=self.impl or "reference")
        sizes = {"l": decoder.num_layers, "two": 2, "d": decoder.head_dim}
        keys, values = rearrange(flat, "... (l two h d) -> two ... l h d", **sizes)
        return keys, values

    def forward(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Block embeddings `[..., T, hidden]` through the draft layers and the final norm; same shape."""
        return run_layers(cast(Sequence[DecoderLayer], self.layers), self.norm, hidden, mixer)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., hidden]` to `[..., V_d]`, before any head; before `cap` where a selector chooses by them."""
        logits = self.head(hidden)
        return logits if self.candidate_selector is not None else self.cap(logits)

    def along_paths(self, logits: Tensor, hidden: Tensor, impl: str) -> BlockLogits | None:
        """Logits given earlier drafts, of a drafter with a head; `logits` and `hidden` as of `BlockLogits`."""
        head = self.markov_head or self.gru_head
        return None if head is None else BlockLogits(head, self.confidence_head, self.table, logits, hidden, impl)

    def confidence(self, hidden: Tensor) -> Tensor | None:
        """[...] float32: how likely a draft is accepted from `hidden [..., hidden]` alone; None without such a head."""
        return None if self.confidence_head is None else self.confidence_head(hidden, None)

    def cap(self, logits: Tensor) -> Tensor:
        """cap * tanh(scale * logits / cap), if there is a cap."""
        cap, scale = self.config.logit_soft_cap, self.config.logit_scale
        logits = logits if scale == 1 else scale * logits
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def lattice(
        self, logits: Tensor, hidden: Tensor, last_tokens: Tensor, impl: str
    ) -> tuple[kernels.Lattice, Tensor] | None:
        """The candidates of each draft and the scores of their pairs, of a drafter with a selector, from `logits
        [B, D, V_d]` and `hidden [B, D, hidden]` of the drafts."""
        selector = self.candidate_selector
        if selector is None:
            return None
        tokens = kernels.draft_topk(logits.flatten(0, 1), selector.num_candidates, impl=impl).tokens
        tokens = tokens.view(*logits.shape[:2], -1)
        values = self.cap(logits.gather(-1, tokens).float())
        lattice = kernels.Lattice(tokens, values, last_tokens, vocabulary=self.vocabulary)
        return lattice, kernels.pair_scores(lattice, selector.factors(hidden), impl=impl)

    def warmup(self, rows: int) -> None:
        hidden = self.norm.weight.new_zeros(1, rows, self.config.decoder.hidden_size)
        self.context_kv(self.context([hidden] * len(self.config.target_layer_ids), hidden))
        self(hidden, queries_only)
