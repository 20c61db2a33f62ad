"""A placement as what starts it on a cluster: scripts and manifests, rendered and never run here.

`site` says what the cluster is like, `ranks` what every rank is started with; one module per
target writes that down.
"""
