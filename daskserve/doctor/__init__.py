"""``daskserve doctor``: what is here, and what a placement lacks.

`daskserve.host` looks, `lacks` judges without looking, `cluster` asks the hosts of a cluster,
`tables` shows it.
"""
