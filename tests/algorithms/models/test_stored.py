"""What the headers of a checkpoint say: where each tensor is, and what it is, before anything is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from algorithms.models.folder import ModelError
from algorithms.models.loading.stored import stored_tensors, without_model

TENSORS = {
    "model.fc.weight": torch.arange(6.0).view(2, 3).half(),
    "norm.weight": torch.ones(3),
    "d2t": torch.tensor([4, 7]),
}
SAID = {"fc.weight": ((2, 3), "F16"), "norm.weight": ((3,), "F32"), "d2t": ((2,), "I64")}


@pytest.mark.parametrize("pickled", [False, True])
def test_a_file_says_what_it_holds(tmp_path: Path, pickled: bool) -> None:
    """Names are without the prefix, and a tensor knows the one that the file has for it."""
    path = tmp_path / ("pytorch_model.bin" if pickled else "model.safetensors")
    torch.save(TENSORS, path) if pickled else save_file(TENSORS, path)
    found = stored_tensors(tmp_path, without_model, pickles=pickled)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == SAID
    for each in found.values():
        assert each.file == path and torch.equal(each.read(), TENSORS[each.name])
    assert {each.name for each in found.values()} == set(TENSORS)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    names = list(TENSORS)
    for number, part in enumerate((names[:1], names[1:])):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.fc.weight": "part-0.safetensors", "d2t": "part-1.safetensors"}}')
    found = stored_tensors(tmp_path)
    assert {name: each.file.name for name, each in found.items()} == {
        "model.fc.weight": "part-0.safetensors",
        "d2t": "part-1.safetensors",
    }
    index.write_text('{"weight_map": {"d2t": "part-0.safetensors"}}')
    with pytest.raises(ModelError, match="tensor 'd2t' is missing from its shard"):
        stored_tensors(tmp_path)
