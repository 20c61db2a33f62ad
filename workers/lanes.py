"""Lays a batch out for the kernels: lanes of tokens, rows, attention items, and work buffers."""

from __future__ import annotations

import numpy as np
import torch

from daskserve.workers.forward import ForwardBatch
from daskserve.workers.kernels import matmul, tables
from daskserve.workers.kernels.layers import GATE_RUN
from daskserve.workers.kernels.paged import KEYS_BLOCK
from daskserve.workers.kernels.team import Team
from daskserve.workers.kernels.vector import LANES

_GROWTH = 1.25


class Buffers:
    """Named pieces of memory that are kept from step to step and only ever grow."""

    def __init__(self) -> None:
        self._pieces: dict[str, torch.Tensor] = {}

    def get(self, name: str, num_bytes: int) -> torch.Tensor:
        """uint8 tensor of at least ``num_bytes``, zeroed when it was made."""
        piece = self._pieces.get(name)
        if piece is None or piece.numel() < num_bytes:
            piece = torch.zeros(int(num_bytes * _GROWTH) + 64, dtype=torch.uint8)
            self._pieces[name] = piece
        return piece

    def address(self, name: str, num_bytes: int) -> int:
        """Address of the piece."""
        return self.get(name, num_bytes).data_ptr()


class Lanes:
    """Tables and work buffers for one model; each call to ``lay_out`` overwrites the last."""

    def __init__(self, decoder: tables.Decoder, team: Team) -> None:
        self.decoder = decoder
        self.team = team
        self.buffers = Buffers()
        self._tiles = matmul.tile_config()
        fields = (tables.LANE_FIELDS, tables.ROW_FIELDS, tables.ITEM_FIELDS)
        self._tables = [np.zeros((0, count), dtype=np.int64) for count in fields]
        self._batch: tuple[np.ndarray, ...] = ()

    def lay_out(
        self, batch: ForwardBatch, pages: torch.Tensor, logits: int = 0
    ) -> tuple[tables.Workspace, tables.Step]:
        """What the kernels need to run this batch over these pages."""
        decoder = self.decoder
        arrays = (
            np.ascontiguousarray(batch.token_ids, dtype=np.int64),
            np.ascontiguousarray(batch.positions, dtype=np.int64),
            np.ascontiguousarray(batch.query_start, dtype=np.int32),
            np.ascontiguousarray(batch.context_tokens, dtype=np.int32),
            np.ascontiguousarray(batch.page_table, dtype=np.int32),
        )
        self._batch = arrays  # the rows point into the page table until the next call
        num_blocks = int(tables.count_lanes(arrays[2]))
        lanes, rows, items = self._room(num_blocks * LANES, batch.num_rows)
        page_bytes = pages[0].numel() * decoder.element
        num_items, values_bytes = tables.lay_out(
            arrays,
            arrays[4].ctypes.data,
            (pages.data_ptr(), page_bytes, pages.shape[4]),
            (decoder.num_kv_heads, decoder.head_dim * decoder.element),
            lanes,
            rows,
            items,
        )
        step = tables.Step(
            num_blocks=num_blocks,
            num_rows=batch.num_rows,
            num_items=num_items,
            has_prompts=values_bytes > 0,
            lanes=lanes.ctypes.data,
            rows=rows.ctypes.data,
            items=items.ctypes.data,
            pages=pages.data_ptr(),
            page_bytes=page_bytes,
            block_size=pages.shape[4],
            logits=logits,
        )
        longest = int(arrays[3].max()) if values_bytes else 0
        return self._workspace(num_blocks, values_bytes, longest), step

    def _room(self, num_lanes: int, num_rows: int) -> list[np.ndarray]:
        sizes = (num_lanes, num_rows, num_lanes * self.decoder.num_kv_heads)
        for index, size in enumerate(sizes):
            table = self._tables[index]
            if len(table) < size:
                self._tables[index] = np.zeros((2 * size, table.shape[1]), dtype=np.int64)
        return [table[:size] for table, size in zip(self._tables, sizes, strict=True)]

    def _workspace(self, num_blocks: int, values_bytes: int, longest: int) -> tables.Workspace:
        decoder, address = self.decoder, self.buffers.address
        lane_bytes = num_blocks * LANES * decoder.element
        features = decoder.num_heads * decoder.head_dim
        half_bytes = num_blocks * decoder.head_dim // 2 * 64
        group = -(-decoder.num_heads // decoder.num_kv_heads // 4) * 4
        scratch_bytes = max(
            decoder.head_dim * 3 * 64,
            decoder.hidden * 64,
            4 * GATE_RUN * matmul.ROWS * 64,
            KEYS_BLOCK * (64 + group * 4) + (group + 16) * decoder.head_dim * 4 + 128,
            matmul.ROWS * 64 + (longest + 2 * tables.KEYS_STEP) * 64,
        )
        return tables.Workspace(
            residual=address("residual", num_blocks * decoder.hidden * 64),
            packed=address("packed", lane_bytes * decoder.hidden),
            query=address("query", lane_bytes * features),
            attended=address("attended", lane_bytes * features),
            inner=address("inner", lane_bytes * decoder.inner),
            cosine=address("cosine", half_bytes),
            sine=address("sine", half_bytes),
            values=address("values", values_bytes),
            scratch=address("scratch", scratch_bytes * self.team.num_threads),
            scratch_bytes=scratch_bytes,
            tiles=self._tiles.ctypes.data,
            sync=self.team.sync.ctypes.data,
        )
