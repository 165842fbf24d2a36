"""The only second copies of formulas: rules fused by hand, where measurement demands it.

Each kernel is tested against its rule, state included, and states how many bytes it moves.
"""
