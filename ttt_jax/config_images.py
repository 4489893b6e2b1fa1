"""The typed configuration of image data: where the images come from and how they are varied."""

import dataclasses
from typing import Any

from ttt_jax.config_checks import check, check_count, check_number


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
        rule = 'name "builtin", a folder or "tfds:NAME"'
        check(bool(self.source), "data.source", self.source, rule)
        intervals = {
            "eval_fraction": "(0, 1)", "label_smoothing": "[0, 1)", "eval_crop": "(0, 1]",
            "crop_min_area": "(0, 1]", "flip": "[0, 1]", "erase": "[0, 1]",
            "randaugment_magnitude": "[0, 10]", "mixup_alpha": "[0, inf)",
            "cutmix_alpha": "[0, inf)",
        }  # fmt: skip
        for name, interval in intervals.items():
            check_number(f"data.{name}", getattr(self, name), interval)
        for name in ("batch_size", "shuffle_seed", "num_workers", "randaugment_layers"):
            check_count(f"data.{name}", getattr(self, name), int(name == "batch_size"))


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
