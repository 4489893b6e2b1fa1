"""The typed configuration of image data: where the images come from and how they are varied."""

import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class ImageConfig:
    """Labelled images, and the recipe by which training varies them.

    The size of the images is the model's (`config.model.image_size`). The defaults vary nothing;
    the numbers in parentheses are those of `deit` (Touvron et al. 2021, arXiv 2012.12877).

    Attributes:
      source: "builtin" (handwritten digits of 8×8 that come with scikit-learn), a folder with one
        subfolder a class, or with such folders named train and val, a folder of IDX files as of
        MNIST, or "tfds:NAME" or "tfds:NAME[SPLIT]", prepared as ArrayRecord.
      eval_fraction: part of the images held out for evaluation, in (0, 1), where the source has no
        held-out part of its own (a folder val, files t10k-..., a split validation or test).
      batch_size: images of one optimizer step, over all processes and accumulation steps, B.
      shuffle_seed: seed of the order of the images and of all that varies them.
      num_workers: reader processes; 0 reads in the training process.
      eval_crop: side of the centre that evaluation sees over the image's shorter side (0.875).
      crop_min_area: training sees a random part of at least this area, with sides between 3:4 and
        4:3; 1 turns that off: the centre, as in evaluation (0.08).
      flip: probability of a mirror image (0.5).
      randaugment_layers: operations of RandAugment an image, each done half of the time; 0 turns
        it off (2).
      randaugment_magnitude: their strength, in [0, 10], ± 0.5 (9).
      erase: probability that a rectangle becomes noise (0.25).
      mixup_alpha: a of the Beta(a, a) from which the share of the other image is drawn when two
        are added; 0 turns it off (0.8).
      cutmix_alpha: likewise when a rectangle of one is put into the other (1.0). With both, a
        batch has either with probability 1/2.
      label_smoothing: share of the target that is spread over all classes, in [0, 1) (0.1).

    >>> ImageConfig(source="imagenet", crop_min_area=0.08, flip=0.5).validate()
    """

    source: str = "builtin"
    eval_fraction: float = 0.2
    batch_size: int = 128
    shuffle_seed: int = 0
    num_workers: int = 0
    eval_crop: float = 1.0
    crop_min_area: float = 1.0
    flip: float = 0.0
    randaugment_layers: int = 0
    randaugment_magnitude: float = 9.0
    erase: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    label_smoothing: float = 0.0

    def cut_by_seq(self) -> tuple[str, ...]:
        """Names the fields that mesh.seq must divide: none, seq splits rows of the batch.

        >>> ImageConfig().cut_by_seq()
        ()
        """
        return ()

    def validate(self) -> None:
        """Checks every field. Raises ValueError naming the field, its value and the rule."""
        _check(bool(self.source), "source", self.source, 'name "builtin", a folder or "tfds:NAME"')
        fraction, smoothing = self.eval_fraction, self.label_smoothing
        _check(0 < fraction < 1, "eval_fraction", fraction, "must lie in (0, 1)")
        _check(0 <= smoothing < 1, "label_smoothing", smoothing, "must lie in [0, 1)")
        for name in ("eval_crop", "crop_min_area"):
            value = getattr(self, name)
            _check(0 < value <= 1, name, value, "must lie in (0, 1]")
        for name in ("flip", "erase"):
            value = getattr(self, name)
            _check(0 <= value <= 1, name, value, "is a probability, in [0, 1]")
        for name in ("batch_size", "shuffle_seed", "num_workers", "randaugment_layers"):
            value, least = getattr(self, name), int(name == "batch_size")
            is_int = isinstance(value, int) and not isinstance(value, bool)
            _check(is_int and value >= least, name, value, f"must be an integer >= {least}")
        strength = self.randaugment_magnitude
        _check(0 <= strength <= 10, "randaugment_magnitude", strength, "must lie in [0, 10]")
        for name in ("mixup_alpha", "cutmix_alpha"):
            value = getattr(self, name)
            _check(0 <= value < float("inf"), name, value, "must be >= 0; 0 turns it off")


def deit(**changes: Any) -> ImageConfig:
    """The recipe of DeiT for ImageNet, 1,024 images a step, as ViTTT's official code has it.

    Args:
      **changes: fields to change.

    Returns:
      The configuration; its source is "tfds:imagenet2012".

    >>> deit(source="imagenet").cutmix_alpha
    1.0
    """
    recipe = dict(
        source="tfds:imagenet2012",
        batch_size=1024,
        num_workers=32,
        eval_crop=0.875,
        crop_min_area=0.08,
        flip=0.5,
        randaugment_layers=2,
        randaugment_magnitude=9.0,
        erase=0.25,
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
        label_smoothing=0.1,
    )
    return ImageConfig(**recipe | changes)


def _check(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raises ValueError(name, value, rule) unless `condition` holds."""
    if not condition:
        raise ValueError(f"config.data.{name}={value!r}: {rule}")
