"""What a run is: the model, its training and its data, as three dataclasses and one YAML file.

The field names are the YAML keys. The defaults of `ModelConfig` and `TrainingConfig` are the 502M production run.
A file may leave any key out; a key that no field has is an error that names the nearest one.
"""

from .data import DataConfig
from .model import (
    ATTENTION_BACKENDS,
    DTYPES,
    MOE_DISPATCHES,
    ROPE_MODES,
    YARN_LAYERS,
    ModelConfig,
)
from .run import RunConfig, list_configs, load_config, read_run_config
from .training import TrainingConfig

__all__ = [
    "ATTENTION_BACKENDS",
    "DTYPES",
    "MOE_DISPATCHES",
    "ROPE_MODES",
    "YARN_LAYERS",
    "DataConfig",
    "ModelConfig",
    "RunConfig",
    "TrainingConfig",
    "list_configs",
    "load_config",
    "read_run_config",
]
