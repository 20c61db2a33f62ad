"""The compiled half of the simulator: the event loop and everything that it calls."""
