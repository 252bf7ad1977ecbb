"""Who an image is and which weights encode it: what changes a name, what does not, and that processes agree."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from octavo.multimodal import RgbImage, fingerprints, image_id, load_image, same_image, second_digest
from octavo.multimodal import weights_fingerprint as fingerprint

rng = np.random.default_rng(2)
COLOUR = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
IMAGE = RgbImage(COLOUR)
DIGESTS = [image_id, second_digest]


def reference(image, preprocessing, encoder):
    """The documented layout, written out: person, then (tag length, tag, content length, content) five times."""
    data = b""
    for tag, content in [
        (b"preprocessing", preprocessing),
        (b"encoder", encoder),
        (b"mode", image.mode.encode()),
        (b"size", image.height.to_bytes(8, "little") + image.width.to_bytes(8, "little")),
        (b"pixels", image.pixels.tobytes()),
    ]:
        data += len(tag).to_bytes(4, "little") + tag + len(content).to_bytes(8, "little") + content
    return blake2b(data, digest_size=32, person=b"octavo-image-v1").digest()


def test_the_layout_of_what_is_hashed():
    assert image_id(IMAGE, b"prep", b"encoder") == reference(IMAGE, b"prep", b"encoder")


@pytest.mark.parametrize("digest", DIGESTS)
def test_every_field_counts(digest):
    transposed = RgbImage(COLOUR.reshape(9, 6, 3))  # equal bytes, another shape
    one_bit = COLOUR.copy()
    one_bit[-1, -1, -1] ^= 1
    names = [
        digest(IMAGE, "pad 336", "vit"),
        digest(transposed, "pad 336", "vit"),
        digest(RgbImage(COLOUR.reshape(1, 54, 3)), "pad 336", "vit"),
        digest(RgbImage(one_bit), "pad 336", "vit"),
        digest(RgbImage(COLOUR[..., ::-1]), "pad 336", "vit"),
        digest(RgbImage(COLOUR[:, ::-1]), "pad 336", "vit"),
        digest(RgbImage(COLOUR, mode="RGBA"), "pad 336", "vit"),
        digest(IMAGE, "crop 336", "vit"),
        digest(IMAGE, "pad 336", "siglip"),
        digest(IMAGE, "pad 336v", "it"),  # what ends one field begins the next
        digest(IMAGE, "vit", "pad 336"),
    ]
    assert len(set(names)) == len(names) and all(len(name) == 32 for name in names)


def test_the_two_digests_have_nothing_in_common():
    assert image_id(IMAGE, "p", "e") != second_digest(IMAGE, "p", "e")


def test_30_by_150_is_not_150_by_30():
    wide = np.zeros((30, 150, 3), np.uint8)
    assert image_id(RgbImage(wide), "p", "e") != image_id(RgbImage(wide.reshape(150, 30, 3)), "p", "e")


def test_two_palettes_with_equal_indices_differ():
    def picture(colours):
        image = Image.new("P", (8, 8), 1)
        image.putpalette(colours)
        return load_image(image)

    red, blue = picture([0, 0, 0, 255, 0, 0]), picture([0, 0, 0, 0, 0, 255])
    assert image_id(red, "p", "e") != image_id(blue, "p", "e") and not same_image(red, blue)


def test_how_it_was_given_does_not_count():
    """A file's format, its name and the frames behind the first are not part of who an image is."""
    for other in (
        RgbImage(COLOUR.copy(), format="PNG", frames=3),
        load_image(COLOUR),
        load_image(Image.fromarray(COLOUR)),
    ):
        assert image_id(other, "p", "e") == image_id(IMAGE, "p", "e")
        assert second_digest(other, b"p", b"e") == second_digest(IMAGE, "p", "e")
        assert same_image(other, IMAGE)
    assert image_id(pickle.loads(pickle.dumps(IMAGE)), "p", "e") == image_id(IMAGE, "p", "e")


def test_300_images_have_300_names():
    images = [RgbImage(rng.integers(0, 2, (4, 4, 3), dtype=np.uint8)) for _ in range(300)]
    for digest in DIGESTS:
        assert len({digest(image, "p", "e") for image in images}) == 300


small = st.builds(
    lambda height, width, values, mode: RgbImage(np.resize(np.array(values, np.uint8), (height, width, 3)), mode=mode),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
    st.sampled_from(["L", "RGB"]),
)
setting = st.sampled_from(["a", "aa", "b"])


@given(small, small, setting, setting, setting, setting)
def test_equal_names_mean_equal_images_and_settings(one, other, prep, other_prep, encoder, other_encoder):
    alike = (
        one.pixels.shape == other.pixels.shape
        and (one.pixels == other.pixels).all()
        and (one.mode, prep, encoder) == (other.mode, other_prep, other_encoder)
    )
    for digest in DIGESTS:
        assert (digest(one, prep, encoder) == digest(other, other_prep, other_encoder)) == alike
    same_settings = (prep, encoder) == (other_prep, other_encoder)
    assert (same_image(one, other) and same_settings) == alike


@pytest.mark.parametrize("digest", DIGESTS)
@pytest.mark.parametrize("empty", ["", b""])
def test_no_identity_without_its_settings(digest, empty):
    with pytest.raises(ValueError, match="without its preprocessing"):
        digest(IMAGE, empty, "e")
    with pytest.raises(ValueError, match="without its encoder"):
        digest(IMAGE, "p", empty)


def test_a_collision_is_found_by_either_check():
    """Suppose two images had one name: the pixels, and the second digest, still tell them apart."""
    other = RgbImage(COLOUR[::-1])
    assert not same_image(IMAGE, other) and not same_image(IMAGE, RgbImage(COLOUR, mode="L"))
    assert second_digest(IMAGE, "p", "e") != second_digest(other, "p", "e")


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def tower(activation=nn.GELU, *, eps=1e-5, width=4):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, 4), activation(), nn.LayerNorm(4, eps=eps))
    module.register_buffer("grid", torch.arange(3), persistent=False)
    module.register_buffer("scale", torch.tensor(2.0))
    return module


def changed(change):
    module = tower()
    change(module)
    return module


def set_bit(module):
    module[0].weight.data[0, 0] += 1e-3


def rename(module):
    module.add_module("3", module[2])


TOWERS = {
    "itself": tower(),
    "another activation": tower(QuickGELU),
    "the tanh of GELU": tower(lambda: nn.GELU(approximate="tanh")),
    "another eps": tower(eps=1e-6),
    "another shape": tower(width=5),
    "one weight": changed(set_bit),
    "a module more": changed(rename),
    "a buffer": changed(lambda m: m.scale.add_(1)),
    "a buffer that is not saved": changed(lambda m: m.grid.add_(1)),
    "bf16": tower().bfloat16(),
    "fp64": tower().double(),
}


def test_every_part_of_a_module_counts():
    prints = {name: fingerprint(module) for name, module in TOWERS.items()}
    assert len(set(prints.values())) == len(TOWERS)
    assert all(len(value) == 32 for value in prints.values())


def test_copies_agree():
    module = tower()
    other_strides = tower()
    other_strides[0].weight = nn.Parameter(module[0].weight.detach().t().contiguous().t())
    for copied in (tower(), copy.deepcopy(module), module.requires_grad_(False), module.eval(), other_strides):
        assert fingerprint(copied) == fingerprint(TOWERS["itself"])


@pytest.fixture
def count(monkeypatch):
    """How often weights were read."""
    calls = []
    really = fingerprints._digest

    def digest(names, tensors):
        calls.append(names)
        return really(names, tensors)

    monkeypatch.setattr(fingerprints, "_digest", digest)
    return calls


def test_it_is_computed_once(count):
    module = tower()
    assert fingerprint(module) == fingerprint(module) == fingerprint(module)
    assert len(count) == 1


@torch.no_grad()
def trained(module):
    module[0].weight.sub_(0.1)


def replaced(module):
    module[0].weight = nn.Parameter(module[0].weight.detach() + 1)


def rewrapped(module):
    """Another parameter at the same address and of the same version as the one before."""
    old = module[0].weight
    old.data.add_(1)
    module[0].weight = nn.Parameter(old.data)
    assert (old.data_ptr(), old._version) == (module[0].weight.data_ptr(), module[0].weight._version)


def reloaded(module):
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


def cast(module):
    module.bfloat16()


def swapped(module):
    module[1] = QuickGELU()


@pytest.mark.parametrize("change", [trained, replaced, rewrapped, reloaded, cast, swapped], ids=lambda f: f.__name__)
def test_a_change_is_noticed(change, count):
    module = tower()
    module[0].weight = nn.Parameter(torch.eye(4))
    before = fingerprint(module)
    change(module)
    after = fingerprint(module)
    assert after != before and len(count) == 2
    assert fingerprint(copy.deepcopy(module)) == after


def test_a_module_that_is_gone_is_forgotten():
    gc.collect()  # those of earlier tests
    module = tower()
    fingerprint(module)
    known = len(fingerprints._known)
    del module
    gc.collect()
    assert len(fingerprints._known) == known - 1


def test_inference_tensors_count_too():
    with torch.inference_mode():
        module = tower()
    assert fingerprint(module) == fingerprint(TOWERS["itself"])


@pytest.mark.parametrize("source", [None, {"weight": torch.zeros(1)}, torch.zeros(1)], ids=lambda s: type(s).__name__)
def test_what_has_no_weights(source):
    with pytest.raises(ValueError, match=type(source).__name__):
        fingerprint(source)


def test_weights_that_are_not_there():
    with pytest.raises(ValueError, match="Linear cannot be read"):
        fingerprint(nn.Linear(4, 4, device="meta"))


def test_a_file_of_weights(tmp_path, monkeypatch):
    path, link = tmp_path / "w.safetensors", tmp_path / "link"
    path.write_bytes(bytes(range(256)) * 9000)  # more than one piece
    link.symlink_to(path)
    first = fingerprint(path)
    assert len(first) == 32 and first == fingerprint(str(path)) == fingerprint(link)
    before = fingerprints._read.cache_info().misses
    assert fingerprint(path) == first and fingerprints._read.cache_info().misses == before
    path.write_bytes(bytes(range(256)) * 8999 + bytes(256))
    os.utime(path, ns=(1, 1))
    assert fingerprint(path) != first


def test_what_is_no_file_of_weights(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, words in [
        (tmp_path, "not a regular"),
        (tmp_path / "fifo", "not a regular"),
        (tmp_path / "no", "cannot be"),
    ]:
        with pytest.raises(ValueError, match=words):
            fingerprint(path)


def test_processes_agree():
    """Another process with another hash seed gives the same names."""
    code = """
import numpy, torch
from torch import nn
from octavo.multimodal import RgbImage, image_id, second_digest, weights_fingerprint
image = RgbImage(numpy.arange(54, dtype=numpy.uint8).reshape(3, 6, 3))
module = nn.Sequential(nn.Linear(3, 2), nn.GELU())
nn.init.constant_(module[0].weight, 0.5); nn.init.constant_(module[0].bias, 0.25)
print(image_id(image, "p", "e").hex(), second_digest(image, "p", "e").hex(), weights_fingerprint(module).hex())
"""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-P", "-c", code]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    image = RgbImage(np.arange(54, dtype=np.uint8).reshape(3, 6, 3))
    module = nn.Sequential(nn.Linear(3, 2), nn.GELU())
    nn.init.constant_(module[0].weight, 0.5)
    nn.init.constant_(module[0].bias, 0.25)
    here = image_id(image, "p", "e"), second_digest(image, "p", "e"), fingerprint(module)
    assert there.split() == [value.hex() for value in here]
