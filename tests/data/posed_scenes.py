"""Writes rendered scenes in the camera formats that the project reads."""

import json
import pathlib

import numpy as np
from PIL import Image

from ttt_jax.data import scenes

HEIGHT, WIDTH = 24, 32


def rendered(seed, count):
    """(images uint8 [n, 24, 32, 3], intrinsics in pixels, poses) of a scene."""
    random = np.random.default_rng(seed)
    scene = scenes.random_scene(random)
    intrinsics, poses = scenes.random_cameras(random, count, HEIGHT, WIDTH)
    return scenes.render(scene, intrinsics, poses, HEIGHT, WIDTH, 1), intrinsics, poses


def write_json(folder: pathlib.Path, seed=0, count=6, mode="RGB"):
    """A scene in LaCT's format: cameras.json and images; returns the entries."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, (image, k, pose) in enumerate(zip(*rendered(seed, count), strict=True)):
        Image.fromarray(image).convert(mode).save(folder / f"{number}.png")
        fx, fy, cx, cy = (float(x) for x in k)
        world_to_camera = np.linalg.inv(pose.astype(np.float64)).tolist()
        entries.append(
            dict(w=WIDTH, h=HEIGHT, fx=fx, fy=fy, cx=cx, cy=cy, w2c=world_to_camera,
                 file_path=f"{number}.png")
        )  # fmt: skip
    save(folder, entries)
    return entries


def save(folder: pathlib.Path, entries):
    """Writes the camera file."""
    (folder / "cameras.json").write_text(json.dumps(entries))


def write_realestate10k(folder: pathlib.Path, seed=0, count=6, name="clip"):
    """A scene in RealEstate10K's format: NAME.txt and NAME/TIMESTAMP.png."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = ["https://www.youtube.com/watch?v=none"]
    for number, (image, k, pose) in enumerate(zip(*rendered(seed, count), strict=True)):
        stamp = str(1000 * number)
        Image.fromarray(image).save(folder / name / f"{stamp}.png")
        fractions = np.asarray(k, np.float64) / [WIDTH, HEIGHT, WIDTH, HEIGHT]
        matrix = np.linalg.inv(pose.astype(np.float64))[:3].ravel()
        lines.append(" ".join([stamp, *(f"{x:.9f}" for x in (*fractions, 0, 0, *matrix))]))
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
