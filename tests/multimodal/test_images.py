"""Every kind of picture that is taken, and the pixels that it must give, worked out here by the documented rule."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.Image import Transpose

from octavo.multimodal import (
    ImageDecodeError,
    ImageError,
    ImageFormatError,
    ImageLimitError,
    ImagePolicy,
    ImageSourceError,
    RgbImage,
    fit,
    load_image,
)

BACKGROUND = (10, 200, 77)
POLICY = ImagePolicy(background=BACKGROUND)

rng = np.random.default_rng(0)
COLOUR = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREY = rng.integers(0, 256, (6, 9), dtype=np.uint8)
ALPHA = rng.integers(0, 256, (6, 9), dtype=np.uint8)
INDEX = rng.integers(0, 4, (6, 9), dtype=np.uint8)
BITS = GREY > 127
DEEP = rng.integers(0, 65_536, (6, 9), dtype=np.uint16)
PALETTE = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [40, 50, 60]], np.uint8)
INK = rng.integers(0, 256, (6, 9, 4), dtype=np.uint8)
OPAQUE = np.full_like(ALPHA, 255)


def rgb(grey):
    return np.repeat(np.asarray(grey, np.uint8)[..., None], 3, -1)


def over(colour, alpha):
    """colour * alpha + background * (1 - alpha), rounded half up, in integers."""
    c, a, b = (np.asarray(x, np.int64) for x in (colour, np.asarray(alpha)[..., None], BACKGROUND))
    return ((2 * (c * a + b * (255 - a)) + 255) // 510).astype(np.uint8)


def scaled(deep):
    """v * 255 / 65535, rounded half up, in integers."""
    return ((2 * 255 * np.asarray(deep, np.int64) + 65_535) // (2 * 65_535)).astype(np.uint8)


def palette(transparency=None):
    image = Image.fromarray(INDEX).convert("P")
    image.putdata(INDEX.reshape(-1).tolist())
    image.putpalette(PALETTE.reshape(-1).tolist())
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def with_info(image, **info):
    image.info.update(info)
    return image


def encoded(image, kind, **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def stack(*channels):
    return np.concatenate([c if c.ndim == 3 else c[..., None] for c in channels], -1)


def ink_to_rgb(ink):
    """Without a profile: light that no ink takes away, (255 - K) * (255 - C) / 255, rounded towards the ink."""
    c, k = ink[..., :3].astype(np.int64), ink[..., 3:].astype(np.int64)
    light = 255 - k
    return (light - (2 * c * light + 255) // 510).astype(np.uint8)


FEW_ALPHAS = np.array([0, 128, 255, 7], np.uint8)
RGBA = Image.fromarray(stack(COLOUR, ALPHA))
LA = Image.fromarray(stack(GREY, ALPHA))

KINDS = {
    # name: (source, its mode, pixels)
    "RGB": (Image.fromarray(COLOUR), "RGB", COLOUR),
    "RGB png": (encoded(Image.fromarray(COLOUR), "PNG"), "RGB", COLOUR),
    "RGB bmp": (encoded(Image.fromarray(COLOUR), "BMP"), "RGB", COLOUR),
    "RGB webp": (encoded(Image.fromarray(COLOUR), "WEBP", lossless=True), "RGB", COLOUR),
    "RGB tiff": (encoded(Image.fromarray(COLOUR), "TIFF", compression="tiff_lzw"), "RGB", COLOUR),
    "RGB ppm": (encoded(Image.fromarray(COLOUR), "PPM"), "RGB", COLOUR),
    "RGBA opaque": (Image.fromarray(stack(COLOUR, OPAQUE)), "RGBA", COLOUR),
    "RGBA": (RGBA, "RGBA", over(COLOUR, ALPHA)),
    "RGBA png": (encoded(RGBA, "PNG"), "RGBA", over(COLOUR, ALPHA)),
    "RGBA webp": (encoded(RGBA, "WEBP", lossless=True, exact=True), "RGBA", over(COLOUR, ALPHA)),
    "RGBA alpha 0": (Image.fromarray(stack(COLOUR, OPAQUE * 0)), "RGBA", over(COLOUR, OPAQUE * 0)),
    "RGB one colour transparent": (
        encoded(Image.fromarray(COLOUR), "PNG", transparency=tuple(map(int, COLOUR[2, 3]))),
        "RGB",
        over(COLOUR, np.where(np.equal(COLOUR, COLOUR[2, 3]).all(-1), 0, 255)),
    ),
    "RGBX": (Image.frombytes("RGBX", (9, 6), stack(COLOUR, ALPHA).tobytes()), "RGBX", COLOUR),
    "L": (Image.fromarray(GREY), "L", rgb(GREY)),
    "L jpeg": (encoded(Image.new("L", (8, 8), 90), "JPEG"), "L", rgb(np.full((8, 8), 90))),
    "L one grey transparent": (
        encoded(Image.fromarray(GREY), "PNG", transparency=int(GREY[1, 1])),
        "L",
        over(rgb(GREY), np.where(np.equal(GREY, GREY[1, 1]), 0, 255)),
    ),
    "LA": (LA, "LA", over(rgb(GREY), ALPHA)),
    "LA png": (encoded(LA, "PNG"), "LA", over(rgb(GREY), ALPHA)),
    "La": (Image.fromarray(stack(GREY, OPAQUE)).convert("La"), "La", rgb(GREY)),
    "RGBa": (Image.fromarray(stack(COLOUR, OPAQUE)).convert("RGBa"), "RGBa", COLOUR),
    "1": (Image.fromarray(BITS), "1", rgb(BITS * 255)),
    "1 white transparent": (
        with_info(Image.fromarray(BITS), transparency=255),
        "1",
        over(rgb(BITS * 255), np.where(BITS, 0, 255)),
    ),
    "P": (palette(), "P", PALETTE[INDEX]),
    "P gif": (encoded(palette(), "GIF"), "P", PALETTE[INDEX]),
    "P one index transparent": (
        encoded(palette(), "PNG", transparency=2),
        "P",
        over(PALETTE[INDEX], np.where(INDEX == 2, 0, 255)),
    ),
    "P an alpha each": (
        encoded(palette(), "PNG", transparency=FEW_ALPHAS.tobytes()),
        "P",
        over(PALETTE[INDEX], FEW_ALPHAS[INDEX]),
    ),
    "P gif transparent": (
        encoded(palette(), "GIF", transparency=1),
        "P",
        over(PALETTE[INDEX], np.where(INDEX == 1, 0, 255)),
    ),
    "PA": (palette(FEW_ALPHAS.tobytes()).convert("PA"), "PA", over(PALETTE[INDEX], FEW_ALPHAS[INDEX])),
    "I;16": (Image.fromarray(DEEP), "I;16", rgb(scaled(DEEP))),
    "I;16 png": (encoded(Image.fromarray(DEEP), "PNG"), "I;16", rgb(scaled(DEEP))),
    "I;16 tiff": (encoded(Image.fromarray(DEEP), "TIFF"), "I;16", rgb(scaled(DEEP))),
    "I;16B": (Image.frombytes("I;16B", (9, 6), DEEP.astype(">u2").tobytes()), "I;16", rgb(scaled(DEEP))),
    "I;16 one grey transparent": (
        with_info(Image.fromarray(DEEP), transparency=int(DEEP[4, 4])),
        "I;16",
        over(rgb(scaled(DEEP)), np.where(np.equal(DEEP, DEEP[4, 4]), 0, 255)),
    ),
    "I": (Image.fromarray(DEEP.astype(np.int32)), "I;16", rgb(scaled(DEEP))),
    "I ppm": (encoded(Image.fromarray(DEEP.astype(np.int32)), "PPM"), "I;16", rgb(scaled(DEEP))),
    "CMYK": (Image.frombytes("CMYK", (9, 6), INK.tobytes()), "CMYK", ink_to_rgb(INK)),
    "CMYK tiff": (encoded(Image.frombytes("CMYK", (9, 6), INK.tobytes()), "TIFF"), "CMYK", ink_to_rgb(INK)),
    "YCbCr grey": (Image.fromarray(GREY).convert("YCbCr"), "YCbCr", rgb(GREY)),
    "HSV grey": (Image.merge("HSV", [Image.new("L", (9, 6))] * 2 + [Image.fromarray(GREY)]), "HSV", rgb(GREY)),
    "array RGB": (COLOUR, "RGB", COLOUR),
    "array RGBA": (stack(COLOUR, ALPHA), "RGBA", over(COLOUR, ALPHA)),
    "array grey": (GREY, "L", rgb(GREY)),
    "array grey 3-d": (GREY[..., None], "L", rgb(GREY)),
    "array grey, alpha": (stack(GREY, ALPHA), "LA", over(rgb(GREY), ALPHA)),
    "array bool": (BITS, "1", rgb(BITS * 255)),
    "array bool 3-d": (BITS[..., None], "1", rgb(BITS * 255)),
    "array uint16": (DEEP, "I;16", rgb(scaled(DEEP))),
    "array big-endian": (DEEP.astype(">u2"), "I;16", rgb(scaled(DEEP))),
    "array uint16 RGB": (COLOUR.astype(np.uint16) * 257, "RGB;16", COLOUR),
    "array uint16 RGBA": (stack(COLOUR, ALPHA).astype(np.uint16) * 257, "RGBA;16", over(COLOUR, ALPHA)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pixel(kind):
    source, mode, pixels = KINDS[kind]
    image = load_image(source, POLICY)
    assert image.mode == mode
    np.testing.assert_array_equal(image.pixels, pixels)
    assert image.pixels.dtype == np.uint8 and image.pixels.flags.c_contiguous
    assert (image.height, image.width) == pixels.shape[:2]


def test_the_default_background_is_clips_mean():
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    pixels = load_image(Image.new("RGBA", (4, 4), (0, 0, 0, 0))).pixels
    assert np.abs(pixels / 255 - mean).max() < 1 / 255


def test_transparent_pixels_do_not_turn_black():
    """Resizing first would: the resampler multiplies by alpha, and what is then dropped is the alpha."""
    clear = load_image(Image.new("RGBA", (8, 8), (255, 255, 255, 0)), POLICY)
    assert (fit(clear, 4).pixels == BACKGROUND).all()


def test_palettes_are_converted_before_they_are_resized():
    squeezed = fit(load_image(palette(), POLICY), 3, ImagePolicy(resize="squash"))
    direct = Image.fromarray(PALETTE[INDEX]).resize((3, 3), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(squeezed.pixels, np.asarray(direct))


def test_16_bit_samples_are_scaled_and_rounded():
    every = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    pixels = load_image(every).pixels[..., 0]
    np.testing.assert_array_equal(pixels, scaled(every))
    np.testing.assert_array_equal(pixels.reshape(-1)[::257], np.arange(256))  # an 8-bit picture survives the detour


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cyan_ink_is_cyan(kind):
    """JPEG files of Photoshop's kind hold inverted ink, and say so by their Adobe marker."""
    data = encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), kind)
    assert kind != "JPEG" or b"Adobe" in data
    image = load_image(data)
    assert image.mode == "CMYK"
    assert np.abs(image.pixels.astype(int) - (0, 255, 255)).max() <= 2


def test_floats_and_other_scales_are_refused():
    for image, words in [
        (Image.new("F", (8, 8), 0.5), "'F'"),
        (Image.new("LAB", (8, 8)), "'LAB'"),
        (Image.new("I", (8, 8), 65_536), "65536.*65535"),
        (Image.new("I", (8, 8), -1), "-1 to -1.*65535"),
        (encoded(Image.new("F", (8, 8), 0.5), "TIFF"), "'F'"),
    ]:
        with pytest.raises(ImageFormatError, match=words):
            load_image(image)


REFUSED_DTYPES = ["i1", "i2", "i4", "i8", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "O", "U1", "S1", "M8[s]", "m8[s]"]


@pytest.mark.parametrize("dtype", REFUSED_DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_dtypes_without_a_scale_are_refused(dtype, shape):
    with pytest.raises(ImageFormatError, match=r"has dtype .*(uint8|white is 1.0 or 255.0)"):
        load_image(np.zeros(shape, dtype))


def test_dtypes_refused_and_taken_are_all_there_are():
    taken = {"?", "B", "H"}
    by_name = {np.dtype(name).char for name in REFUSED_DTYPES}
    wide = set(np.typecodes["AllInteger"] + np.typecodes["Float"] + np.typecodes["Complex"]) - taken - by_name
    for char in wide:  # long, long double and what else this machine has
        with pytest.raises(ImageFormatError):
            load_image(np.zeros((8, 8), char))


def test_not_a_number_is_refused_like_any_float():
    with pytest.raises(ImageFormatError, match="float32"):
        load_image(np.full((8, 8, 3), np.nan, np.float32))


@pytest.mark.parametrize("shape", [(), (64,), (8, 8, 0), (8, 8, 5), (8, 8, 8), (1, 8, 8, 3), (8, 8, 3, 1)], ids=str)
def test_shapes_that_are_no_picture(shape):
    with pytest.raises(ImageFormatError, match=r"has shape \["):
        load_image(np.zeros(shape, np.uint8))


def test_bool_is_for_one_channel():
    with pytest.raises(ImageFormatError, match=r"bool with shape \[8, 8, 3\]"):
        load_image(np.zeros((8, 8, 3), bool))


def test_channels_first_is_recognised():
    with pytest.raises(ImageFormatError, match=r"transpose\(1, 2, 0\)"):
        load_image(np.zeros((3, 8, 8), np.uint8))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1, ::-1],
        lambda a: np.repeat(a, 2, 1)[:, ::2],
        lambda a: np.asfortranarray(a),
        lambda a: a.transpose(1, 0, 2),
        lambda a: np.concatenate([a, a], 2)[..., 3:],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: a[..., ::-1],
    ],
)
def test_strides_do_not_matter(view):
    strided = view(COLOUR)
    np.testing.assert_array_equal(load_image(strided).pixels, strided.copy())


class Array(np.ndarray):
    pass


class Text(str):
    pass


class Blob(bytes):
    pass


class Picture(Image.Image):
    pass


class Somewhere:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def test_subclasses_and_other_ways_to_say_the_same(tmp_path):
    data = encoded(Image.fromarray(COLOUR), "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    np.save(tmp_path / "a.npy", COLOUR)
    picture = Picture()
    picture.__dict__.update(Image.fromarray(COLOUR).__dict__)
    sources = [
        path, str(path), Text(path), Somewhere(str(path)), Somewhere(os.fsencode(path)),
        data, Blob(data), bytearray(data), memoryview(data), memoryview(data + data)[: len(data)],
        COLOUR.view(Array), np.load(tmp_path / "a.npy", mmap_mode="r"), picture, Image.open(path),
    ]  # fmt: skip
    for source in sources:
        np.testing.assert_array_equal(load_image(source).pixels, COLOUR)
    np.testing.assert_array_equal(load_image(np.asmatrix(GREY)).pixels, rgb(GREY))


@pytest.mark.parametrize("source", [None, 3, [COLOUR], io.BytesIO(b"x"), object()], ids=lambda s: type(s).__name__)
def test_what_is_no_source(source):
    with pytest.raises(ImageSourceError, match=type(source).__name__):
        load_image(source)


def test_a_tensor_is_told_the_way():
    torch = pytest.importorskip("torch")
    with pytest.raises(ImageSourceError, match=r"Tensor.*tensor\.numpy\(\)"):
        load_image(torch.zeros(8, 8, 3, dtype=torch.uint8))


def test_what_is_under_a_mask_is_not_guessed():
    with pytest.raises(ImageSourceError, match="filled"):
        load_image(np.ma.masked_equal(GREY, 3))


SEEN = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}
"""What a viewer shows of stored pixels, by EXIF orientation (Exif 2.32, tag 274)."""


def exif(**tags):
    block = Image.Exif()
    for tag, value in tags.items():
        block[int(tag[1:])] = value
    return block


@pytest.mark.parametrize("orientation", SEEN)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_comes_first(kind, orientation):
    settings = {"lossless": True} if kind == "WEBP" else {}
    stored = np.asarray(Image.open(io.BytesIO(encoded(Image.fromarray(COLOUR), kind, **settings))))
    data = encoded(Image.fromarray(COLOUR), kind, exif=exif(_274=orientation), **settings)
    seen = SEEN[orientation](stored)
    np.testing.assert_array_equal(load_image(data).pixels, seen)
    lazy = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(load_image(lazy).pixels, seen)
    np.testing.assert_array_equal(load_image(lazy).pixels, seen)  # and it is not turned twice


@pytest.mark.parametrize("mode", ["1", "P", "LA", "I;16", "I", "RGBA", "CMYK", "L"])
def test_every_mode_can_be_turned(mode):
    straight = Image.fromarray(DEEP) if mode == "I;16" else Image.fromarray(COLOUR).convert(mode)
    turned = straight.copy()
    turned.getexif()[274] = 6
    np.testing.assert_array_equal(load_image(turned).pixels, np.rot90(load_image(straight).pixels, -1))


@pytest.mark.parametrize("orientation", [0, 9, 65_535, "6", None])
def test_an_orientation_that_means_nothing_turns_nothing(orientation):
    image = Image.fromarray(COLOUR)
    if orientation is not None:
        image.getexif()[274] = orientation
    np.testing.assert_array_equal(load_image(image).pixels, COLOUR)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "block",
    [b"Exif\0\0", b"Exif\0\0garbage" * 9, b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0" + bytes(65_000)],
    ids=["empty", "garbage", "points away", "huge"],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_that_cannot_be_read_turns_nothing(kind, block):
    settings = {"lossless": True} if kind == "WEBP" else {}
    plain = load_image(encoded(Image.fromarray(COLOUR), kind, **settings))
    np.testing.assert_array_equal(
        load_image(encoded(Image.fromarray(COLOUR), kind, exif=block, **settings)).pixels, plain.pixels
    )


def test_a_large_exif_block_with_an_orientation_is_read():
    data = encoded(Image.fromarray(COLOUR), "PNG", exif=exif(_274=3, _270="x" * 1_000_000))
    np.testing.assert_array_equal(load_image(data).pixels, COLOUR[::-1, ::-1])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_colour_profiles_are_not_applied(kind):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    plain = load_image(encoded(Image.fromarray(COLOUR), kind))
    with_profile = encoded(Image.fromarray(COLOUR), kind, icc_profile=profile)
    assert Image.open(io.BytesIO(with_profile)).info["icc_profile"] == profile
    np.testing.assert_array_equal(load_image(with_profile).pixels, plain.pixels)


FRAMES = [COLOUR, COLOUR[::-1], COLOUR[:, ::-1]]


def animation(kind):
    settings = {"WEBP": {"lossless": True}, "GIF": {"duration": 10}}.get(kind, {})
    frames = [Image.fromarray(pixels) for pixels in FRAMES]  # new ones: a writer leaves settings on what it has written
    if kind == "GIF":
        frames = [frame.quantize(64, dither=Image.Dither.NONE) for frame in frames]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **settings)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_the_first_frame_is_taken_and_the_others_are_counted(kind):
    data = animation(kind)
    image = load_image(data)
    assert (image.format, image.frames) == (kind, 3)
    first = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(image.pixels, np.asarray(first))
    np.testing.assert_array_equal(load_image(Image.open(io.BytesIO(data))).pixels, image.pixels)
    if kind != "MPO":  # which holds JPEG
        np.testing.assert_array_equal(image.pixels, COLOUR)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_a_pil_image_is_taken_at_the_frame_where_it_stands(kind):
    image = Image.open(io.BytesIO(animation(kind)))
    image.seek(2)
    loaded = load_image(image)
    np.testing.assert_array_equal(loaded.pixels, COLOUR[:, ::-1])
    assert loaded.frames == 1 and image.tell() == 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_too_many_frames(kind):
    data = animation(kind)
    assert load_image(data, ImagePolicy(max_frames=3)).frames == 3
    with pytest.raises(ImageLimitError, match=r"has 3 frames or more.*max_frames=2") as caught:
        load_image(data, ImagePolicy(max_frames=2))
    assert (caught.value.limit, caught.value.value, caught.value.bound) == ("max_frames", 3, 2)


def test_a_picture_that_was_opened_and_its_file_closed(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(COLOUR).save(path)
    with Image.open(path) as loaded:
        loaded.load()
    np.testing.assert_array_equal(load_image(loaded).pixels, COLOUR)
    with Image.open(path) as lazy:
        pass
    with pytest.raises(ImageDecodeError, match="closed"):
        load_image(lazy)
    closed = Image.fromarray(COLOUR)
    closed.close()
    with pytest.raises(ImageError):
        load_image(closed)


def test_nothing_is_read_afterwards(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(COLOUR).save(path)
    lazy, array = Image.open(path), COLOUR.copy()
    from_path, from_lazy, from_array = load_image(path), load_image(lazy), load_image(array)
    path.unlink()
    lazy.close()
    array[:] = 0
    for image in (from_path, from_lazy, from_array):
        np.testing.assert_array_equal(image.pixels, COLOUR)


def test_the_source_is_left_as_it_was():
    for source in (palette(FEW_ALPHAS.tobytes()), RGBA.copy(), with_info(Image.fromarray(DEEP), transparency=3)):
        source.getexif()[274] = 6
        before = source.mode, source.size, dict(source.info), source.tobytes(), dict(source.getexif())
        load_image(source)
        assert (source.mode, source.size, dict(source.info), source.tobytes(), dict(source.getexif())) == before


def test_nobody_can_write_into_pixels():
    array = COLOUR.copy()
    image = RgbImage(array)
    array[:] = 0
    for held in (image, pickle.loads(pickle.dumps(image)), load_image(GREY)):
        with pytest.raises(ValueError):
            held.pixels[0, 0, 0] = 1
        with pytest.raises(ValueError):
            held.pixels.flags.writeable = True
    np.testing.assert_array_equal(image.pixels, COLOUR)


def test_pickling_keeps_every_field():
    image = load_image(animation("WEBP"))
    again = pickle.loads(pickle.dumps(image))
    assert (again.mode, again.format, again.frames) == ("RGB", "WEBP", 3)
    np.testing.assert_array_equal(again.pixels, image.pixels)


def test_a_loaded_image_comes_back_if_it_is_within_the_limits():
    image = load_image(COLOUR)
    assert load_image(image) is image
    with pytest.raises(ImageLimitError, match="max_side=8"):
        load_image(image, ImagePolicy(max_side=8))


def bands(height, width):
    """A picture whose ends along its longer side are red and blue."""
    pixels = np.zeros((height, width, 3), np.uint8)
    longer = pixels if height > width else pixels.transpose(1, 0, 2)
    longer[: len(longer) // 2, :, 0] = 255
    longer[len(longer) // 2 :, :, 2] = 255
    return RgbImage(pixels)


@pytest.mark.parametrize("shape", [(4, 8), (8, 4)])
def test_padding_keeps_everything(shape):
    image = bands(*shape)
    square = fit(image, 8, POLICY)
    tall = square.pixels if shape == (4, 8) else square.pixels.transpose(1, 0, 2)
    kept = image.pixels if shape == (4, 8) else image.pixels.transpose(1, 0, 2)
    np.testing.assert_array_equal(tall[2:6], kept)
    assert (tall[[0, 1, 6, 7]] == BACKGROUND).all()


@pytest.mark.parametrize("shape", [(4, 8), (8, 4)])
def test_cropping_keeps_the_middle(shape):
    image = bands(*shape)
    square = fit(image, 4, ImagePolicy(resize="crop"))
    middle = image.pixels[:, 2:6] if shape == (4, 8) else image.pixels[2:6]
    np.testing.assert_array_equal(square.pixels, middle)


@pytest.mark.parametrize("resize", ["pad", "crop", "squash"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 8), (8, 4), (4, 256), (7, 5)])
@pytest.mark.parametrize("side", [1, 4, 9])
def test_fit_is_square_whatever_the_shape(resize, shape, side):
    square = fit(bands(*shape), side, ImagePolicy(resize=resize))
    assert square.pixels.shape == (side, side, 3)


def test_the_table_of_orientations_agrees_with_pillow():
    """``SEEN`` is ours; Pillow's own transposition of one asymmetric picture must agree with it."""
    methods = {5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90}
    for orientation, method in methods.items():
        np.testing.assert_array_equal(np.asarray(Image.fromarray(COLOUR).transpose(method)), SEEN[orientation](COLOUR))


def test_the_path_is_named(tmp_path):
    with pytest.raises(ImageSourceError, match=r"nowhere\.png"):
        load_image(Path(tmp_path / "nowhere.png"))
