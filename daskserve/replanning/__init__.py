"""Decides when the split of instances over roles no longer suits the traffic, and what to change.

Pure: time is a parameter, nothing here knows Dask. `policy` is the entry: profile and drift test
feed it, the planner's simulator predicts, a `Decision` comes out; whoever runs the instances
carries it out and writes down in the journal what came of it.
"""
