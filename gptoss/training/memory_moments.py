"""The moments of a training step at which memory can be largest, and the bytes alive at each (chapter 11).

Shapes: N = B·T tokens, C model width, E experts, R = N·k routed rows, F ffn width, V vocabulary, P parameters.
"""

from dataclasses import dataclass, replace

from gptoss.config import ModelConfig
from gptoss.training.kept_tensors import (
    GIB,
    INDEX,
    WIDE,
    Setting,
    block_input_kept,
    block_kept,
    head_kept,
    rotary_kept,
    shared_kept,
    total_bytes,
)
from gptoss.training.memory_experts import experts_backward_peak
from gptoss.training.parameter_counts import (
    block_parameters,
    count_parameters,
    embedding_parameters,
)

# What is alive for one moment only, as counted from the code that needs it. A measurement corrects it here.
# Head, bytes of one logit. The kernel writes the gradient over the logits; PyTorch's own code on a CPU needs
# (z − lse).exp() in fp32 beside them, and an fp32 copy of z unless z is fp32 already.
LOGIT_BYTES = {
    ("cuda", "bf16"): 2,
    ("cuda", "fp32"): 4,
    ("cpu", "bf16"): 2 + 4 + 4,
    ("cpu", "fp32"): 4 + 4,
}
# Backward pass of the eager final norm: four tensors of the hidden states' shape in fp32.
NORM_SCRATCH = 4
# Backward pass of a block, in (R, F) tensors: the gradients of hidden, gate and up and what computes them, less the
# hidden rows and the shared expert's tensors, which are gone by then. "triton_grouped" has a list (`memory_experts`).
EXPERTS_SCRATCH = {"stacked": 5, "grouped_mm": 1}


@dataclass(frozen=True)
class Step:
    """How a step is taken, as far as memory cares.

    every: blocks 0, every, 2·every, … are checkpointed; 0 is off.
    loss_chunk: tokens whose logits exist at once.
    optimizer_bytes: state of one parameter.
    gradients_stay: whether they exist all along (several micro-batches, or DDP's buckets).
    shares: processes among which weights, gradients and optimiser state are divided.
    logit_bytes: what one logit takes while its chunk is at work.
    workspace: bytes that the device's libraries take from the same allocator.
    recorded: whether it is a CUDA graph, which keeps its memory between steps.
    """

    every: int
    loss_chunk: int
    optimizer_bytes: int
    gradients_stay: bool
    shares: int
    logit_bytes: int
    workspace: int
    recorded: bool = False


@dataclass(frozen=True)
class Moment:
    """One moment and the bytes alive at it, by what they are.

    weights, gradients, optimizer: of all parameters, or this process's share.
    activations: kept for the backward pass; they grow with the tokens.
    weight_copies: bf16 copies of weights, kept for the backward pass.
    scratch: alive at this moment only.
    """

    name: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    weight_copies: int
    scratch: int

    @property
    def total(self) -> int:
        """All of it, bytes."""
        fixed = self.weights + self.gradients + self.optimizer
        return fixed + self.activations + self.weight_copies + self.scratch


@dataclass(frozen=True)
class TrainingMemory:
    """A training step's memory: every moment in order, and the one at which it is largest."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment with most bytes alive."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def gib(self) -> float:
        """The peak, GiB."""
        return self.peak.total / GIB

    def table(self) -> str:
        """The peak, part by part, for people."""
        parts = ("weights", "gradients", "optimizer", "activations", "weight_copies", "scratch")
        rows = (
            f"  {part.replace('_', ' '):<14}{getattr(self.peak, part) / GIB:8.2f}" for part in parts
        )
        return "\n".join([f"{self.gib:.2f} GiB at the peak: {self.peak.name}", *rows])


def step_moments(cfg: ModelConfig, setting: Setting, step: Step) -> TrainingMemory:
    """Add up what is alive at the head, in each block's backward pass, and when the last gradient is made.

    A checkpointed block keeps its input alone until its own backward pass, which makes everything again; the blocks
    behind it are gone by then.

    Source: chapter 11.
    """
    n, a = setting.tokens, setting.width
    matrix, block = WIDE * embedding_parameters(cfg), WIDE * block_parameters(cfg)
    parameters = WIDE * count_parameters(cfg)
    # FSDP2 holds the embedding and two blocks whole: the one at work and the next.
    gathered = matrix + 2 * block if step.shares > 1 else 0

    kept = block_kept(cfg, setting)
    copies = total_bytes(k for k in kept if k.weight_copy)
    activations = total_bytes(kept) - copies
    stream = n * cfg.d_model * a  # the residual stream, or its gradient
    checkpointed = [bool(step.every) and i % step.every == 0 for i in range(cfg.n_layers)]
    always = total_bytes(rotary_kept(cfg, setting)) + n * INDEX  # and the token ids
    head = total_bytes(head_kept(cfg, setting))

    def moment(name: str, waiting: int, made: int, extra: int, scratch: int) -> Moment:
        """The first `waiting` blocks wait; `made` bytes of gradients exist even where they do not stay."""
        waits = sum(stream if c else activations for c in checkpointed[:waiting])
        gradients = parameters if step.gradients_stay else made
        return Moment(
            name,
            parameters // step.shares + gathered,
            gradients // step.shares,
            step.optimizer_bytes * (parameters // WIDE) // step.shares,
            waits + always + extra,
            copies * sum(not c for c in checkpointed[:waiting]),
            scratch + step.workspace,
        )

    # A gradient on its way to a parameter is there beside the one that it is added to.
    in_flight = matrix if step.gradients_stay or step.shares > 1 else 0
    logits = min(step.loss_chunk, n) * cfg.vocab_size * step.logit_bytes
    head_weight = embedding_parameters(cfg) * a if a < WIDE else 0
    moments = [
        moment(
            "the head, one chunk's logits", cfg.n_layers, 0, head, logits + head_weight + stream
        ),
        moment(
            "backward of the head", cfg.n_layers, matrix, head - matrix, in_flight + matrix + stream
        ),
        moment(
            "backward of the final norm",
            cfg.n_layers,
            matrix,
            head - matrix - stream,
            in_flight + NORM_SCRATCH * n * cfg.d_model * WIDE + stream,
        ),
    ]
    # Of a block at work there is least free when its routed experts' backward pass runs.
    input_beside = 0 if block_input_kept(cfg, setting) else stream
    gone = _gone_before_experts(cfg, setting)
    scratch = _experts_scratch(cfg, setting) + stream  # and the gradient that comes from behind
    for layer in reversed(range(cfg.n_layers)):
        at = moment(
            f"backward of block {layer}",
            layer,
            matrix + block * (cfg.n_layers - 1 - layer),
            activations - gone + (input_beside if checkpointed[layer] else 0),
            scratch + in_flight + (block if step.shares > 1 else 0),
        )
        moments.append(Moment(**{**vars(at), "weight_copies": at.weight_copies + copies}))
    moments.append(
        moment(
            "the embedding's gradient",
            0,
            parameters,
            0,
            in_flight + matrix + n * cfg.d_model * WIDE,
        )
    )
    if step.recorded:
        # Nothing of the recording's memory is free for a validation. That keeps no tensor beyond its block: one block's
        # whole list, or a chunk of logits, is more than it needs.
        largest = TrainingMemory(tuple(moments)).peak
        validation = 2 * stream + max(activations + copies, logits + head_weight)
        name = "a validation beside the recorded step"
        moments.append(replace(largest, name=name, scratch=largest.scratch + validation))
    return TrainingMemory(tuple(moments))


def _experts_scratch(cfg: ModelConfig, setting: Setting) -> int:
    """Bytes that the routed experts' backward pass makes for itself, the weights' gradients included."""
    if setting.dispatch == "triton_grouped":
        return experts_backward_peak(cfg, setting)
    a, rows = setting.width, setting.tokens * cfg.n_activated_experts
    gate_up_weights = 2 * cfg.n_routed_experts * cfg.ffn_dim * cfg.d_model
    return (EXPERTS_SCRATCH[setting.dispatch] * rows * cfg.ffn_dim + gate_up_weights) * a


def _gone_before_experts(cfg: ModelConfig, setting: Setting) -> int:
    """Bytes of a block's kept activations that are gone when the routed experts' operator runs backwards.

    A compiled block runs it first, and all that the block keeps is still there: so it stands in the code that the
    compiler writes for 8 sequences, and the peak on an H200 agrees. (The compiler orders by what it thinks saves memory.
    For 16 or more it makes the gradient of the shared expert's W2 first and lets one (N, F) tensor go: 0.6% less at 32.
    That is not predicted.) Autograd walks backwards: the shared experts came last in the forward pass, so they are done, and
    the gradient of their input waits.
    """
    if setting.compiled or setting.dispatch != "triton_grouped" or not cfg.n_shared_experts:
        return 0
    done = total_bytes(kept for kept in shared_kept(cfg, setting) if not kept.weight_copy)
    return done - setting.tokens * cfg.d_model * setting.width
