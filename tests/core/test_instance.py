import pytest

from daskserve.core.instance import EngineConfig
from daskserve.core.kv import blocks_for
from daskserve.errors import InvalidParameter


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("block_size", 0),
        ("num_kv_blocks", -4),
        ("max_batch_size", 1.5),
        ("num_threads", True),
        ("kv_lease_s", 0.0),
    ],
)
def test_a_bad_engine_setting_is_refused_by_name(field, value):
    with pytest.raises(InvalidParameter) as caught:
        EngineConfig(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_fill_whole_pages(tokens, blocks):
    assert blocks_for(tokens, 16) == blocks
