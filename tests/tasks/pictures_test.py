"""Pictures of evaluations: every panel has a label that is all there."""

import numpy as np
import pytest
from PIL import Image

from ttt_jax.tasks.image_grid import draw_predictions
from ttt_jax.tasks.view_pictures import draw_strip, draw_turntable


def _is_written(pixels):
    """Whether there are letters, which do not touch the edge above them."""
    dark = np.asarray(pixels).min(-1) < 128
    return dark.any() and not dark[:2].any()


@pytest.mark.parametrize("size, letters", [(8, 12), (96, 12), (256, 21)])
def test_each_view_of_a_strip_has_a_title(size, letters, tmp_path):
    inputs, view = np.full((2, 3, size, size, 3), 0.7), np.full((2, size, size, 3), 0.7)
    path = draw_strip(tmp_path / "strip.png", inputs, view, view * 0.9, ["PSNR 9 dB"] * 2)
    picture = np.asarray(Image.open(path))
    tile = max(96, size)
    lefts = [4 + (tile + 4) * column + (14 if column > 2 else 0) for column in range(6)]
    for left in lefts:
        assert _is_written(picture[: 2 * letters, left : left + tile])
        assert (picture[2 * letters - 1, left : left + tile] == 255).all()  # between title and view
    for row in (0, 1):
        top = 2 * letters + (tile + 4) * row
        assert (picture[top : top + tile, lefts[4] : lefts[4] + tile] == 255).any()  # the caption


def test_each_scene_of_a_turntable_has_its_number(tmp_path):
    frames = np.random.default_rng(0).random((4, 2, 8, 8, 3))
    with Image.open(draw_turntable(tmp_path / "turn.gif", frames)) as gif:
        assert gif.n_frames == 4 and gif.size == (192, 24 + 96)
        for number in range(4):
            gif.seek(number)
            header = np.asarray(gif.convert("RGB"))[:24]
            assert _is_written(header[:, :96]) and _is_written(header[:, 96:])
            assert not np.array_equal(header[:, :96], header[:, 96:])


@pytest.mark.parametrize("count, height, width", [(3, 8, 8), (9, 8, 16), (9, 16, 8)])
def test_each_image_of_a_grid_has_its_title(count, height, width, tmp_path):
    """Of two lines where it is wrong, with both ends of long names, inside the picture."""
    classes = [f"a class with $a long name$ {index}" for index in range(3)]
    images, scores = np.full((count, height, width, 3), 200, np.uint8), np.eye(3)[[1] * count]
    draw_predictions(tmp_path / "wrong.png", images, [0] * count, scores, classes)
    draw_predictions(tmp_path / "right.png", images, [1] * count, scores, classes)
    wrong, right = (
        np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"))
        for name in ("wrong", "right")
    )
    assert (wrong[:2] == 255).all() and (right[:2] == 255).all()
    red = (wrong[..., 0] > 200) & (wrong[..., 1] < 100)
    first = red[: wrong.shape[0] // (1 + (count > 8)), :150]
    lines = np.flatnonzero(np.diff(first.any(1).astype(int)) == 1)
    assert len(lines) == 2
