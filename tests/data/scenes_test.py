"""The renderer against geometry worked out by hand, and its determinism."""

import dataclasses

import numpy as np

from ttt_jax.data import scenes


def _one_sphere(centre, radius, colour=(1.0, 0.0, 0.0)):
    """A red sphere under light from straight above, over a grey ground."""
    scene = scenes.random_scene(np.random.default_rng(0))
    return dataclasses.replace(
        scene,
        centres=np.array([centre], np.float32),
        sizes=np.full((1, 3), radius, np.float32),
        angles=np.zeros(1, np.float32),
        is_box=np.array([False]),
        colours=np.array([[colour] * 2, [[0.5] * 3] * 2], np.float32),
        patterns=np.array([0, 0]),
        light=np.array([0.0, 0.0, 1.0], np.float32),
        sky=np.ones((2, 3), np.float32),
    )


def _camera(position, target, size, focal):
    pose = scenes.look_at(np.array([position], np.float64), np.array(target, np.float64))
    return np.array([[focal, focal, size / 2, size / 2]]), pose


def _red(images):
    return (images[..., 0] > 1.5 * images[..., 1].astype(float)) & (images[..., 0] > 40)


def test_a_sphere_is_where_and_as_large_as_the_pinhole_says():
    """Centre by projection; the outline of a sphere on the axis is a disc of f tan(asin(r / d))."""
    centre, distance, focal, size = np.array([0.3, -0.2, 1.0]), 4.0, 90.0, 96
    scene = _one_sphere(centre, 0.5)
    intrinsics, pose = _camera(centre + [0, -distance, 0], centre, size, focal)
    mask = _red(scenes.render(scene, intrinsics, pose, size, size)[0])
    rows, columns = np.nonzero(mask)
    assert abs(rows.mean() + 0.5 - size / 2) < 0.5 and abs(columns.mean() + 0.5 - size / 2) < 0.5
    radius = focal * np.tan(np.arcsin(0.5 / distance))
    assert abs(np.sqrt(mask.sum() / np.pi) - radius) < 0.3
    # Off the axis: the centre's projection lies inside the outline.
    intrinsics, pose = _camera([2.5, -2.0, 2.0], [0.0, 0.3, 0.8], size, focal)
    local = np.linalg.inv(pose[0]) @ np.append(centre, 1)
    x, y = focal * local[:2] / local[2] + size / 2
    assert _red(scenes.render(scene, intrinsics, pose, size, size)[0])[int(y), int(x)]


def test_shading_and_shadow():
    """Lit from above: the top is brighter than the side, and the ground below is in the shade."""
    scene = _one_sphere([0, 0, 1.0], 0.5)
    intrinsics, pose = _camera([0, -4.0, 1.0], [0, 0, 1.0], 64, 64.0)
    image = scenes.render(scene, intrinsics, pose, 64, 64, samples=1)[0].astype(int)
    assert image[24, 32, 0] > image[28, 32, 0] > image[38, 32, 0] > 0
    # Light from the side: the shadow of a sphere at height 1 falls 0.8 / 0.6 towards −x.
    scene = dataclasses.replace(scene, light=np.array([0.8, 0, 0.6], np.float32))
    intrinsics, pose = _camera([0.0, -0.01, 4.0], [0, 0, 0.0], 64, 48.0)
    image = scenes.render(scene, intrinsics, pose, 64, 64, samples=1)[0].astype(int)
    grey = np.ptp(image, axis=-1) < 12
    values = image.mean(-1)
    shadow = grey & (values < (values[grey].min() + values[grey].max()) / 2)
    assert abs(values[shadow].mean() - 255 * 0.5 * 0.45) < 10  # and what fades into the sky
    row, column = np.argwhere(shadow).mean(0)
    assert abs((column + 0.5 - 32) / 48 * 4 + 4 / 3) < 0.15 and abs(row + 0.5 - 32) < 1


def test_a_box_hides_what_is_behind_it_and_turns_with_its_angle():
    scene = _one_sphere([0, 1.0, 0.5], 0.5)
    box = dict(
        centres=np.array([[0, 1, 0.5], [0, 0, 0.6]], np.float32),
        sizes=np.array([[0.5] * 3, [0.6, 0.1, 0.6]], np.float32),
        is_box=np.array([False, True]),
        colours=np.array([[[1, 0, 0]] * 2, [[0, 0, 1]] * 2, [[0.5] * 3] * 2], np.float32),
        patterns=np.zeros(3, int),
    )
    intrinsics, pose = _camera([0, -4.0, 0.6], [0, 0, 0.6], 48, 48.0)
    for angle, hidden in ((0.0, True), (np.pi / 2, False)):
        turned = dataclasses.replace(scene, angles=np.array([0, angle], np.float32), **box)
        image = scenes.render(turned, intrinsics, pose, 48, 48)[0].astype(int)
        assert _red(image).any() != hidden
        assert ((image[..., 2] > 60) & (image[..., 0] < 20)).any()


def test_scenes_are_functions_of_the_generator():
    def images(seed):
        random = np.random.default_rng(seed)
        scene = scenes.random_scene(random)
        return scenes.render(scene, *scenes.random_cameras(random, 2, 12, 16), 12, 16)

    first = images([3, 1])
    assert first.shape == (2, 12, 16, 3) and first.dtype == np.uint8
    assert (first == images([3, 1])).all()
    assert np.abs(first.astype(int) - images([3, 2])).mean() > 10
    assert all(image.std() > 10 for image in images([5, 0]))


def test_cameras_are_rigid_level_and_look_at_the_scene():
    _, poses = scenes.random_cameras(np.random.default_rng(1), 64, 24, 32)
    rotations = poses[:, :3, :3].astype(np.float64)
    assert np.abs(rotations @ rotations.transpose(0, 2, 1) - np.eye(3)).max() < 1e-6
    assert np.all(np.linalg.det(rotations) > 0.999)
    assert np.abs(rotations[:, 2, 0]).max() < 1e-6  # x to the right is level
    assert np.all(rotations[:, 2, 1] < 0)  # y is down
    to_centre = -poses[:, :3, 3] / np.linalg.norm(poses[:, :3, 3], axis=-1, keepdims=True)
    assert np.all(np.sum(to_centre * rotations[:, :, 2], -1) > 0.97)
