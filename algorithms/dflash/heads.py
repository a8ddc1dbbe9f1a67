"""Heads that correct a block's drafts one after another. Steps of recurrent heads are `lattice` kernels.

Slot k of a block has logits l_k and a final hidden state h_k; t is the token before the one that it drafts, and
e = w1[t]. Markov heads (DSpark, github.com/deepseek-ai/DeepSpec) add a matrix of low rank to the logits:

    vanilla   l_k + w2 e
    gated     l_k + w2 (sigmoid(gate [h_k; e]) * e)
    rnn       g, c, o = joint [s_k; e; h_k];  l_k + w2 tanh(o);  s_{k+1} = sigmoid(g) s_k + (1 - sigmoid(g)) tanh(c)

with s = 0 at slot 0. Domino (github.com/sgl-project/SpecForge) runs a GRU over the embeddings E of the last committed
token and the drafts so far, from 0:

    gru       s_k = GRU(E[t], s_{k-1});  l_k + w2 silu(w1 [h_k; s_k])

DFlash 2 (github.com/z-lab/dflash) chooses among the candidates c of largest l_k:

    selector  l_k[c] + (a[t] * P h_k) . b[c],  scores of pairs that the `lattice` kernels take

A confidence head gives sigmoid(w [h_k; e] + b), which estimates how likely the draft of slot k is
accepted if those before it are.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.dflash.config import GATED, RNN, ConvConfig, HeadConfig
from algorithms.models.decoder import INIT_STD, embedding


class Slot(NamedTuple):
    """What the backbone gives for the slot of one draft of each block, repeated for its T parents."""

    logits: Tensor  # [B, V_d]
    hidden: Tensor  # [B, T, hidden]
    level: int  # drafts before this one
    table: Tensor  # [V, hidden]: embeddings of the target's ids
    impl: str


class MarkovHead(nn.Module):
    """`w1` is indexed by ids of the target, `w2` gives logits over the drafter's."""

    def __init__(self, config: HeadConfig, vocab_size: int, num_known: int, hidden_size: int) -> None:
        super().__init__()
        rank = config.rank
        self.markov_w1 = embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_known, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if config.kind == GATED else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if config.kind == RNN else None
        self.state_size = rank if config.kind == RNN else 0

    def bias(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What a head without a state adds, `[..., V_d]`, after `tokens [...]`, to slots of `hidden [..., hidden]`."""
        e = self.markov_w1(tokens)
        if self.gate_proj is not None:
            e = torch.sigmoid(self.gate_proj(torch.cat([hidden, e], -1))) * e
        return self.markov_w2(e)

    def start(self, tokens: Tensor, before: Tensor, impl: str) -> Tensor:
        """The state `[B, 1, S]` before the first draft. A recurrent head has run over slots that draft nothing, whose
        hidden states are `before [B, F, hidden]`, each after `tokens [B, 1]`."""
        state = before.new_zeros(*tokens.shape, self.state_size)
        for slot in range(before.shape[1] if self.state_size else 0):
            state = self._step(tokens, before[:, slot, None], state, impl).state.view_as(state)
        return state

    def _step(self, tokens: Tensor, hidden: Tensor, state: Tensor, impl: str) -> kernels.RnnStep:
        joint, width = self.joint_proj, 2 * self.state_size
        assert joint is not None
        of_hidden = F.linear(hidden, joint.weight[:, width:], joint.bias).flatten(0, 1)
        flat, weight = tokens.reshape(-1).contiguous(), joint.weight[:, :width]
        return kernels.rnn_step(flat, state.flatten(0, 1), self.markov_w1.weight, weight, of_hidden, impl=impl)

    def forward(self, slot: Slot, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[B, T, V_d]` of the drafts after `tokens [B, T]`, and the next state, from `state [B, T, S]`."""
        logits = slot.logits[:, None]
        if self.joint_proj is None:
            return logits + self.bias(tokens, slot.hidden), state
        step = self._step(tokens, slot.hidden, state, slot.impl)
        return logits + self.markov_w2(step.output).view(*tokens.shape, -1), step.state.view_as(state)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.markov_w1.weight, std=INIT_STD)
        nn.init.zeros_(self.markov_w2.weight)


class PrefixGRU(nn.Module):
    """One layer without biases, with the parameter names of `nn.GRU`."""

    def __init__(self, hidden_size: int, state_size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * state_size, hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * state_size, state_size))

    def forward(self, tokens: Tensor, state: Tensor, table: Tensor, impl: str) -> Tensor:
        """The state `[B, T, S]` after `tokens [B, T]` int64, embedded by `table [V, hidden]`."""
        flat, weights = tokens.reshape(-1).contiguous(), (self.weight_ih_l0, self.weight_hh_l0)
        return kernels.gru_step(flat, state.flatten(0, 1), table, *weights, impl=impl).view_as(state)


class GRUHead(nn.Module):
    def __init__(self, config: HeadConfig, num_known: int, hidden_size: int) -> None:
        super().__init__()
        self.state_size, self.num_plain = config.state_size, config.num_plain
        self.prefix_gru = PrefixGRU(hidden_size, config.state_size)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + config.state_size, config.rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.rank, num_known, bias=False),
        )

    def start(self, tokens: Tensor, before: Tensor, impl: str) -> Tensor:
        return before.new_zeros(*tokens.shape, self.state_size)

    def forward(self, slot: Slot, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """As `MarkovHead.forward`."""
        state, logits = self.prefix_gru(tokens, state, slot.table, slot.impl), slot.logits[:, None]
        if slot.level < self.num_plain:
            return logits.expand(-1, tokens.shape[1], -1), state
        return logits + self.embed_proj(torch.cat([slot.hidden, state], -1)), state

    def reset_parameters(self) -> None:
        for weight in self.prefix_gru.parameters():
            nn.init.uniform_(weight, -(self.state_size**-0.5), self.state_size**-0.5)
        first, last = self.embed_proj.parameters()
        nn.init.normal_(first, std=first.shape[1] ** -0.5)
        nn.init.zeros_(last)


class CandidateSelector(nn.Module):
    """DFlash 2's head: codebooks of tokens as predecessors (a) and as successors (b)."""

    def __init__(self, config: HeadConfig, vocab_size: int, num_known: int, hidden_size: int) -> None:
        super().__init__()
        self.num_candidates = config.num_candidates
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(num_known, config.rank))

    def factors(self, hidden: Tensor) -> kernels.PairFactors:
        """Factors of pair scores from `hidden [B, D, hidden]`."""
        gates = self.hidden_projection(hidden)
        return kernels.PairFactors(self.predecessor_codebook, self.successor_codebook, gates)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.hidden_projection.weight, std=self.hidden_projection.in_features**-0.5)
        nn.init.normal_(self.predecessor_codebook, std=INIT_STD)
        nn.init.zeros_(self.successor_codebook)


class GroupedConv(nn.Module):
    """DFlash 2's convolutions around a sublayer S, over the rows i of one block and in each channel alone:

        u_i = sum over t of (base[0, t] + d_i[0, t]) * x_{i-t};  v = S(u);  w_i = the same with [1, t] and v

    d = projection(x) has one coefficient per group of channels, and there is nothing before row 0."""

    def __init__(self, config: ConvConfig, hidden_size: int) -> None:
        super().__init__()
        groups = hidden_size // config.group
        self._shape, self._group = (2, config.taps, groups), config.group
        self.base_kernel = nn.Parameter(torch.zeros(2, config.taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.taps * groups, bias=False)

    def reset_parameters(self) -> None:
        """The convolution that changes nothing."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients `[..., T, taps, hidden]` before and after the sublayer, from its input `[..., T, hidden]`."""
        dynamic = self.kernel_projection(x).unflatten(-1, self._shape).repeat_interleave(self._group, -1)
        before, after = (self.base_kernel + dynamic).unbind(-3)
        return before, after

    @staticmethod
    def convolve(x: Tensor, coefficients: Tensor) -> Tensor:
        """Over the rows of `x [..., T, hidden]`."""
        out = coefficients[..., 0, :] * x
        for tap in range(1, coefficients.shape[-2]):
            out = out + coefficients[..., tap, :] * F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
        return out


class ConfidenceHead(nn.Module):
    """Estimates acceptance of a draft from its slot's hidden state, and from `e` with `rank` above 0."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.reads_token = rank > 0
        self.proj = nn.Linear(hidden_size + rank, 1)

    def logits(self, hidden: Tensor, e: Tensor | None) -> Tensor:
        """`hidden [..., hidden]` and `e [..., rank]` to logits `[...]` float32."""
        read = hidden if e is None else torch.cat([hidden, e], -1)
        return self.proj(read).squeeze(-1).float()

    def forward(self, hidden: Tensor, e: Tensor | None) -> Tensor:
        """Probabilities `[...]` float32; arguments as of `logits`."""
        return torch.sigmoid(self.logits(hidden, e))


class BlockLogits:
    """Logits of a block's drafts along paths, level by level."""

    def __init__(
        self,
        head: MarkovHead | GRUHead,
        confidence: ConfidenceHead | None,
        table: Tensor,
        logits: Tensor,
        hidden: Tensor,
        impl: str,
    ) -> None:
        """`table [V, hidden]` embeds ids of the target; `logits [B, D, V_d]` of the drafts; `hidden [B, F + D, hidden]`
        of slots that draft nothing, and theirs."""
        self._head, self._confidence, self._table, self._logits, self._impl = head, confidence, table, logits, impl
        self._before, self._hidden = hidden.split([hidden.shape[1] - logits.shape[1], logits.shape[1]], 1)

    def after(self, level: int, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits `[B, T, V_d]` of the drafts of `level` after `tokens [B, T]` int64, ids of the target, whose parents
        are in columns `parents [B, T]` of the level before; None: T is 1. Levels come in order."""
        if level == 0:
            self._state = self._head.start(tokens, self._before, self._impl)
        elif parents is not None:
            self._state = self._state.gather(1, parents[..., None].expand(-1, -1, self._state.shape[-1]))
        self._tokens = tokens
        hidden = self._hidden[:, level, None].expand(-1, tokens.shape[1], -1)
        self._slot = Slot(self._logits[:, level], hidden, level, self._table, self._impl)
        logits, self._state = self._head(self._slot, tokens, self._state)
        return logits

    def confidence(self) -> Tensor | None:
        """[B, T] float32: how likely a draft after `after`'s last tokens is accepted; None without such a head."""
        head, e = self._head, None
        if self._confidence is None:
            return None
        if isinstance(head, MarkovHead) and self._confidence.reads_token:
            e = head.markov_w1(self._tokens)
        return self._confidence(self._slot.hidden, e)
