"""Scheduling decisions as plain functions over scalars and flat arrays.

The engine calls them as they are; the simulator compiles the same function objects with
numba. They use no clock and no randomness, and change nothing but what they return.
"""
