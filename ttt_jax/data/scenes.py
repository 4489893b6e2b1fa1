"""Scenes rendered by the project itself: shaded, textured primitives seen by known cameras.

A scene is a function of a random generator; nothing is downloaded. Two to four spheres and boxes,
plain, chequered or striped, stand on a chequered ground under one distant light that casts
shadows. Rays are intersected exactly, all of a scene's at once, in NumPy.
"""

import dataclasses

import numpy as np

_AMBIENT = 0.45
_FAR = np.float32(1e9)
_OFFSET = 1e-3  # from a surface to where its shadow ray starts, in the scene's unit
_PERIOD, _GROUND_PERIOD = 0.25, 0.7  # of the patterns, in the scene's unit
_UP = np.array([0.0, 0.0, 1.0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Primitives:
    """A scene: n solids over the ground z = 0, float32.

    Attributes:
      centres: [n, 3], in the scene's unit, in which the objects fill about a unit sphere.
      sizes: [n, 3]: half the lengths of a box's edges, or a sphere's radius three times.
      angles: [n]: rotation about the vertical, radians.
      is_box: [n], bool.
      colours: [n + 1, 2, 3] in [0, 1]: two for each solid's pattern; the last are the ground's.
      patterns: [n + 1], int: 0 plain, 1 chequered, 2 striped.
      light: [3], unit vector towards the light.
      sky: [2, 3]: colours at the horizon and above.
    """

    centres: np.ndarray
    sizes: np.ndarray
    angles: np.ndarray
    is_box: np.ndarray
    colours: np.ndarray
    patterns: np.ndarray
    light: np.ndarray
    sky: np.ndarray


def random_scene(random: np.random.Generator) -> Primitives:
    """Draws a scene.

    Args:
      random: generator; the scene is a function of its state.

    Returns:
      The scene.

    >>> random_scene(np.random.default_rng(0)).centres.shape[1]
    3
    """
    count = int(random.integers(2, 5))
    is_box = random.random(count) < 0.5
    sizes = random.uniform(0.22, 0.42, (count, 3))
    sizes = np.where(is_box[:, None], sizes, sizes[:, :1])
    around = np.linspace(0, 2 * np.pi, count, endpoint=False) + random.uniform(0, 2 * np.pi)
    radius = random.uniform(0.4, 0.65, count)
    centres = np.stack([radius * np.cos(around), radius * np.sin(around), sizes[:, 2]], -1)
    colours = random.uniform(0.05, 1.0, (count + 1, 2, 3))
    colours[-1] = random.uniform(0.4, 0.8, (1, 3)) + np.array([[-0.09], [0.09]])
    light = np.array([*random.uniform(-1, 1, 2), 1.3])
    sky = np.stack([random.uniform(0.75, 0.95, 3), random.uniform(0.4, 0.8, 3)])
    single = dict(
        centres=centres, sizes=sizes, angles=random.uniform(0, np.pi, count), colours=colours,
        light=light / np.linalg.norm(light), sky=sky,
    )  # fmt: skip
    patterns = np.append(random.integers(0, 3, count), 1)
    arrays = {name: np.asarray(value, np.float32) for name, value in single.items()}
    return Primitives(is_box=is_box, patterns=patterns, **arrays)


def look_at(positions: np.ndarray, targets: np.ndarray, up: np.ndarray = _UP) -> np.ndarray:
    """Poses of cameras that look at a point with the horizon level.

    Args:
      positions: [n, 3], centres of the cameras.
      targets: [n, 3] or [3], points on their optical axes.
      up: [3], the direction that is up in the images.

    Returns:
      [n, 4, 4], camera to world, OpenCV's convention (x right, y down, z forward).

    >>> look_at(np.array([[0.0, -2.0, 0.0]]), np.zeros(3))[0, :3, 2].tolist()
    [0.0, 1.0, 0.0]
    """
    forward = targets - positions
    forward = forward / np.linalg.norm(forward, axis=-1, keepdims=True)
    right = np.cross(forward, up)
    right = right / np.linalg.norm(right, axis=-1, keepdims=True)
    poses = np.zeros((len(positions), 4, 4))
    poses[:, :3, :3] = np.stack([right, np.cross(forward, right), forward], axis=-1)
    poses[:, :3, 3], poses[:, 3, 3] = positions, 1.0
    return poses


def random_cameras(
    random: np.random.Generator, count: int, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws cameras around the scene's centre, all of one lens.

    Azimuths lie within 60 degrees of a common one, elevations between 15 and 55 degrees,
    distances between 2.6 and 3.4; each camera looks at a point near the centre.

    Args:
      random: generator.
      count: number of cameras.
      height: rows of their images, in pixels.
      width: columns.

    Returns:
      (intrinsics [count, 4]: fx, fy, cx, cy in pixels, poses [count, 4, 4], camera to world),
      float32.
    """
    azimuth = random.uniform(0, 2 * np.pi) + np.deg2rad(random.uniform(-60, 60, count))
    elevation = np.deg2rad(random.uniform(15, 55, count))
    distance = random.uniform(2.6, 3.4, count)
    horizontal = distance * np.cos(elevation)
    positions = np.stack(
        [horizontal * np.cos(azimuth), horizontal * np.sin(azimuth), distance * np.sin(elevation)],
        axis=-1,
    )
    targets = np.array([0.0, 0.0, 0.25]) + random.uniform(-0.1, 0.1, (count, 3))
    focal = 1.25 * max(height, width)
    intrinsics = np.tile([focal, focal, width / 2, height / 2], (count, 1))
    return intrinsics.astype(np.float32), look_at(positions, targets).astype(np.float32)


def render(
    scene: Primitives,
    intrinsics: np.ndarray,
    poses: np.ndarray,
    height: int,
    width: int,
    samples: int = 2,
) -> np.ndarray:
    """Renders a scene as pinhole cameras see it.

    Args:
      scene: the scene.
      intrinsics: [n, 4]: fx, fy, cx, cy in pixels.
      poses: [n, 4, 4], camera to world.
      height: rows of the images.
      width: columns.
      samples: rays along each side of a pixel, whose colours are averaged.

    Returns:
      uint8 [n, height, width, 3].

    >>> random = np.random.default_rng(0)
    >>> scene, cameras = random_scene(random), random_cameras(random, 2, 4, 6)
    >>> render(scene, *cameras, 4, 6).shape
    (2, 4, 6, 3)
    """
    rows, columns = height * samples, width * samples
    intrinsics = np.asarray(intrinsics, np.float32)
    poses = np.asarray(poses, np.float32)
    fx, fy, cx, cy = np.moveaxis(intrinsics[:, None, None, :], -1, 0)
    x = ((np.arange(columns, dtype=np.float32) + 0.5) / samples - cx) / fx
    y = ((np.arange(rows, dtype=np.float32)[:, None] + 0.5) / samples - cy) / fy
    x, y = np.broadcast_arrays(x, y)
    local = np.stack([x, y, np.ones_like(x)], axis=1).reshape(len(poses), 3, -1)
    # Coordinates come first from here on, [3, rays]: sums over them are sums of whole rows.
    directions = np.concatenate(list(poses[:, :3, :3] @ local), axis=1)
    directions /= _norm(directions)
    origins = np.repeat(poses[:, :3, 3].T, rows * columns, axis=1)
    colours = _trace(scene, origins, directions)
    colours = colours.reshape(3, len(poses), height, samples, width, samples).mean((3, 5))
    colours = np.round(255 * np.clip(np.moveaxis(colours, 0, -1), 0, 1))
    return np.ascontiguousarray(colours, np.uint8)


def _trace(scene: Primitives, origins: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Colours of rays, [3, rays] in and out."""
    depth, hit = _closest(scene, origins, directions)
    points = origins + depth * directions
    normals, local = _surface(scene, points, hit)
    seen = depth < _FAR
    lit = np.maximum(scene.light @ normals, 0)
    start = (points + _OFFSET * normals)[:, seen]
    towards = np.broadcast_to(scene.light[:, None], start.shape)
    lit[seen] *= _closest(scene, start, towards, ground=False)[0] == _FAR
    colours = _albedo(scene, hit, local) * (_AMBIENT + (1 - _AMBIENT) * lit)
    # The ground fades into the horizon, so that its pattern does not flicker far away.
    height = np.clip(2 * directions[2], 0, 1)
    sky = (1 - height) * scene.sky[0][:, None] + height * scene.sky[1][:, None]
    fade = np.where(hit == len(scene.centres), np.clip((depth - 4) / 6, 0, 1), 0)
    fade = np.where(seen, fade, 1)
    return (1 - fade) * colours + fade * sky


def _closest(
    scene: Primitives, origins: np.ndarray, directions: np.ndarray, ground: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(depth [rays], number of the solid hit [rays]); the ground is the last, misses are far."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        flat = -origins[2] / directions[2]
    depth = np.where(ground & (flat > 0) & (flat < _FAR), flat, _FAR)
    hit = np.full(depth.shape, len(scene.centres))
    for index, is_box in enumerate(scene.is_box):
        o = _to_local(scene, index, origins)
        d = _rotation(scene.angles[index]).T @ directions
        found = (_box_depth if is_box else _sphere_depth)(o, d, scene.sizes[index])
        nearer = found < depth
        depth, hit = np.where(nearer, found, depth), np.where(nearer, index, hit)
    return depth, hit


def _to_local(scene: Primitives, index: int, points: np.ndarray) -> np.ndarray:
    """Points in a solid's own frame, where it is centred and unrotated."""
    return _rotation(scene.angles[index]).T @ (points - scene.centres[index][:, None])


def _rotation(angle: float) -> np.ndarray:
    """From a solid's frame to the world: columns are its axes."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]], np.float32)


def _norm(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(vectors * vectors, axis=0))


def _sphere_depth(o: np.ndarray, d: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Depths at which rays, in the sphere's frame, enter it."""
    b = np.sum(o * d, axis=0)
    inside = b * b - np.sum(o * o, axis=0) + size[0] ** 2
    near = -b - np.sqrt(np.maximum(inside, 0))
    return np.where((inside > 0) & (near > 0), near, _FAR)


def _box_depth(o: np.ndarray, d: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Depths at which rays, in the box's frame, enter it."""
    inverse = 1 / np.where(np.abs(d) < 1e-9, np.float32(1e-9), d)
    first, second = (-size[:, None] - o) * inverse, (size[:, None] - o) * inverse
    enter = np.max(np.minimum(first, second), axis=0)
    leave = np.min(np.maximum(first, second), axis=0)
    return np.where((enter < leave) & (enter > 0), enter, _FAR)


def _surface(
    scene: Primitives, points: np.ndarray, hit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(outward unit normals [3, rays], points in the frame of what they lie on)."""
    normals = np.zeros_like(points)
    normals[2] = 1
    local = points.copy()
    for index, is_box in enumerate(scene.is_box):
        rows = hit == index
        place = _to_local(scene, index, points[:, rows])
        local[:, rows] = place
        outward = place / scene.sizes[index][:, None]
        if is_box:
            largest = np.abs(outward) == np.max(np.abs(outward), axis=0)
            outward = np.where(largest, np.sign(outward), 0)
        normals[:, rows] = _rotation(scene.angles[index]) @ (outward / _norm(outward))
    return normals, local


def _albedo(scene: Primitives, hit: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Colour of each point, [3, rays], by the pattern of what it lies on, in that one's frame."""
    ground = hit == len(scene.centres)
    pattern = scene.patterns[hit]
    period = np.where(ground, np.float32(_GROUND_PERIOD), np.float32(_PERIOD))
    # Shifted by an irrational part, so that no face of a box lies on an edge of the pattern.
    cells = np.floor(np.clip(local, -1e3, 1e3) / period + np.float32(0.2718))
    cells[2, ground] = 0
    odd = np.where(pattern == 1, cells.sum(0) % 2, cells[2] % 2)
    second = (pattern > 0) & (odd == 1)
    return scene.colours[hit, second.astype(int)].T
