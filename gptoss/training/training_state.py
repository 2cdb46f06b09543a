"""The state of a training run as named tensors, whatever wraps the model.

A checkpoint speaks of the plain model: `compile` and DDP put prefixes before the names, FSDP2 cuts the tensors into
shards, and tying gives one tensor two names. Here all three are undone on the way out and redone on the way in, so the
files do not depend on how many processes wrote them, and an optimiser's state follows its parameter's name, not its
position in a list.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

COMPILED = "_orig_mod"  # the name that torch.compile puts before a module's own
# How a step is computed, not what it computes: these follow the machine, not the checkpoint.
MACHINE_SETTINGS = ("fused", "foreach", "capturable", "differentiable")


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


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of each parameter → its plain name."""
    return {id(p): plain_name(name) for name, p in plain_module(model).named_parameters()}


def optimizer_parts(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state: its tensors as "<kind>.<parameter name>", and the rest as plain values.

    Returns:
        (tensors, rest): live tensors such as "exp_avg.norm.weight"; {"groups": [...], "values": {name: {kind: value}}}
        where each group lists its parameters by name.

    Raises:
        ValueError: the optimiser holds a parameter that the model does not.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group, members in _groups(model, optimizer):
        for name, parameter in members.items():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{kind}.{name}"] = value
                else:
                    values.setdefault(name, {})[kind] = value
        settings = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names", *MACHINE_SETTINGS)
        }
        groups.append({"parameters": list(members), **settings})
    return tensors, {"groups": groups, "values": values}


def optimizer_mismatch(
    model: nn.Module, optimizer: Optimizer, rest: Mapping[str, Any]
) -> str | None:
    """Say why a saved optimiser state does not fit this optimiser, or None when it does."""
    saved_group = {n: i for i, g in enumerate(rest["groups"]) for n in g["parameters"]}
    seen = set()
    for index, (_, members) in enumerate(_groups(model, optimizer)):
        absent = [name for name in members if name not in saved_group]
        if absent:
            return f"the optimiser trains {absent[0]} ({len(absent)} such), of which no state was saved"
        if len({saved_group[name] for name in members}) > 1:
            return f"parameter group {index} joins parameters that were saved in different groups"
        seen.update(members)
    extra = [name for name in saved_group if name not in seen]
    if extra:
        return f"state was saved for {extra[0]} ({len(extra)} such), which the optimiser does not train"
    return None


@torch.no_grad()
def set_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Give an optimiser a saved state by parameter name; a state that does not fit is `optimizer_mismatch`'s to find."""
    saved_groups = {name: group for group in rest["groups"] for name in group["parameters"]}
    states: dict[str, dict[str, Any]] = {n: dict(v) for n, v in rest["values"].items()}
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        states.setdefault(name, {})[kind] = value
    for group, members in _groups(model, optimizer):
        saved = saved_groups[next(iter(members))] if members else {}
        for key, value in saved.items():
            if key == "parameters" or key in MACHINE_SETTINGS:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):  # a learning rate that lives on the device
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value
        on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in members.items():
            optimizer.state.pop(parameter, None)
            if name in states:
                optimizer.state[parameter] = {
                    kind: _state_value(kind, value, parameter, on_device)
                    for kind, value in states[name].items()
                }


def _state_value(kind: str, value: Any, parameter: Tensor, on_device: bool) -> Any:
    """One piece of a parameter's state where the optimiser expects it; its dtype stays as saved."""
    if not isinstance(value, Tensor):
        return value
    if kind == "step":  # a counter: on the CPU unless the whole step runs in one kernel
        return value.to(parameter.device) if on_device else value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return like(value, parameter, device=parameter.device, dtype=value.dtype)


def _groups(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Each parameter group with its parameters by name."""
    names = parameter_names(model)
    for index, group in enumerate(optimizer.param_groups):
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise ValueError(
                f"parameter group {index} holds a tensor of shape {tuple(unknown[0].shape)} that is no parameter of "
                "the model: build the optimiser from this model's parameters"
            )
        yield group, {names[id(p)]: p for p in group["params"]}


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This process's random states: torch, CUDA, NumPy, Python; big parts as tensors, the rest as plain values."""
    # The legacy global generator is the one that third-party code draws from, so it is the one to keep.
    name, keys, *numpy_rest = np.random.get_state()  # noqa: NPY002
    version, words, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {"numpy": [name, *numpy_rest], "python": [version, gauss_next]}


def set_random_state(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Put this process's random generators back where `random_state` found them."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    name, *numpy_rest = rest["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), *numpy_rest))  # noqa: NPY002 (see above)
    version, gauss_next = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
