"""Placeholders in texts and in chat templates. A real tokenizer of words, made here."""

import pytest

from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal.image_prompts import chat_prompt, image_prompt

WORDS = ["<s>", "</s>", "<unk>", "USER:", "ASSISTANT:", "a", "b", "c", "system:"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper + ': ' }}{% for part in m.content %}"
    "{{ '<image> ' if part.type == 'image' else part.text + ' ' }}{% endfor %}{% endfor %}"
    "{{ 'ASSISTANT:' if add_generation_prompt else '' }}"
)


def tokenizer(template=TEMPLATE, image=True, bos=True):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    if image:
        made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.chat_template = template
    return made


def plain(prompt):
    return [list(part.token_ids) if isinstance(part, TokenSegment) else part for part in prompt]


ONE, TWO = object(), object()


@pytest.mark.parametrize(
    ("text", "images", "wanted"),
    [
        ("a <image> b <image> c", [ONE, TWO], [[0, 5], ONE, [6], TWO, [7]]),
        ("<image><image>", [TWO, ONE], [[0], TWO, ONE]),
        ("<image> a <image>", [ONE, ONE], [[0], ONE, [5], ONE]),
        ("a b", [], [[0, 5, 6]]),
    ],
)
def test_images_stand_where_placeholders_stood(text, images, wanted):
    assert plain(image_prompt(tokenizer(), text, images)) == wanted


def test_special_tokens_only_on_request():
    assert plain(image_prompt(tokenizer(), "a <image>", [ONE], add_special_tokens=False)) == [[5], ONE]
    assert plain(image_prompt(tokenizer(bos=False), "<image> a", [ONE])) == [ONE, [5]]


@pytest.mark.parametrize("images", [[], [ONE], [ONE] * 3])
def test_each_placeholder_needs_an_image(images):
    with pytest.raises(ValueError, match=f"2 placeholders '<image>', and there are {len(images)} images"):
        image_prompt(tokenizer(), "<image> a <image>", images)


def test_a_placeholder_is_one_token():
    with pytest.raises(ValueError, match="'<im a>' is 2 tokens"):
        image_prompt(tokenizer(), "a", [], placeholder="<im a>")


def test_a_placeholder_that_the_tokenizer_does_not_know():
    with pytest.raises(ValueError, match="'<image>' is unknown to the tokenizer"):
        image_prompt(tokenizer(image=False), "b <image>", [ONE])


def user(*parts):
    return {"role": "user", "content": list(parts)}


def text(content):
    return {"type": "text", "text": content}


def image(content):
    return {"type": "image", "image": content}


def test_messages_in_the_chat_template():
    messages = [user(text("a"), image(ONE), text("b")), {"role": "assistant", "content": "c"}, user(image(TWO))]
    wanted = [[0, 3, 5], ONE, [6, 4, 7, 3], TWO, [4]]
    assert plain(chat_prompt(tokenizer(), messages)) == wanted
    assert plain(chat_prompt(tokenizer(), messages[:2], add_generation_prompt=False)) == [[0, 3, 5], ONE, [6, 4, 7]]


def test_a_template_that_begins_with_the_special_token_gets_no_second():
    assert plain(chat_prompt(tokenizer("<s> " + TEMPLATE), [user(text("a"))])) == [[0, 3, 5, 4]]


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([user(text("a"))], None, "need a tokenizer with a chat template"),
        ([user(text("see <image>"))], TEMPLATE, "text holds the placeholder '<image>': 'see <image>'"),
        ([user({"type": "video", "video": 1})], TEMPLATE, "got type 'video' with 'type', 'video'"),
        ([user({"type": "image"})], TEMPLATE, "got type 'image' with 'type'"),
        ([user(image(ONE))], "{{ 'a' }}", "0 placeholders '<image>', and there are 1 images"),
    ],
)
def test_messages_that_are_none(messages, template, message):
    with pytest.raises(ValueError, match=message):
        chat_prompt(tokenizer(template), messages)
