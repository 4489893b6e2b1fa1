"""The typed configuration of a training run: dataclasses, rules, and a JSON form.

A run is one `Config` of five parts: model, data, optimizer, train, mesh. The dataclasses are
mutable because absl's ``--config.part.field=value`` flags write into them; call
`Config.validate` once all overrides are in, before any work starts.
"""

import dataclasses
import importlib
import json
from typing import Any

from ttt_jax.config_checks import check, check_count, check_number

_PACKAGE = "ttt_jax"


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from and how it is cut into batches.

    Attributes:
      source: "builtin" (text that comes with Python), a path or glob of .txt, .jsonl or .parquet
        files, or a folder of ArrayRecord shards written by launch/tokenize_text.py; several with
        their shares of the training rows as "books/*.txt=3;builtin=1".
      tokenizer: "bytes", or the path of a SentencePiece .model or Hugging Face .json file.
      eval_fraction: part of the documents held out for evaluation, in (0, 1).
      sequence_length: tokens of a row, T.
      batch_size: rows of one optimizer step, over all processes and accumulation steps, B.
      shuffle_seed: seed of the order of the documents.
      num_workers: reader processes; 0 reads in the training process.
      pack: several documents in one row; else one document a row.
      reset_documents: the documents of a row do not see each other: attention stops at their
        bounds and fast weights start anew. False takes a row as one text, as the published LaCT
        training does, which is faster on a GPU.

    >>> DataConfig(sequence_length=256).validate()
    """

    source: str = "builtin"
    tokenizer: str = "bytes"
    eval_fraction: float = 0.05
    sequence_length: int = 512
    batch_size: int = 8
    shuffle_seed: int = 0
    num_workers: int = 0
    pack: bool = True
    reset_documents: bool = True

    def cut_by_seq(self) -> tuple[str, ...]:
        """Names the fields that mesh.seq must divide.

        >>> DataConfig().cut_by_seq()
        ('sequence_length',)
        """
        return ("sequence_length",)

    def separates_documents(self) -> bool:
        """Tells whether the model must be told where documents end.

        A row of one document needs no bounds: nothing sees the padding behind it.

        >>> DataConfig(pack=False).separates_documents()
        False
        """
        return self.pack and self.reset_documents

    def validate(self) -> None:
        """Checks every field. Raises ValueError naming the field, its value and the rule."""
        check(bool(self.source), "data.source", self.source, 'name "builtin" or a path')
        check(bool(self.tokenizer), "data.tokenizer", self.tokenizer, 'name "bytes" or a path')
        check_number("data.eval_fraction", self.eval_fraction, "(0, 1)")
        check_count("data.sequence_length", self.sequence_length, 1)
        check_count("data.batch_size", self.batch_size, 1)
        check_count("data.shuffle_seed", self.shuffle_seed, 0)
        check_count("data.num_workers", self.num_workers, 0)


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW or Muon under a linear warm-up and a cosine decay.

    Attributes:
      name: "adamw", or "muon" (matrices inside the layers by Muon, everything else by AdamW).
      learning_rate: peak rate of AdamW.
      muon_learning_rate: peak rate of Muon's matrices; the update has singular values near
        sqrt(max(1, fan_out / fan_in)), so it is larger than AdamW's. Follows the same schedule.
      end_fraction: rate at the last step as a fraction of the peak.
      warmup_steps: steps from rate 0 to the peak.
      b1, b2, eps: Adam's moments and its guard against a division by zero.
      muon_momentum: Muon's (Nesterov) momentum.
      weight_decay: decoupled decay of every matrix; norms, gains and biases are not decayed.
      clip_norm: the gradient is scaled down to this global L2 norm; 0 turns clipping off.

    >>> OptimizerConfig(name="muon").validate()
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    muon_learning_rate: float = 0.02
    end_fraction: float = 0.1
    warmup_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def validate(self) -> None:
        """Checks every field. Raises ValueError naming the field, its value and the rule."""
        known = self.name in ("adamw", "muon")
        check(known, "optimizer.name", self.name, 'must be "adamw" or "muon"')
        check_count("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("learning_rate", "muon_learning_rate", "weight_decay"):
            check_number(f"optimizer.{name}", getattr(self, name), "[0, 10]")
        for name in ("b1", "b2", "muon_momentum"):
            check_number(f"optimizer.{name}", getattr(self, name), "[0, 1)")
        check_number("optimizer.end_fraction", self.end_fraction, "[0, 1]")
        check_number("optimizer.eps", self.eps, "(0, inf)")
        check_number("optimizer.clip_norm", self.clip_norm, "[0, inf]")


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Length of the run, and what it writes when.

    Attributes:
      steps: optimizer steps, skipped non-finite ones included; 0 writes the initial checkpoint.
      seed: seed of the initial parameters.
      init_from: WORKDIR or WORKDIR/STEP of another run, or of launch/convert.py, whose parameters a
        new run begins with (their moving average where that run kept one), instead of drawn ones;
        optimizer, data and schedule begin afresh. Read once: a resumed run keeps the field as it
        is, and does not need the folder.
      accumulation_steps: parts into which a batch is cut; the result is that of the whole batch.
      loss_chunk: positions of each row whose logits exist at one time.
      log_every: steps between two progress lines.
      eval_every: steps between two evaluations; 0 evaluates at the end alone.
      eval_batches: batches of an evaluation during training, 0 = all; the last one covers all.
      save_every: steps between two checkpoints; the last step is always saved.
      ema_decay: decay a step of a moving average of the parameters, which is what is evaluated;
        0 keeps none.
      keep: newest checkpoints kept on disk.
      max_nonfinite_steps: consecutive skipped steps that are borne; one more ends the run with
        an exit code other than 0.
      profile_steps: steps recorded by the JAX profiler, after the first three; 0 = none.

    >>> TrainConfig(steps=0).validate()
    """

    steps: int = 1000
    seed: int = 0
    init_from: str = ""
    accumulation_steps: int = 1
    loss_chunk: int = 1024
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 0
    save_every: int = 500
    ema_decay: float = 0.0
    keep: int = 3
    max_nonfinite_steps: int = 20
    profile_steps: int = 0

    def validate(self) -> None:
        """Checks every field. Raises ValueError naming the field, its value and the rule."""
        for name in (
            "steps",
            "seed",
            "eval_every",
            "eval_batches",
            "max_nonfinite_steps",
            "profile_steps",
        ):
            check_count(f"train.{name}", getattr(self, name), 0)
        known = isinstance(self.init_from, str)
        check(known, "train.init_from", self.init_from, "must be a path, or empty for none")
        for name in ("accumulation_steps", "loss_chunk", "log_every", "save_every"):
            check_count(f"train.{name}", getattr(self, name), 1)
        check_number("train.ema_decay", self.ema_decay, "[0, 1)")
        # With one checkpoint kept, a corrupt newest one would leave nothing to fall back to.
        check_count("train.keep", self.keep, 2)


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
    """Devices along the axes of the mesh; -1 for one of them means "all that are left".

    Attributes:
      data: copies of the model, each on its own rows of the batch.
      fsdp: devices that split the rows and also hold one slice of each parameter.
      seq: devices that split the tokens of each row of text, or the views of each scene, and
        divides them; images are not cut: it splits rows of the batch, like data.
      model: devices that split heads, hidden units and vocabulary.

    >>> MeshConfig(fsdp=8).validate()
    """

    data: int = -1
    fsdp: int = 1
    seq: int = 1
    model: int = 1

    def validate(self) -> None:
        """Checks every field. Raises ValueError naming the field, its value and the rule."""
        sizes = (self.data, self.fsdp, self.seq, self.model)
        for name, size in zip(("data", "fsdp", "seq", "model"), sizes, strict=True):
            check(size == -1 or size >= 1, f"mesh.{name}", size, "must be -1 or at least 1")
        check(sizes.count(-1) <= 1, "mesh", sizes, "at most one axis may be -1")


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
    """One training run.

    Attributes:
      model: the model's own configuration, a dataclass with `validate()`, for example
        `ttt_jax.models.lact_llm.LactLLMConfig`.
      data: where the examples come from; its type chooses the task: `DataConfig` is text.
      optimizer, train, mesh: the parts above.
    """

    model: Any
    data: Any = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def validate(self) -> None:
        """Checks every part and what they must agree on.

        Raises:
          ValueError: naming the field, its value and the rule that it breaks.
        """
        for part in (self.model, self.data, self.optimizer, self.train, self.mesh):
            part.validate()
        parts = self.train.accumulation_steps
        rule = f"must be a multiple of config.train.accumulation_steps={parts}"
        check(self.data.batch_size % parts == 0, "data.batch_size", self.data.batch_size, rule)
        if self.mesh.seq > 1:
            rule = f"must be a multiple of config.mesh.seq={self.mesh.seq}"
            for name in self.data.cut_by_seq():
                count = getattr(self.data, name)
                check(count % self.mesh.seq == 0, f"data.{name}", count, rule)


def to_dict(config: Any) -> dict[str, Any]:
    """Turns a configuration dataclass into nested dicts that name their classes.

    Args:
      config: a dataclass whose fields are dataclasses, numbers, strings, booleans, None or tuples.

    Returns:
      {"class": "module.Name", field: value, ...}, ready for `json.dumps`; tuples become lists.

    Raises:
      ValueError: a field holds something that JSON would not give back.

    >>> to_dict(MeshConfig())
    {'class': 'ttt_jax.config.MeshConfig', 'data': -1, 'fsdp': 1, 'seq': 1, 'model': 1}
    """
    out: dict[str, Any] = {"class": f"{type(config).__module__}.{type(config).__qualname__}"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out[field.name] = to_dict(value)
        elif isinstance(value, tuple):
            out[field.name] = list(value)
        elif value is None or isinstance(value, bool | int | float | str):
            out[field.name] = value
        else:
            raise ValueError(
                f"{out['class']}.{field.name}={value!r}: use a number, string, "
                "boolean, None, tuple or dataclass, which JSON can give back"
            )
    return out


def from_dict(tree: dict[str, Any]) -> Any:
    """Rebuilds the dataclass that `to_dict` wrote; a field that is missing takes its default.

    Raises:
      ValueError: the class is not a dataclass of this package, or a field is unknown to it.

    >>> from_dict(to_dict(MeshConfig(fsdp=4))).fsdp
    4
    """
    module_name, _, class_name = tree.get("class", "").rpartition(".")
    if module_name.split(".")[0] != _PACKAGE:
        raise ValueError(f"class={tree.get('class')!r} must name a class of {_PACKAGE}")
    cls = getattr(importlib.import_module(module_name), class_name, None)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"class={tree['class']!r}: no such configuration dataclass")
    known = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in tree.items() if name != "class"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{tree['class']} has no field {unknown[0]!r}; it has {sorted(known)}")
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = from_dict(value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return cls(**values)


def to_json(config: Any) -> str:
    """Writes a configuration as indented JSON (see `to_dict`)."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str) -> Any:
    """Reads what `to_json` wrote (see `from_dict`)."""
    return from_dict(json.loads(text))


def differences(ours: Any, theirs: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Lists the fields in which two configurations differ.

    Args:
      ours, theirs: configuration dataclasses.
      prefix: written before each field's name.

    Returns:
      (dotted field name, our value, their value) for each difference, in the order of the fields.

    >>> differences(MeshConfig(), MeshConfig(fsdp=2))
    [('fsdp', 1, 2)]
    """
    if type(ours) is not type(theirs):
        return [(prefix.rstrip(".") or "config", type(ours).__name__, type(theirs).__name__)]
    found: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):
            found += differences(a, b, f"{prefix}{field.name}.")
        elif a != b:
            found.append((prefix + field.name, a, b))
    return found
