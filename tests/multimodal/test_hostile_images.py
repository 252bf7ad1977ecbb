"""Files that are broken, or made to break something: each is a typed error, before anything large is decoded."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from octavo.multimodal import (
    ImageDecodeError,
    ImageError,
    ImageFormatError,
    ImageLimitError,
    ImagePolicy,
    ImageSourceError,
    load_image,
)

# Pillow warns of large and of damaged files, which is what these are.
pytestmark = pytest.mark.filterwarnings("ignore")

rng = np.random.default_rng(1)
COLOUR = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
NOISE = rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)
SMALL = ImagePolicy(max_pixels=4_096, max_bytes=65_536)


def encoded(pixels, kind, more=(), **settings):
    first, *rest = (Image.fromarray(frame) for frame in (pixels, *more))
    file = io.BytesIO()
    if rest:
        settings.update(save_all=True, append_images=rest)
    first.save(file, kind, **settings)
    return file.getvalue()


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width, height, *, data=b"\0" * 64, depth=8, colour=2, extra=()):
    """A PNG file whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def gif(width, height, frame_width, frame_height):
    """A GIF file of one frame, which may be larger than its canvas."""
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, frame_width, frame_height) + b"\0\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + frame + b";"


FILES = {
    "PNG": encoded(COLOUR, "PNG"),
    "APNG": encoded(COLOUR, "PNG", [COLOUR[::-1]]),
    "JPEG": encoded(COLOUR, "JPEG"),
    "JPEG of many blocks": encoded(NOISE, "JPEG", quality=30),
    "JPEG progressive": encoded(COLOUR, "JPEG", progressive=True),
    "MPO": encoded(COLOUR, "MPO", [COLOUR[::-1]]),
    "GIF": encoded(COLOUR, "GIF"),
    "GIF animated": encoded(COLOUR, "GIF", [COLOUR[::-1]]),
    "WEBP": encoded(COLOUR, "WEBP"),
    "WEBP lossless": encoded(COLOUR, "WEBP", lossless=True),
    "WEBP animated": encoded(COLOUR, "WEBP", [COLOUR[::-1]]),
    "BMP": encoded(COLOUR, "BMP"),
    "TIFF": encoded(COLOUR, "TIFF"),
    "TIFF LZW": encoded(COLOUR, "TIFF", compression="tiff_lzw"),
    "TIFF pages": encoded(COLOUR, "TIFF", [COLOUR[::-1]]),
    "PPM": encoded(COLOUR, "PPM"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_never_gives_other_pixels(name):
    """Cut at every byte: an error, or (where only a trailer or a later frame is gone) the very same picture."""
    data = FILES[name]
    whole = load_image(data, SMALL).pixels
    refused = 0
    for length in range(len(data)):
        try:
            pixels = load_image(data[:length], SMALL).pixels
        except (ImageDecodeError, ImageFormatError):
            refused += 1
        else:
            np.testing.assert_array_equal(pixels, whole)
    assert refused > len(data) / 3


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_raises_nothing_but_image_errors(name):
    data = bytearray(FILES[name])
    for place in range(len(data)):
        for damage in (0xFF, 0x01):
            data[place] ^= damage
            try:
                image = load_image(data, SMALL)
                assert image.width * image.height <= SMALL.max_pixels
            except ImageError:
                pass
            data[place] ^= damage


@given(st.sampled_from([data[:8] for data in FILES.values()]), st.binary(max_size=200))
def test_noise_behind_a_good_beginning_raises_nothing_but_image_errors(beginning, noise):
    with pytest.raises(ImageError):
        load_image(beginning + noise, SMALL)


@pytest.mark.parametrize("name", FILES)
def test_the_name_of_a_file_does_not_matter(name, tmp_path):
    expected = load_image(FILES[name]).pixels
    for ending in (".jpg", ".png", ".eps", ".txt", ""):
        path = tmp_path / f"picture{ending}"
        path.write_bytes(FILES[name])
        np.testing.assert_array_equal(load_image(path).pixels, expected)


NO_FORMAT = {
    "empty": b"",
    "one byte": b"\x89",
    "zeros": bytes(1000),
    "text": b"not an image at all",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="6"><rect width="9" height="6"/></svg>',
    "HTML": b"<html><body>404</body></html>",
    "PDF": b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n",
    "zip": b"PK\x03\x04" + bytes(30),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(30),
}


@pytest.mark.parametrize("name", NO_FORMAT)
def test_bytes_of_no_format_say_how_they_begin(name):
    with pytest.raises(ImageFormatError) as caught:
        load_image(NO_FORMAT[name])
    assert repr(NO_FORMAT[name][:12]) in str(caught.value) and "PNG" in str(caught.value)


@pytest.fixture
def no_decoding(monkeypatch):
    """From here on it is a failure to decode anything."""
    touched = []

    def decode(*args, **kwargs):
        touched.append(args)
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    yield
    assert not touched


TALL, WIDE, HUGE = (1, 100_000), (100_000, 1), (12_000, 12_000)
BEYOND = {
    # name: (source, limit, value)
    "zero sides": (png(0, 0), None, None),
    "zero height": (png(5, 0), None, None),
    "1 x 1": (png(1, 1), "min_side", 1),
    "1 x 100,000": (png(*TALL), "min_side", 1),
    "100,000 x 1": (png(*WIDE), "min_side", 1),
    "3000 x 2": (png(3_000, 2), "min_side", 2),
    "long": (png(16_385, 4_000), "max_side", 16_385),
    "bomb": (png(*HUGE), "max_pixels", 144_000_000),
    "just too many": (png(8_000, 4_001), "max_pixels", 32_008_000),
    "aspect": (png(4, 257), "max_aspect", 64.25),
    "bomb beyond Pillow's limit": (png(20_000, 20_000), "max_pixels", None),
    "the largest header": (png(2**31 - 1, 2**31 - 1), "max_pixels", None),
    "bomb gif": (gif(65_535, 2_000, 8, 8), "max_side", 65_535),
    "bomb gif frame": (gif(8, 8, 9_000, 9_000), "max_pixels", 81_000_000),
    "bomb bmp": (b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 9_000, 9_000, 1, 24, 0, 0, 0, 0, 0, 0),
                 "max_pixels", 81_000_000),
    "bomb ppm": (b"P6 9000 9000 255\n", "max_pixels", 81_000_000),
    "many bytes": (bytes((20 << 20) + 1), "max_bytes", (20 << 20) + 1),
    "array 0 x 5": (np.zeros((0, 5, 3), np.uint8), "min_side", 0),
    "array 1 x 2000": (np.zeros((1, 2_000, 3), np.uint8), "min_side", 1),
    "array bomb": (np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (12_000, 12_000, 3)), "max_pixels", 144_000_000),
    "PIL 0 x 5": (Image.new("RGB", (5, 0)), "min_side", 0),
    "PIL long": (Image.new("1", (16_385, 300)), "max_side", 16_385),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_limits_come_before_decoding(name, no_decoding):
    source, limit, value = BEYOND[name]
    if limit is None:  # a decoder that refuses empty pictures itself
        with pytest.raises(ImageError):
            load_image(source)
        return
    with pytest.raises(ImageLimitError) as caught:
        load_image(source)
    assert (caught.value.limit, caught.value.value) == (limit, value)
    assert f"{limit}={caught.value.bound:,}" in str(caught.value)
    if isinstance(value, int):
        assert f"{value:,}" in str(caught.value)


def test_a_lazy_pil_image_is_measured_before_it_is_decoded(no_decoding):
    lazy = Image.open(io.BytesIO(png(*HUGE)))
    with pytest.raises(ImageLimitError, match="144,000,000 pixels; the limit is max_pixels=32,000,000"):
        load_image(lazy)


def test_warnings_that_are_errors_change_nothing():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageLimitError):
            load_image(png(*HUGE))


def test_limits_are_inclusive():
    policy = ImagePolicy(min_side=6, max_side=9, max_pixels=54, max_aspect=1.5, max_bytes=len(FILES["PNG"]))
    assert load_image(FILES["PNG"], policy).pixels.shape == (6, 9, 3)


def test_a_header_that_promises_more_than_there_is():
    for size in [(64, 64), (4_000, 4_000)]:
        with pytest.raises(ImageDecodeError):
            load_image(png(*size))


def test_compressed_metadata_that_unpack_to_a_lot():
    bomb = zlib.compress(bytes(100 << 20), 9)
    for name, content in [(b"zTXt", b"a\0\0" + bomb), (b"iCCP", b"a\0\0" + bomb), (b"iTXt", b"a\0\1\0\0\0" + bomb)]:
        rows = b"".join(b"\0" + row.tobytes() for row in COLOUR)
        data = png(9, 6, data=rows, extra=[(name, content)])
        try:
            np.testing.assert_array_equal(load_image(data).pixels, COLOUR)
        except ImageDecodeError as error:
            assert "too large" in str(error).lower()


def test_directories_that_go_in_circles():
    """A TIFF file whose second page is its first, and one with pages without end are both left soon."""
    tags = [(256, 3, 9), (257, 3, 6), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (278, 3, 6), (279, 4, 54)]

    def pages(follow):
        table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, kind, 1, v) for t, kind, v in tags)
        size = len(table) + 4
        return b"II*\0" + struct.pack("<I", 62) + bytes(54) + b"".join(
            table + struct.pack("<I", 62 + follow(i) * size) for i in range(60)
        )  # fmt: skip

    assert load_image(pages(lambda i: 0)).frames == 1
    with pytest.raises(ImageLimitError, match="max_frames=50"):
        load_image(pages(lambda i: (i + 1) % 60), ImagePolicy(max_frames=50))


@pytest.fixture
def no_programs(monkeypatch):
    """From here on it is a failure to start a program."""
    started = []

    def start(*args, **kwargs):
        started.append(args)
        raise OSError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "system", start)
    yield
    assert not started


def test_no_decoder_runs_a_program(no_programs, tmp_path):
    """Pillow hands EPS to Ghostscript when it decodes it, so it is refused as bytes, as a file and as a lazy image."""
    data = encoded(COLOUR, "EPS")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    lazy = Image.open(io.BytesIO(data))
    assert lazy.format == "EPS"
    for source in (data, path):
        with pytest.raises(ImageFormatError, match="%!PS-Adobe"):
            load_image(source)
    with pytest.raises(ImageFormatError, match=r"EPS file.*convert\('RGB'\)"):
        load_image(lazy)


def test_formats_that_are_not_decoded_here_can_be_given_converted():
    lazy = Image.open(io.BytesIO(encoded(COLOUR, "TGA")))
    with pytest.raises(ImageFormatError, match="TGA"):
        load_image(lazy)
    np.testing.assert_array_equal(load_image(lazy.convert("RGB")).pixels, COLOUR)


@pytest.mark.parametrize(
    "url", ["http://a.b/c.png", "HTTPS://a.b/c.png", "ftp://a/b", "file:///etc/hostname", "data:image/png;base64,AAAA"]
)
def test_urls_are_never_fetched(url, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(ImageSourceError, match="is a URL, and none is ever fetched"):
        load_image(url)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file(tmp_path, monkeypatch):
    """It is not even opened: opening a device may do something."""
    opened = []
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(path))
    fifo, folder, loop, sock = (tmp_path / name for name in ("fifo", "folder", "loop", "socket"))
    os.mkfifo(fifo)
    folder.mkdir()
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sock))
        for path in (fifo, folder, loop, sock, "/dev/zero", "/dev/null", "/dev/stdin/x", tmp_path / "none"):
            with pytest.raises(ImageSourceError, match=r"is not a regular file|cannot be read"):
                load_image(path)
    assert not opened


@pytest.mark.parametrize("path", ["", "a\0b.png", "x" * 5_000, "\ud800.png", "/proc/self/mem"], ids=repr)
def test_paths_that_cannot_be_opened(path):
    with pytest.raises(ImageError):
        load_image(path)


def test_a_file_without_permission(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(FILES["PNG"])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ImageSourceError, match="Permission denied"):
        load_image(path)


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # all hole
    with pytest.raises(ImageLimitError, match="1,099,511,627,776 bytes; the limit is max_bytes=20,971,520"):
        load_image(path)


def test_a_file_that_claims_no_size_is_read_no_further_than_allowed():
    with pytest.raises(ImageLimitError) as caught:
        load_image("/proc/self/maps", ImagePolicy(max_bytes=64))
    assert (caught.value.limit, caught.value.value) == ("max_bytes", 65)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("put", "words"),
    [
        (lambda path: path.symlink_to(path.with_name("secret.png")), "cannot be read"),
        (os.mkfifo, "not a regular file"),
    ],
    ids=["link", "fifo"],
)
def test_what_takes_the_place_of_a_file_before_it_is_opened_is_noticed(put, words, tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    for each in (path, tmp_path / "secret.png"):
        each.write_bytes(FILES["PNG"])
    really_open = os.open

    def swapped(name, flags):
        path.unlink()
        put(path)
        return really_open(name, flags)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(ImageSourceError, match=words):
        load_image(path)


class TestAllowedRoot:
    @pytest.fixture
    def folders(self, tmp_path):
        inside, outside = tmp_path / "in", tmp_path / "in_not"  # a prefix of the name, and not of the path
        for folder in (inside, outside):
            folder.mkdir()
            (folder / "a.png").write_bytes(FILES["PNG"])
        return inside, outside

    def test_inside(self, folders, monkeypatch):
        inside, _ = folders
        (inside / "link.png").symlink_to(inside / "a.png")
        policy = ImagePolicy(allowed_root=str(inside))
        for path in (inside / "a.png", inside / "link.png", inside / ".." / "in" / "a.png"):
            assert load_image(path, policy).width == 9
        monkeypatch.chdir(inside)
        assert load_image("a.png", policy).width == 9

    def test_outside(self, folders):
        inside, outside = folders
        (inside / "link.png").symlink_to(outside / "a.png")
        policy = ImagePolicy(allowed_root=inside)
        for path in (outside / "a.png", inside / "link.png", inside / ".." / "in_not" / "a.png", outside / "missing"):
            with pytest.raises(ImageSourceError, match=r"lies outside of allowed_root="):
                load_image(path, policy)
