"""The order of training windows, computed one position at a time (chapter 13).

A shuffled list of all windows costs memory and has to be saved. A permutation that is a formula costs neither: the
window at a position depends on (seed, position) alone, so a run can stop and go on anywhere.
"""

_MASK = (1 << 64) - 1
_ROUNDS = 6


def permute(index: int, length: int, key: int) -> int:
    """Where a keyed permutation of range(length) sends an index.

    A Feistel network mixes the two halves (L, R) of the index's bits: (L, R) -> (R, L xor f(R)), which is invertible
    for any f, so it permutes a power of four. Values that land outside range(length) are sent on until they fall
    inside (cycle walking); at most three in four do not.

    Args:
        index: in [0, length).
        length: how many items, at least 1.
        key: any int; chooses the permutation.

    Returns:
        the item at that index, in [0, length).

    Raises:
        ValueError: index outside range(length).

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"; chapter 13.
    """
    if not 0 <= index < length:
        raise ValueError(f"index = {index}: expected 0 <= index < length = {length}")
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    keys = [mix(key + i) for i in range(_ROUNDS)]
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & half_mask)
        index = left << half_bits | right
        if index < length:
            return index


def window_at(seed: int, position: int, length: int) -> int:
    """The window that a run with this seed reads at a global position; every epoch has its own permutation.

    Args:
        seed: any int.
        position: sequences read before it, over all ranks and epochs.
        length: windows in the dataset.
    """
    epoch, index = divmod(position, length)
    return permute(index, length, mix(mix(seed) + epoch))


def mix(value: int) -> int:
    """Spread an int over 64 bits so that near values become unrelated (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
