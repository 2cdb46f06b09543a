"""An optimiser's state by parameter name, not by position in a list.

A resumed run may build its optimiser with other groups, another order, or another fused kernel: the name says which
moments belong to which weight (chapter 17).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptoss.training.model_state import like, plain_module, plain_name

# How a step is computed, not what it computes: these follow the machine, not the checkpoint.
MACHINE_SETTINGS = ("fused", "foreach", "capturable", "differentiable")


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
    seen: set[str] = set()
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
