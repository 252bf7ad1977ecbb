"""What each score of images' tokens, and each way of dividing a share, says of tensors that are worked out here."""

from types import SimpleNamespace

import pytest
import torch

from octavo.core.compression.interfaces import ItemTokens
from octavo.core.interfaces import LayerTraits
from octavo.sparse.cls_attention import EncoderScores
from octavo.sparse.fastv import LayerAttention
from octavo.sparse.pyramid_drop import StageAttention, StageShares
from octavo.sparse.sparse_vlm import RankShares, RaterAttention
from octavo.sparse.text_attention import by_position, text_attention
from octavo.sparse.visual_shares import EvenShares, spread
from octavo.sparse.vl_cache import PostVisionAttention, SparsityShares

LAYERS, HEADS, GROUP, DIM, TOKENS = 8, 2, 3, 4, 20
ITEMS = ItemTokens(2, 7, 4), ItemTokens(9, 15, 4)
IMAGE = [*range(2, 7), *range(9, 15)]
WINDOW = 8  # of which five tokens stand behind the last image


class Sequence:
    """``Context`` of 20 tokens with two images in 8 layers; ``sharp`` makes attention of each layer sharper."""

    tokens, open_tokens, page_tokens, items = TOKENS, 0, 4, ITEMS
    layers = tuple(range(LAYERS))
    spec = SimpleNamespace(layers=LAYERS)

    def __init__(self, window=WINDOW, sharp=(1.0,) * LAYERS):
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(LAYERS, HEADS, TOKENS, DIM, generator=generator)
        queries = torch.randn(LAYERS, WINDOW, HEADS * GROUP, DIM, generator=generator)
        self.queries = queries[:, WINDOW - window :] * torch.tensor(sharp)[:, None, None, None]
        self.said = [torch.arange(5.0), torch.arange(6.0) * 10]

    def layer(self, number):
        positions = torch.arange(TOKENS).expand(HEADS, -1)
        return SimpleNamespace(
            layer=number, traits=LayerTraits(0.5), positions=positions, keys=self.keys[number],
            values=self.keys[number], queries=self.queries[number], carried=torch.zeros(HEADS, TOKENS),
        )  # fmt: skip

    def item_scores(self, number):
        return self.said[number]

    def attention(self, layer):
        """fp32 [Hkv, g, w, N], row by row."""
        queries = self.queries[layer]
        rows = torch.zeros(HEADS, GROUP, len(queries), TOKENS)
        for head in range(HEADS):
            for member in range(GROUP):
                for row, query in enumerate(queries[:, head * GROUP + member]):
                    seen = TOKENS - len(queries) + row + 1
                    rows[head, member, row, :seen] = (self.keys[layer, head, :seen] @ query * 0.5).softmax(0)
        return rows


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_fastv_takes_the_last_token_s_attention_of_one_layer():
    context = Sequence(window=1)
    expected = context.attention(1)[:, :, -1].mean((0, 1)).expand(HEADS, -1)
    for layer in (2, 7):
        close(LayerAttention(1).score(context.layer(layer), context), expected)


def test_pyramid_drop_takes_the_first_layer_of_each_stage():
    context = Sequence(window=1)
    for layer, source in ((2, 2), (3, 2), (4, 4), (7, 6)):
        expected = context.attention(source)[:, :, -1].mean((0, 1)).expand(HEADS, -1)
        close(StageAttention(4).score(context.layer(layer), context), expected)


def test_vl_cache_adds_up_what_the_text_behind_the_images_attends_to():
    context = Sequence()
    expected = context.attention(3)[:, :, -5:].sum(2).mean(1)  # tokens 15 to 19
    close(PostVisionAttention(WINDOW).score(context.layer(3), context), expected)
    assert text_attention(context.layer(3), context).shape[2] == 5


def test_sparse_vlm_lets_the_words_that_look_at_images_rate():
    context = Sequence()
    rows = context.attention(3)[:, :, -5:].mean((0, 1))  # [5, N]
    mass = rows[:, IMAGE].sum(1)
    raters = [row for row in range(5) if mass[row] >= mass.mean()]
    assert 0 < len(raters) < 5
    expected = torch.zeros(TOKENS)
    expected[IMAGE] = rows[raters][:, IMAGE].mean(0)
    close(RaterAttention(WINDOW).score(context.layer(3), context), expected.expand(HEADS, -1))


def test_the_encoder_s_scores_are_those_of_its_own_tokens():
    context = Sequence()
    scores = EncoderScores().score(context.layer(0), context)
    assert (
        scores[:, 2:7].tolist() == [[0, 1, 2, 3, 4]] * 2 and scores[:, 9:15].tolist() == [[0, 10, 20, 30, 40, 50]] * 2
    )


def test_what_a_head_has_dropped_before_gets_nothing():
    context = Sequence(window=1)
    layer = context.layer(0)
    layer.positions = torch.tensor([[*range(3, 20), -1, -1, -1], [*range(20)]])
    attention = torch.ones(HEADS, GROUP, 1, TOKENS)
    attention[0, :, :, 17:] = 0
    found = by_position(attention, layer, context)
    assert found[0, :3].tolist() == [0.5] * 3 and found[0, 3:].tolist() == [1.0] * 17


class TestShares:
    def test_even(self):
        assert EvenShares(0.3).of_layers(Sequence(), [1, 2, 5]) == [0.3] * 3

    @pytest.mark.parametrize("share", [0.05, 0.29167, 0.5, 1])
    def test_stages(self, share):
        shares = StageShares(share).of_layers(Sequence(), range(8))
        assert shares[:2] == [1.0, 1.0] and shares[2::2] == shares[3::2]
        assert sum(shares[2:]) / 6 == pytest.approx(share, abs=1e-9)
        assert shares[4] == pytest.approx(shares[2] ** 2) and shares[6] == pytest.approx(shares[2] ** 3)
        if share == 0.29167:  # the paper's 0.5, 0.25, 0.125
            assert shares[2] == pytest.approx(0.5, abs=1e-4)

    def test_layers_whose_attention_is_sparse_keep_less(self):
        context = Sequence(sharp=(1, 1, 1, 1, 30, 30, 30, 30))
        shares = SparsityShares(0.4, WINDOW).of_layers(context, range(8))
        assert sum(shares) / 8 == pytest.approx(0.4, abs=1e-6)
        assert max(shares[4:]) < min(shares[:4])
        rows = context.attention(5)[:, :, -5:]
        dense = torch.stack([
            (rows[..., row, : 16 + row] >= 0.01 * rows[..., row, :].amax(2, keepdim=True)).float().mean(2)
            for row in range(5)
        ]).mean()  # fmt: skip
        assert SparsityShares(0.4, WINDOW)._density(context.layer(5), context) == pytest.approx(float(dense), abs=1e-6)

    def test_ranks_divide_a_share(self):
        context = Sequence()
        ranks = []
        for layer in range(8):
            rows = context.attention(layer)[:, :, -5:].mean((0, 1))[:, IMAGE]
            raters = rows[rows.sum(1) >= rows.sum(1).mean() - 1e-9]
            ranks.append(int((torch.linalg.svdvals(raters.double()) > 1e-6).sum()))
        assert max(ranks) > 1
        assert RankShares(0.4, WINDOW).of_layers(context, range(8)) == pytest.approx(spread(ranks, 0.4, 0.04))

    @pytest.mark.parametrize(
        ("weights", "mean", "least", "expected"),
        [
            ([1, 3], 0.5, 0.0, [0.25, 0.75]),
            ([1, 9], 0.75, 0.0, [0.5, 1.0]),  # no layer keeps more than all
            ([0, 1], 0.5, 0.2, [0.2, 0.8]),  # or less than the least
            ([0, 0], 0.3, 0.0, [0.3, 0.3]),
            ([5, 5], 1.0, 0.1, [1.0, 1.0]),
            ([0, 1], 0.05, 0.2, [0.05, 0.05]),  # the least is no more than the mean
        ],
    )
    def test_spread(self, weights, mean, least, expected):
        assert spread(weights, mean, least) == pytest.approx(expected, abs=1e-6)
