"""Capacity planning: latency models, the simulator and the placement search."""
