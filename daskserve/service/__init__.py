"""Requests on a Dask cluster: prefill on one worker, decode on another.

On a cluster that exists, what it runs and who is there is looked at first (`joining`,
`agreement`, `presence`); instances that are to go are drained (`draining`, `leaving`).

The life of a request here:

1. `service.Service` tokenizes and checks it (`requests`) and sends two tasks (`graph`, `tasks`).
   A stream has none: it asks the scheduler for an instance and talks to that itself (`online`,
   `online_call`, `online_wire`, `link`).
2. The scheduler's plugin (`dispatch` for tasks, `online_dispatch` for streams, with their books in
   `dispatch_state`) binds ``prefill-<id>`` to the prefill instance with the shortest queue.
3. The worker's plugin (`instance_plugin`, `online_worker`) runs it; the first token goes straight
   to the caller (`token_sender`, `token_stream`), the KV stays where it is.
4. When a decode instance has room, ``decode-<id>`` is bound to it and pulls the KV (`kv_pull`).
5. The decode instance sends the tokens; the completion is the result of ``decode-<id>``.
"""

from daskserve.service.joining import Expected
from daskserve.service.service import Service

__all__ = ["Expected", "Service"]
