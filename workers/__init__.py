"""The engine that runs inside one worker: model, paged KV pool, batching loop, sampling."""
