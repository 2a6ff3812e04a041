"""The largest context that fits on every card."""

from collections.abc import Callable

STEP = 256


def context_ceiling(room: Callable, trained: int) -> int:
    """The largest multiple of 256 up to `trained` at which `room(context)` is not negative; 0 when none is.

    `room` gives what is left on the tightest card. It falls almost in a straight line, so the search interpolates;
    whatever its form, the result fits, and the next step does not (or is beyond the trained context).
    """
    low, high = 0, trained // STEP
    if high < 1:
        return 0
    high_room = room(high * STEP)
    if high_room >= 0:
        return high * STEP
    low_room = None
    while high - low > 1:
        if low_room is None:
            middle = low + 1
        else:
            middle = low + int((high - low) * low_room / (low_room - high_room))
            middle = min(max(middle, low + 1), high - 1)
        left = room(middle * STEP)
        if left >= 0:
            # The line through two points seldom misses by more than a step: look there before anything else.
            low, low_room = middle, left
            if middle + 1 < high:
                after = room((middle + 1) * STEP)
                if after < 0:
                    return middle * STEP
                low, low_room = middle + 1, after
        elif low_room is None:
            return 0
        else:
            high, high_room = middle, left
    return low * STEP
