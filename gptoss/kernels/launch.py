"""How many programs a persistent kernel starts.

Shapes: none; plain numbers.
"""

import torch

from gptoss.kernels.tuning import Tiles

INTERPRETED_PROGRAMS = 3  # enough for each to walk several tiles


def programs(device: torch.device, tiles: Tiles, work: int) -> tuple[int]:
    """The grid of a persistent kernel: ``per_sm`` programs a multiprocessor, no more than there is work for."""
    if device.type == "cuda":
        resident = torch.cuda.get_device_properties(device).multi_processor_count * tiles.per_sm
    else:
        resident = INTERPRETED_PROGRAMS
    return (min(resident, work),)
