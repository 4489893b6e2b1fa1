"""The typed configuration of posed views: which scenes, and which of their views are seen."""

import dataclasses

from ttt_jax.config_checks import check, check_count, check_number

SAMPLING = ("random", "nearest")
HELD_OUT = ("scenes", "views")


@dataclasses.dataclass(kw_only=True, slots=True)
class ViewsConfig:
    """Scenes of posed images, and how examples of input and target views are drawn from them.

    Attributes:
      source: "builtin" (scenes that the project renders itself, new ones at every step), the path
        of a camera file of LaCT's JSON format or of a JSON list of such files, or a folder: of
        scenes with such a file each, or of RealEstate10K's .txt files.
      frames: folder of RealEstate10K's frames, NAME/TIMESTAMP.png or .jpg for NAME.txt; "" takes
        the source folder itself.
      height: rows of the images given to the model, in pixels; a multiple of its patch size.
      width: columns.
      input_views: views that the model sees of each scene.
      target_views: views that it renders.
      sampling: which views make an example: "random" ones, or the "nearest" to one of them.
      held_out: what evaluation is on: "scenes" that training never sees, or "views", of scenes
        that it does see.
      eval_fraction: part of the scenes (at least one), or of each scene's views, held out; unused
        by "builtin".
      eval_scenes: scenes of an evaluation with "builtin".
      centre_cameras: express each example's cameras in the mean frame of its input views, with the
        farthest of them at distance 1; for scenes of arbitrary place and scale (RealEstate10K).
      lpips_file: .npz of the weights for LPIPS (see `ttt_jax.tasks.lpips`), which is then part of
        every evaluation; "" for none.
      lpips_weight: of LPIPS in the loss, beside the squared error; 0 leaves it out. Official
        training has 1, from step 5,000 on.
      batch_size: scenes of one optimizer step, over all processes and accumulation steps, B.
      shuffle_seed: seed of the order of the scenes and of the views.
      num_workers: reader processes; 0 reads in the training process.

    >>> ViewsConfig(height=64, width=96).validate()
    """

    source: str = "builtin"
    frames: str = ""
    height: int = 32
    width: int = 32
    input_views: int = 4
    target_views: int = 4
    sampling: str = "random"
    held_out: str = "scenes"
    eval_fraction: float = 0.1
    eval_scenes: int = 32
    centre_cameras: bool = False
    lpips_file: str = ""
    lpips_weight: float = 0.0
    batch_size: int = 8
    shuffle_seed: int = 0
    num_workers: int = 0

    def cut_by_seq(self) -> tuple[str, ...]:
        """Names the fields that mesh.seq must divide.

        >>> ViewsConfig().cut_by_seq()
        ('input_views', 'target_views')
        """
        return ("input_views", "target_views")

    def validate(self) -> None:
        """Checks every field. Raises ValueError naming the field, its value and the rule."""
        counts = ("height", "width", "input_views", "target_views", "eval_scenes", "batch_size")
        for name in (*counts, "shuffle_seed", "num_workers"):
            check_count(f"data.{name}", getattr(self, name), int(name in counts))
        for name, allowed in (("sampling", SAMPLING), ("held_out", HELD_OUT)):
            value = getattr(self, name)
            check(value in allowed, f"data.{name}", value, f"must be one of {allowed}")
        check_number("data.eval_fraction", self.eval_fraction, "(0, 1)")
        check_number("data.lpips_weight", self.lpips_weight, "[0, inf)")
        builtin, weight = self.source == "builtin", self.lpips_weight
        rule = "needs the network's weights: name their file in config.data.lpips_file"
        check(not weight or bool(self.lpips_file), "data.lpips_weight", weight, rule)
        rule = 'name "builtin", a camera file, a list of them, or a folder'
        check(bool(self.source), "data.source", self.source, rule)
        rule = 'is for RealEstate10K alone; "builtin" has no frames'
        check(not (builtin and self.frames), "data.frames", self.frames, rule)
        rule = '"builtin" makes new scenes at every step; hold out "scenes"'
        check(not builtin or self.held_out == "scenes", "data.held_out", self.held_out, rule)
