"""Compares the one-token attention kernel with scaled_dot_product_attention on ragged lengths, with and without shared heads."""

import pytest
import torch

from rl_accel.lab.cpu_engine.batch import attend


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [8, 13, 32])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_every_row_attends_to_its_own_past_only(kv_heads, width, scaling):
    generator = torch.Generator().manual_seed(width)
    rows, heads, capacity = 9, 4, 70
    query = torch.randn(rows, heads, 1, width, generator=generator)
    key, value = (torch.randn(rows, kv_heads, capacity, width, generator=generator) for _ in range(2))
    lengths = torch.tensor([1, 2, 7, 8, 9, 33, 64, 69, 70])
    mask = (torch.arange(capacity) < lengths[:, None])[:, None, None]
    options = {"attn_mask": mask, "scale": scaling, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    for memory in (key, value):
        memory[~mask.expand(rows, kv_heads, 1, capacity)[:, :, 0]] = torch.nan  # behind the mask nothing is read
    output, _ = attend(torch.nn.Module(), query, key, value, mask, scaling=scaling)
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-6, rtol=1e-5)


def test_prompts_take_the_ordinary_way_and_without_a_mask_all_is_read():
    module = torch.nn.Module()
    module.is_causal = True
    for length in (5, 1):
        query, key = torch.randn(2, 2, length, 16), torch.randn(2, 2, 5, 16)
        output, _ = attend(module, query, key, key, None)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=length > 1)
        torch.testing.assert_close(output.transpose(1, 2), expected, atol=1e-5, rtol=0)
