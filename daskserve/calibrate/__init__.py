"""Measures the model and machine at hand and fits the planner's latency model to them.

``grid`` says what to measure, ``steps`` times engine steps in this process, ``handing_over`` asks a
local service what lies between the steps, ``machine`` finds the limits of the hardware, ``fitting``
fits and judges, ``report`` and ``plot`` show it. ``run`` ties them together.
"""
