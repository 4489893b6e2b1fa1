"""Held-out examples that are in the training split, too: images byte for byte, and a warning."""

import hashlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from ttt_jax.data.image_sources import ImageSet

_MOST = 2**30  # bytes that are read


def shared_images(train: ImageSet, held_out: ImageSet) -> list[str]:
    """Names the held-out images that are in the training split, too.

    Contents are compared where sizes are equal. Not searched, so that a start is not the reading of
    a whole set: sets of TFDS, folders of more than 20,000 files, and where the images of sizes
    that both splits have are more than 1 GiB.

    Args:
      train, held_out: the splits.

    Returns:
      Their names, in the order of the held-out ones.

    >>> from ttt_jax.data.image_sources import ArraySet
    >>> images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    >>> train, held_out = (ArraySet(x, np.zeros(len(x)), ("a",)) for x in (images, images[1:2]))
    >>> shared_images(train, held_out)
    ['image 0']
    """
    sizes = train.sizes(), held_out.sizes()
    if sizes[0] is None or sizes[1] is None:
        return []
    both = np.intersect1d(*sizes)
    chosen = [np.flatnonzero(np.isin(found, both)) for found in sizes]
    load = sum(int(found[places].sum()) for found, places in zip(sizes, chosen, strict=True))
    if load > _MOST:
        return []
    seen = {digest for _, digest in _digests(train, chosen[0])}
    return [name for name, digest in _digests(held_out, chosen[1]) if digest in seen]


def _digests(images: ImageSet, places: np.ndarray) -> Iterator[tuple[str, bytes]]:
    """Names and hashes of some images."""
    for place in places.tolist():
        name, content = images.content(place)
        yield name, hashlib.sha256(content).digest()


def warn_of_shared(count: int, first: Sequence[str], what: str, equal: str, source: str) -> None:
    """Logs a warning of held-out examples that are trained on, too; nothing where there are none.

    Args:
      count: how many there are.
      first: the names of the first ones.
      what: they are, "images" for example.
      equal: what is equal of them.
      source: of the data.
    """
    if count:
        logging.getLogger("ttt_jax").warning(
            "%d held-out %s are in the training split, too, with equal %s (%s): held-out scores "
            "are better than they should be; leave duplicates out of source=%r",
            count, what, equal, "; ".join(first) + "; ..." * (count > len(first)), source,
        )  # fmt: skip
