"""Live views of a service and of the planner, in a browser; also from a recording.

One `Feed` per process watches a `Source`; every browser session draws what the feed has.
"""
