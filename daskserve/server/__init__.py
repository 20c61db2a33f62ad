"""The HTTP server: OpenAI's API over the service, on Starlette and uvicorn.

The life of a request here:

1. `protocol` bounds connections, headers and waiting; `gate` checks host and key; `shield`
   turns whatever goes wrong later into OpenAI's error object.
2. `admission` takes the request in or answers 429 before its body is read; with an SLO it asks
   `slo_bound` how much may be at work.
3. `body` reads at most so many bytes of JSON, `fields` makes an `Ask` of it.
4. `generation` has the service tokenize it, opens one token stream per answer, and aborts them
   when the client goes.
5. `shapes` gives the answer OpenAI's form: `events` sends chunks as tokens come, or one whole
   response at the end.
6. `metrics` adds up what happened; `health` tells the truth about each role.

Beside it, `files`, `batches` and `store` keep what the Batch API needs on disk, and
`batch_worker` brings batches to their end with `daskserve.batch`. `run` starts and stops it all.

No state of dispatch is kept: several servers may share one scheduler.
"""
