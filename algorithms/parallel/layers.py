"""A rank's slice of each kind of layer, taken in place; `sharding` says how they are split."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.models.config import DecoderConfig
from algorithms.models.experts.config import MXFP4_GROUP
from algorithms.models.experts.module import Experts, ExpertTensors, PackedExpertTensors
from algorithms.models.fusion import NormedProjection
from algorithms.models.latent.module import LatentAttention
from algorithms.models.layers import MLP, Attention, Mixing, SwiGLU
from algorithms.models.linear.config import LinearConfig
from algorithms.models.linear.module import LinearAttention
from algorithms.parallel.collectives import exchange_of, sum_in_order, sum_over_ranks
from specdec_kernels import Mxfp4, Normed, add_rms_norm, linear, linear_all_reduce_add_rms_norm
from specdec_kernels.all_reduce import as_sent


class RowParallelLinear(NormedProjection):
    """y = sum over ranks of x_r W_r^T, + bias: this rank holds the columns x_r. `slot` is the slot of its exchanges."""

    def __init__(self, whole: nn.Linear, columns: slice, slot: int) -> None:
        super().__init__()
        self.slot = slot
        self.weight = nn.Parameter(whole.weight[:, columns].clone(), requires_grad=False)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is None:
            y = F.linear(x, self.weight)
        else:
            y = linear(x, self.weight, batch_invariant=self.batch_invariant, impl=self.impl)
        y = sum_in_order(y) if self.batch_invariant else sum_over_ranks(y)
        return y if self.bias is None else y + self.bias

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Normed:
        assert self.impl is not None
        same, impl = self.batch_invariant, self.impl
        exchange = exchange_of(residual) if self.bias is None else None
        if exchange is not None:
            return linear_all_reduce_add_rms_norm(
                x, self.weight, exchange, self.slot, residual, weight, eps, batch_invariant=same, impl=impl
            )
        if same and self.bias is None:
            # What the exchange does with fewer rows: the ranks' sums, without their last bits, are added in float32 and
            # rounded once.
            part = linear(x, self.weight, batch_invariant=True, out_dtype=torch.float32, impl=impl)
            return add_rms_norm(sum_in_order(as_sent(part)).to(x.dtype), residual, weight, eps, impl=impl)
        return add_rms_norm(self(x), residual, weight, eps, impl=impl)


class SummedExperts(MLP):
    """The sum over ranks of what their columns of all experts give: this rank's are `part`."""

    skips_padding = True

    def __init__(self, part: Experts) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        out = self.part(x, real)
        return sum_in_order(out) if self.batch_invariant else sum_over_ranks(out)


def shard_mixing(mixing: Mixing, config: DecoderConfig, layer: int, rank: int) -> None:
    """Keep this rank's heads of the layer; `config` is the shape of a rank's slice."""
    if isinstance(mixing, LatentAttention):
        _shard_latent(mixing, config, rank)
    elif isinstance(mixing, LinearAttention):
        _shard_linear(mixing, config.mixing(layer), rank)
    else:
        assert isinstance(mixing, Attention)
        _shard_attention(mixing, config, rank)


def shard_mlp(mlp: MLP, config: DecoderConfig, layer: int, rank: int) -> MLP:
    if isinstance(mlp, Experts):
        sizes = config.mlp(layer)
        _shard_experts(mlp.experts, sizes.width, rank)
        # Their outputs are summed with those of the experts.
        for shared, width in (
            (mlp.shared_experts, sizes.width * sizes.shared),
            (mlp.shared_expert, sizes.gated_shared),
        ):
            if shared is not None:
                columns = part(rank, width)
                _shard_inner(shared, columns)
                shared.down_proj.weight = _parameter(shared.down_proj.weight[:, columns])
                shared.down_proj.in_features = width
        return SummedExperts(mlp)
    assert isinstance(mlp, SwiGLU)
    columns = part(rank, config.intermediate_size)
    _shard_inner(mlp, columns)
    mlp.add_module("down_proj", RowParallelLinear(mlp.down_proj, columns, slot=1))
    return mlp


def part(rank: int, size: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def _shard_attention(attention: Attention, config: DecoderConfig, rank: int) -> None:
    queries, keys = config.num_heads * config.head_dim, part(rank, config.num_kv_heads * config.head_dim)
    # The gate of a head is behind its query.
    _keep_outputs(attention.q_proj, part(rank, queries * (2 if attention.gated else 1)))
    _keep_outputs(attention.k_proj, keys)
    _keep_outputs(attention.v_proj, keys)
    attention.add_module("o_proj", RowParallelLinear(attention.o_proj, part(rank, queries), slot=0))
    if attention.sinks is not None:
        attention.sinks = _parameter(attention.sinks[part(rank, config.num_heads)])


def _shard_latent(attention: LatentAttention, config: DecoderConfig, rank: int) -> None:
    """A rank has some of the heads; every rank stores the latents of all."""
    sizes, heads = attention.sizes, config.num_heads
    queries = attention.q_b_proj if attention.q_proj is None else attention.q_proj
    _keep_outputs(queries, part(rank, heads * (sizes.nope + sizes.rope)))
    _keep_outputs(attention.kv_b_proj, part(rank, heads * (sizes.nope + sizes.value)))
    attention.add_module("o_proj", RowParallelLinear(attention.o_proj, part(rank, heads * sizes.value), slot=0))


def _shard_linear(attention: LinearAttention, sizes: LinearConfig, rank: int) -> None:
    """A rank has some of the key heads, with their value heads, and the states of these."""
    whole, values = attention.sizes, part(rank, sizes.value_heads * sizes.value_dim)
    heads, keys = part(rank, sizes.value_heads), whole.key_heads * whole.key_dim
    own_keys = torch.arange(keys)[part(rank, sizes.key_heads * sizes.key_dim)]
    own_values = torch.arange(2 * keys, whole.channels)[values]
    channels = torch.cat([own_keys, keys + own_keys, own_values]).to(attention.A_log.device)
    _keep_outputs(attention.in_proj_qkv, channels)
    attention.conv1d.weight = _parameter(attention.conv1d.weight[channels])
    _keep_outputs(attention.in_proj_z, values)
    for each in (attention.in_proj_b, attention.in_proj_a):
        _keep_outputs(each, heads)
    attention.A_log, attention.dt_bias = _parameter(attention.A_log[heads]), _parameter(attention.dt_bias[heads])
    attention.add_module("out_proj", RowParallelLinear(attention.out_proj, values, slot=0))
    attention.sizes = sizes


def _shard_experts(experts: ExpertTensors | PackedExpertTensors, width: int, rank: int) -> None:
    """Every rank has `width` columns of every expert."""
    columns = part(rank, width)
    if isinstance(experts, PackedExpertTensors):
        gate_up, down = _packed_columns(experts, columns)
        experts.gate_up_proj_blocks, experts.gate_up_proj_scales = gate_up
        experts.down_proj_blocks, experts.down_proj_scales = down
    else:
        experts.gate_up_proj = _parameter(_gate_up_rows(experts.gate_up_proj, columns))
        experts.down_proj = _parameter(experts.down_proj[..., columns])
    gate_up_bias, down_bias = experts.weights[2:]
    if gate_up_bias is not None and down_bias is not None:
        experts.gate_up_proj_bias = _parameter(_gate_up_rows(gate_up_bias, columns))
        if rank:  # it is added once
            experts.down_proj_bias = _parameter(torch.zeros_like(down_bias))


def _packed_columns(experts: PackedExpertTensors, columns: slice) -> tuple[Mxfp4, Mxfp4]:
    packed, down = experts.weights[:2]
    assert isinstance(packed, Mxfp4) and isinstance(down, Mxfp4)
    gate_up = Mxfp4(*(_gate_up_rows(each, columns) for each in packed))
    codes, scales = down
    first, last = columns.start, columns.stop
    own = codes[..., first // 2 : last // 2].contiguous(), scales[..., first // MXFP4_GROUP : last // MXFP4_GROUP]
    return gate_up, Mxfp4.padded(*own)


def _gate_up_rows(both: Tensor, rows: slice) -> Tensor:
    """Of `both [E, 2 F, ...]`, the same rows of gate and of up."""
    return both.unflatten(1, (2, -1))[:, :, rows].flatten(1, 2)


def _shard_inner(mlp: SwiGLU, columns: slice) -> None:
    _keep_outputs(mlp.gate_proj, columns)
    _keep_outputs(mlp.up_proj, columns)


def _keep_outputs(linear: nn.Linear, rows: slice | Tensor) -> None:
    linear.weight = _parameter(linear.weight[rows])
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias[rows])
    linear.out_features = linear.weight.shape[0]


def _parameter(view: Tensor) -> nn.Parameter:
    """A copy, so that the whole can be freed."""
    return nn.Parameter(view.clone(memory_format=torch.contiguous_format), requires_grad=False)
