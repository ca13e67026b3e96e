"""Dropout by the sample: its share, at every place of a sample."""

from __future__ import annotations

import pytest
import torch

from shared.workloads.training.dropout import SampleDropout, SampleKeys, sample_keys


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_every_place_of_a_sample_is_dropped_as_often(share: float) -> None:
    keys = SampleKeys()
    keys.keys = sample_keys(3, 1, 0, 256)
    dropped = SampleDropout(share, keys, 2).train()(torch.ones(256, 4096))
    for lane in range(4):  # a word of random bits has four
        assert float((dropped[:, lane::4] == 0).float().mean()) == pytest.approx(share, abs=0.005)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    assert (dropped == 0).float().mean(0).max() < share + 0.15


def test_a_share_of_almost_one_drops_almost_everything() -> None:
    keys = SampleKeys()
    keys.keys = sample_keys(3, 0, 0, 4)
    kept = SampleDropout(0.999995, keys, 0).train()(torch.ones(4, 10_000))
    assert int((kept > 0).sum()) < 20
