"""Checks for the exercises, one module a chapter: `from checks import ch07; ch07.check_sink_softmax(my_function)`.

A check prints what it found and never raises. `check(…, hint=1)` prints the first hint, `hint=2` the second.
"""
