"""What bad and odd input gets, from the prompt to the answer: a typed error for its own request before it takes a page,
or the right answer."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from octavo.core import BatchError, CapacityError, Engine, EngineConfig, SamplingParams, TokenSegment
from octavo.multimodal import (
    EncodeWorker,
    ImageDecodeError,
    ImageFormatError,
    ImageLimitError,
    ImagePolicy,
    ImageSourceError,
    chat_prompt,
    image_prompt,
)

from .patch_tower import patch_encoder

GRID = (2, 2)
IMAGE = 4


def text(n, seed=0):
    return TokenSegment("text", np.random.default_rng(seed).integers(3, 128, n).tolist())


def picture(seed, height=32, width=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def solid(*colour):
    return Image.new("RGB", (32, 32), colour)


def file(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def params(tokens=4, **more):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def encoder():
    return patch_encoder(GRID, 64)


@pytest.fixture
def served(t_model, encoder, poison_pool):
    def build(images=encoder, tokenizer=None, model=t_model, **fields):
        fields = {"page_policies": {"text": 4, "image": 4}, "pool_tokens": 400, "max_seqs": 8, **fields}
        engine = Engine(
            model, tokenizer, EngineConfig(**{"backend": "reference", **fields}), encoders={"image": images}
        )
        poison_pool(engine)
        return engine

    return build


def tokens(engine, prompt, **more):
    return engine.generate([prompt], params(**more))[0].samples[0].token_ids


RGB = Image.fromarray(picture(1))
PNG = file(RGB, "PNG")
JPEG = file(RGB, "JPEG")

BROKEN = {
    "a truncated JPEG": (JPEG[: len(JPEG) // 2], ImageDecodeError),
    "a truncated PNG": (PNG[:-200], ImageDecodeError),
    "an empty file": (b"", ImageFormatError),
    "text": (b"not a picture at all", ImageFormatError),
    "a missing file": (Path("no/such/file.png"), ImageSourceError),
    "a folder": (Path("."), ImageSourceError),
    "1 x 1": (picture(1, 1, 1), ImageLimitError),
    "1 x 2000": (picture(1, 2000, 1), ImageLimitError),
    "0 x 5": (Image.new("RGB", (0, 5)), ImageLimitError),
    "an array of 0 x 5": (np.zeros((0, 5, 3), np.uint8), ImageLimitError),
    "a bomb": (file(Image.new("1", (12_000, 12_000)), "PNG"), ImageLimitError),
    "floats": (np.zeros((32, 32, 3), np.float32), ImageFormatError),
    "Pillow's floats": (Image.new("F", (32, 32)), ImageFormatError),
    "too many bytes": (b"\x89PNG" + bytes(21 << 20), ImageLimitError),
    "a picture that is no picture": (object(), ImageSourceError),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("bad, error", BROKEN.values(), ids=BROKEN)
def test_a_broken_image_fails_its_own_request(bad, error, served):
    engine = served()
    good = [text(5), picture(2)]
    before = engine.stats()
    with pytest.raises(error):
        engine.submit([text(3), bad])
    session = engine.session([text(5)])
    with pytest.raises(error):
        session.append([bad])
    with pytest.raises(error):
        engine.score([bad], [5])
    assert engine.stats() == before and not engine.has_work()
    with pytest.raises(BatchError) as caught:
        engine.generate([good, [bad, text(2)], good], params())
    assert [type(e) for e in caught.value.errors.values()] == [error] and list(caught.value.errors) == [1]
    want = tokens(served(), good)
    assert [one and one.samples[0].token_ids for one in caught.value.completions] == [want, None, want]
    engine.check()


GREY = RGB.convert("L")
ODD = {
    "opaque RGBA": RGB.convert("RGBA"),
    "a PNG called .jpg": "picture.jpg",
    "encoded": PNG,
    "a bytearray": bytearray(PNG),
    "an array": np.asarray(RGB),
    "an array with odd strides": np.asfortranarray(np.asarray(RGB)),
}


@pytest.mark.parametrize("name", ODD)
def test_the_same_picture_gives_the_same_answer(name, served, tmp_path):
    given = ODD[name]
    if isinstance(given, str):
        (tmp_path / given).write_bytes(PNG)
        given = tmp_path / given
    assert tokens(served(), [text(5), given, text(2)]) == tokens(served(), [text(5), RGB, text(2)])


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "I"], ids=lambda mode: mode
)
def test_odd_modes_are_served(mode, served):
    """The rules for pixels are tested where images are read; here, that such an image is as good as any other."""
    if mode in ("I;16", "I"):
        image = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257).convert(mode)
    elif mode == "PA":
        image = RGB.convert("P").convert("PA")
    else:
        image = RGB.convert(mode)
    engine = served()
    done = engine.generate([[text(5), image, text(2)]], params())[0]
    assert len(done.samples[0].token_ids) == 4 and len(done.prompt_token_ids) == 5 + IMAGE + 2


def test_a_quarter_turn_in_exif_is_a_quarter_turn(served):
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(picture(1, 32, 48))
    turned = file(image, "PNG", exif=exif)
    assert tokens(served(), [turned, text(2)]) == tokens(served(), [image.rotate(-90, expand=True), text(2)])
    assert tokens(served(), [turned, text(2)]) != tokens(served(), [image, text(2)])


class TestSharing:
    def test_300_images_under_one_text(self, served):
        """No hit goes beyond the text in front of the image; the same image again is found whole."""
        engine, plain = served(pool_tokens=8000), served(prefix_cache=False)
        prompts = [[text(8), picture(100 + i), text(3, 1)] for i in range(300)]
        for start in range(0, 300, 50):
            batch = prompts[start : start + 50]
            found, wanted = engine.generate(batch, params(2)), plain.generate(batch, params(2))
            assert [one.samples for one in found] == [one.samples for one in wanted]
            assert {one.cached_tokens for one in found} <= {0, 8}
        again = engine.generate(prompts[::30], params(2))
        assert {one.cached_tokens for one in again} == {8 + IMAGE}
        engine.check()

    def test_equal_bytes_of_another_shape(self, served):
        """30 x 150 and 150 x 30: neither the answer nor a page is the other's."""
        flat = picture(7, 30, 150)
        tall = flat.reshape(150, 30, 3)
        assert flat.tobytes() == tall.tobytes()
        engine = served()
        done = [engine.generate([[text(4), one, text(2)]], params())[0] for one in (flat, tall, flat)]
        assert [one.cached_tokens for one in done] == [0, 4, 4 + IMAGE]
        assert done[0].samples == served().generate([[text(4), flat, text(2)]], params())[0].samples
        assert done[1].samples == served().generate([[text(4), tall, text(2)]], params())[0].samples
        assert done[0].samples[0].token_ids == done[2].samples[0].token_ids

    def test_another_way_of_resizing_is_another_image(self, served):
        image = picture(3, 32, 64)
        for policy in (ImagePolicy(max_side=64), ImagePolicy(max_side=32)):
            engine = served(patch_encoder(GRID, 64, policy=policy))
            if policy.max_side == 64:
                engine.generate([[image]], params(1))
            else:
                with pytest.raises(ImageLimitError):
                    engine.submit([image])

    @pytest.mark.parametrize("beside", [False, True])
    def test_the_same_image_three_times_with_room_for_one(self, beside, served, encoder):
        a, b = picture(1), picture(2)
        prompt = [text(4), a, text(4, 1), b, text(4, 2), a, text(2)]
        want = tokens(served(encode_tokens=None), prompt)
        with EncodeWorker(encoder) as worker:
            engine = served(worker if beside else encoder, encode_tokens=IMAGE)
            names = [engine.submit(prompt, params()) for _ in range(2)]
            done = engine.finish(names)
            assert [done[name].samples[0].token_ids for name in names] == [want, want]
            assert done[names[1]].cached_tokens == 4 + IMAGE + 4 + IMAGE + 4 + IMAGE
            assert not engine._items._held and engine.stats().units_held == 0

    def test_an_image_in_front_is_found_and_one_behind_another_text_is_not(self, served):
        """What lies behind an image depends on its position and on all in front: documented as a miss."""
        engine = served()
        engine.generate([[text(4), picture(1), text(8, 1)]], params(1))
        other = engine.generate([[text(4, 9), picture(1), text(8, 1)]], params(1))[0]
        assert other.cached_tokens == 0 and engine.stats().hit_tokens == 0

    def test_a_turn_that_adds_an_image_keeps_all_that_was_there(self, served):
        engine = served()
        session = engine.session([text(4), picture(1)])
        for seed in range(2, 5):
            session.generate(params(2))
            session.append([picture(seed), text(3)])
            before = len(session.tokens) - IMAGE - 3
            assert session.generate(params(2)).cached_tokens == before - 1  # all but the token that was drawn last
            engine.check()


class TestCounts:
    @pytest.fixture
    def tokenizer(self):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {word: i for i, word in enumerate(["<unk>", "<image>", "see", "and", "what", "?"])}
        backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=["<image>"]
        )

    @pytest.mark.parametrize(
        ("marks", "images", "message"),
        [
            ("see <image> and <image>", 1, "2 placeholders '<image>', and there are 1 images"),
            ("see <image>", 2, "1 placeholders '<image>', and there are 2 images"),
            ("see what ?", 1, "0 placeholders '<image>', and there are 1 images"),
            ("see <image>", 0, "1 placeholders '<image>', and there are 0 images"),
        ],
    )
    def test_both_are_named_before_a_page_is_taken(self, marks, images, message, served, tokenizer):
        engine = served(tokenizer=tokenizer)
        with pytest.raises(ValueError, match=message):
            image_prompt(tokenizer, marks, [picture(i) for i in range(images)])
        assert engine.stats().units_held_peak == 0
        assert len(tokens(engine, image_prompt(tokenizer, "see <image> ?", [picture(1)]))) == 4

    def test_text_that_looks_like_a_mark(self, served, tokenizer):
        """In a list of texts and images it is text, and takes no image; as part of a message it is refused."""
        done = served(tokenizer=tokenizer).generate([["see <image> and ", picture(1)]], params(1))[0]
        assert len(done.prompt_token_ids) == 3 + IMAGE
        tokenizer.chat_template = "{{ messages }}"
        with pytest.raises(ValueError, match="holds the placeholder '<image>'"):
            chat_prompt(tokenizer, [{"role": "user", "content": "see <image>"}])

    def test_as_many_positions_as_embeddings(self, served, encoder):
        engine = served()
        engine.submit([text(2), picture(1), picture(2), text(1)])
        (sequence,) = engine._scheduler.waiting
        spans = sequence.layout.items(0, sequence.goal)
        assert [(s.start, s.end) for s in spans] == [(2, 6), (6, 10)]
        assert [len(rows) for rows in encoder.encode([span.item.value for span in spans])] == [4, 4]

    def test_order_of_images_and_of_samples(self, served, encoder):
        """Each place gets its own image's embeddings; two samples of two requests come grouped by request."""
        red, green, blue, white = solid(255, 0, 0), solid(0, 255, 0), solid(0, 0, 255), solid(255, 255, 255)
        engine, placed = served(), []
        forward = engine._model.forward
        engine._model.forward = lambda *args: placed.append(args[4]) or forward(*args)
        tokens(engine, [red, green, text(2), blue], tokens=1)
        at, rows = placed[0]
        assert at.tolist() == [*range(8), *range(10, 14)]
        assert torch.equal(rows, torch.cat(list(encoder.encode([red, green, blue]))))
        pairs = [[red, text(2), green], [blue, text(2), white]]
        done = served().generate(pairs, params(n=2, temperature=0.8, seed=3))
        for prompt, one in zip(pairs, done, strict=True):
            alone = [tokens(served(), prompt, temperature=0.8, seed=seed) for seed in (3, 4)]
            assert [sample.token_ids for sample in one.samples] == alone
        assert tokens(served(), pairs[0]) != tokens(served(), [green, text(2), red])

    def test_requests_with_and_without_images_in_one_batch(self, served):
        prompts = [[text(5)], [picture(1)], [text(3), picture(1)], [picture(1), text(1)], [text(1)], [picture(2)] * 3]
        done = served().generate(prompts * 2, params())
        for prompt, one in zip(prompts * 2, done, strict=True):
            assert one.samples[0].token_ids == tokens(served(), prompt)
        with pytest.raises(BatchError) as caught:
            served().generate([[picture(1)], [], [""], [text(2)]], params())
        assert list(caught.value.errors) == [1, 2]


class TestSizes:
    def test_larger_than_the_context(self, served, make_llama):
        engine = served(model=make_llama(max_position_embeddings=16))
        with pytest.raises(CapacityError, match=r"20 tokens and 1 new ones are 21 tokens, and a sequence may have 16"):
            engine.submit([picture(i) for i in range(5)])
        assert engine.stats().units_held_peak == 0
        assert len(tokens(engine, [picture(0), text(2)])) == 4

    @pytest.mark.parametrize("beside", [False, True])
    def test_a_refused_request_leaves_no_trace_of_its_image(self, beside, served, encoder):
        """The same image in a short request is served; and 50 images go through room for four."""
        with EncodeWorker(encoder) as worker:
            engine = served(worker if beside else encoder, max_model_tokens=32, encode_tokens=4 * IMAGE, pool_tokens=80)
            image = picture(1)
            with pytest.raises(CapacityError):
                engine.submit([text(40), image])
            assert not engine._items._held
            assert tokens(engine, [text(2), image]) == tokens(served(), [text(2), image])
            done = engine.generate([[picture(10 + i), text(2)] for i in range(50)], params(2))
            assert len(done) == 50 and not engine._items._held
            assert engine.stats().units_held == 0
            engine.check()
