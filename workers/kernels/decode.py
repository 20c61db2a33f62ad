"""One step of a decoder of the Llama family: token ids to logits, on all threads of a team."""

from __future__ import annotations

from daskserve.workers.kernels.jit import kernel
from daskserve.workers.kernels.layers import (
    embed,
    gather_last,
    normalize,
    project_heads,
    project_inner,
    project_residual,
    project_vocabulary,
)
from daskserve.workers.kernels.matmul import close_tiles, open_tiles
from daskserve.workers.kernels.paged import attend, spread_values
from daskserve.workers.kernels.team import COUNTER, reset, wait_for_all


@kernel
def run_step(thread, num_threads, decoder, work, step):
    """Run one step; ``thread`` counts from 0.

    Parameters
    ----------
    decoder, work, step
        See ``tables``; the same on every thread.
    """
    open_tiles(decoder.product, work.tiles)
    scratch = work.scratch + thread * work.scratch_bytes
    embed(thread, num_threads, decoder, work, step)
    wait_for_all(work.sync, num_threads)
    for layer in range(decoder.num_layers):
        _run_layer(thread, num_threads, decoder, work, step, layer, scratch)
    gather_last(thread, num_threads, decoder, work, step, scratch)
    wait_for_all(work.sync, num_threads)
    project_vocabulary(thread, num_threads, decoder, work, step, scratch)
    close_tiles(decoder.product)
    wait_for_all(work.sync, num_threads)


@kernel
def _run_layer(thread, num_threads, decoder, work, step, layer, scratch):
    features = decoder.num_heads * decoder.head_dim
    element, hidden, inner = decoder.element, decoder.hidden, decoder.inner
    normalize(thread, num_threads, decoder, work, step, decoder.first_norm + layer * hidden * 4)
    wait_for_all(work.sync, num_threads)
    project_heads(thread, num_threads, decoder, work, step, layer, scratch)
    wait_for_all(work.sync, num_threads)
    if step.has_prompts:
        spread_values(thread, num_threads, decoder, work, step, layer)
        wait_for_all(work.sync, num_threads)
    attend(thread, decoder, work, step, layer, scratch)
    wait_for_all(work.sync, num_threads)
    if thread == 0:
        reset(work.sync + 8 * COUNTER)
    output = decoder.output + layer * hidden * features * element
    project_residual(
        thread, num_threads, decoder, work, step, output, features, work.attended, scratch
    )
    wait_for_all(work.sync, num_threads)
    normalize(thread, num_threads, decoder, work, step, decoder.second_norm + layer * hidden * 4)
    wait_for_all(work.sync, num_threads)
    project_inner(thread, num_threads, decoder, work, step, layer, scratch)
    wait_for_all(work.sync, num_threads)
    down = decoder.down + layer * hidden * inner * element
    project_residual(thread, num_threads, decoder, work, step, down, inner, work.inner, scratch)
    wait_for_all(work.sync, num_threads)
