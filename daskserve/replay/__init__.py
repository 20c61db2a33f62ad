"""Plays a day of traffic, compressed in time, with the replanner at work and without it."""
