"""The picture of speed is of what was measured."""

import pytest


@pytest.fixture(scope="module")
def speed(load_script):
    return load_script("docs/speed.py")


@pytest.mark.parametrize("shape", ["one series", "small", "large"])
def test_each_contender_has_its_own_row(speed, shape):
    found = speed.ratios(shape)
    assert list(found) == list(speed.ROWS)
    assert len(set(found.values())) == len(found)
    assert found["PyTorch loop, by hand"] == (1, 1, 1)
    assert all(least <= median <= greatest for median, least, greatest in found.values())


def test_the_picture_is_drawn(speed, tmp_path):
    speed.draw(tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
