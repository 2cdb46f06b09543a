"""A step's kernels overlap: each starts while the one before still runs, and fetches its weights meanwhile.

A step is a chain of some seventy short kernels. Launched plainly, each waits until the last program of its predecessor has
ended and its writes are visible, and only then asks the memory for its first weight: microseconds in which nothing is
read. From compute capability 9.0 on a kernel may be launched as a *programmatic dependent* instead:

    let_next_start      the successor's programs may take what room is left on the multiprocessors
    (loads of weights)  they depend on no kernel of the step, so they are in flight while the predecessor ends
    after_previous      waits until all kernels before this one have ended and what they wrote can be read
    (all else)

The order of all later kernels rests on every single one. A kernel that ended without waiting would let its successor
believe that everything before has ended, so **every program of every kernel of the step waits**, before it reads what a
kernel of the step writes, and before it writes anything: the buffer may still be read by the kernel before.

The weights, in turn, must stand in memory when the first kernel of the chain starts. So that one is launched plainly: it
waits for all that came before, an optimizer's step too, and only then lets the next one start. An operator that overlaps
outside such a chain must not follow the kernel that wrote its weights, and by default none of them overlaps.

A captured CUDA graph keeps these edges. The tokens are the same bits with and without.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; chapter 15.
"""

import torch
import triton
import triton.language as tl

OVERLAP_FROM = (9, 0)  # compute capability


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The successor may start once every program of this kernel has said so or ended: said first, before any load."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """All kernels before this one have ended, and what they wrote can be read. Above it only weights are loaded."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def overlap_options(
    device: torch.device, overlap: bool = False, first: bool = False
) -> dict[str, bool]:
    """A launch's options: PDL for the kernel and, unless it is the `first` of a chain, the same for the launcher.

    Off in the interpreter, on GPUs before Hopper, and in a Triton that cannot launch so.
    """
    if not (overlap and _can_overlap(device)):
        return dict(PDL=False)
    return dict(PDL=True, launch_pdl=not first)


def _can_overlap(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= OVERLAP_FROM
        and hasattr(tl.extra.cuda, "gdc_wait")
    )
