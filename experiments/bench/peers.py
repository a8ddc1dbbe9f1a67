"""Other implementations of the same work, timed beside ours where they are installed.

A peer is imported only when a run asks for it. One that is not installed, or cannot do a call, is named with the
reason. Each result is compared with our kernel's before the peer is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.bench import peer_operations
from experiments.bench.libraries import Unavailable
from experiments.bench.peer_attention import PAGED_ATTENTION
from experiments.bench.timing import tensors_in

Call = Callable[[], torch.Tensor | None]
Prepare = Callable[[dict[str, Any]], Call]

PEERS: dict[str, dict[str, Prepare]] = {name: {"paged_attention": build} for name, build in PAGED_ATTENTION.items()}
"""What each peer can be compared on, by the name of our function."""
_RENORMS = ("top_k_renorm", "top_p_renorm")
PEERS["flashinfer"] |= {name: partial(peer_operations.flashinfer, name) for name in _RENORMS}
PEERS["sgl_kernel"] = {name: partial(peer_operations.sgl_kernel, name) for name in peer_operations.WRITTEN}
PEERS["sgl_kernel"] |= {name: partial(peer_operations.sgl_renorm, name) for name in _RENORMS}


def prepare(name: str, function: str, inputs: dict[str, Any]) -> Call:
    """The peer's call for `inputs`, planning and gathering done.

    Raises:
        Unavailable: not installed, or a call that it cannot do.
    """
    if function not in PEERS[name]:
        raise Unavailable(f"has nothing like {function}")
    return PEERS[name][function](inputs)


def compared(function: str, inputs: dict[str, Any], returned: Any) -> list[torch.Tensor]:
    """What is compared after a call with `inputs`: the first tensor returned, or the arguments written in its place."""
    if function in peer_operations.WRITTEN:
        return [inputs[name] for name in peer_operations.WRITTEN[function]]
    return [next(tensors_in(returned))]
