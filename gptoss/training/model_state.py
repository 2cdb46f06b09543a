"""The tensors of a model by name, whatever wraps it.

A checkpoint speaks of the plain model: `compile` and DDP put prefixes before the names, FSDP2 cuts the tensors into
shards, and tying gives one tensor two names. Here all three are undone on the way out and redone on the way in, so the
files do not depend on how many processes wrote them (chapter 17).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # the name that torch.compile puts before a module's own


def plain_module(model: nn.Module) -> nn.Module:
    """The model inside any nesting of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, COMPILED, None), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile adds for submodules compiled on their own."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's live tensors, each once, and the further names of those that have several.

    Returns:
        (tensors, tied): name → the parameter or buffer itself; further name → name in `tensors`.

    Raises:
        ValueError: the state dict holds something other than tensors.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    for name, value in plain_module(model).state_dict(keep_vars=True).items():
        name = plain_name(name)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}: only tensors can be saved as safetensors"
            )
        local = value.to_local() if isinstance(value, DTensor) else value
        place = (
            local.untyped_storage()._cdata,
            local.storage_offset(),
            local.shape,
            local.stride(),
        )
        if place in first_name:
            tied[name] = first_name[place]
        else:
            first_name[place] = name
            tensors[name] = value
    return tensors, tied


def gathered(tensors: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Whole contiguous copies on the CPU; of sharded tensors every rank must ask at once, and `keep` says who keeps."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if keep:
            whole[name] = tensor.to("cpu", copy=True).contiguous()
    return whole


def like(value: Tensor, target: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A whole tensor on a device, cut to this rank's shard where the target is sharded."""
    value = value.to(device=device, dtype=dtype)
    if isinstance(target, DTensor):  # every rank holds the whole value, so nothing needs to be sent
        return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    return value


@torch.no_grad()
def set_model_tensors(model: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a model's tensors new values in place; a tensor on the meta device becomes real on `device`.

    Tied tensors stay one tensor. `values` may leave names out.
    """
    plain = plain_module(model)
    tensors, tied = named_tensors(plain)
    names: dict[str, list[str]] = {name: [name] for name in tensors}
    for further, name in tied.items():
        names[name].append(further)
    owners = _owners(plain)
    for name, target in tensors.items():
        if name not in values:
            continue
        where = device if target.is_meta else target.device
        real = like(values[name], target, device=where, dtype=target.dtype)
        if not target.is_meta:
            target.copy_(real)
            continue
        if isinstance(target, nn.Parameter):
            real = nn.Parameter(real, requires_grad=target.requires_grad)
        for module, attribute in (owners[n] for n in names[name] if n in owners):
            setattr(module, attribute, real)


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Name → (the module that holds the tensor, the attribute), tied names included."""
    return {
        plain_name(f"{prefix}.{attribute}" if prefix else attribute): (module, attribute)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for attribute in (*module._parameters, *module._buffers)
    }


def model_differences(
    model: nn.Module, values: Mapping[str, Tensor]
) -> tuple[list[str], list[str], str | None]:
    """Hold named values against a model.

    Returns:
        (names that the model has and `values` has not, names that `values` has and the model has not, and a line about
        the first value that cannot be loaded: another shape, or two values for one tied tensor).
    """
    tensors, tied = named_tensors(model)
    wanted = {**tensors, **{further: tensors[name] for further, name in tied.items()}}
    missing = [name for name in wanted if name not in values]
    unexpected = [name for name in values if name not in wanted]
    for name, target in wanted.items():
        if name in values and values[name].shape != target.shape:
            shapes = f"shape {tuple(values[name].shape)}, the model's {tuple(target.shape)}"
            return missing, unexpected, f"{name} has {shapes}"
    for further, name in tied.items():
        first, second = values.get(name), values.get(further)
        if first is None or second is None or first is second:
            continue
        if not torch.equal(first, second):
            fault = f"{further} and {name} differ, but the model ties them: build it untied"
            return missing, unexpected, fault
    return missing, unexpected, None
