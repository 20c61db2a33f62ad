"""What this host has: processors, memory, GPUs, links, packages. Reads, and changes nothing.

What is not there is an empty list or None, never an error: a machine without GPUs is one too.
"""
