"""The engine on CUDA devices: inputs, attention, sampling, graphs and copies that never block."""
